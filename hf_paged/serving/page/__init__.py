"""`/`: a page to chat on, and to watch the engine. One answer, made once of the files in this folder.

The page loads nothing from elsewhere and holds nothing of the server: its scripts ask the same routes as any client,
with the key that is typed in. Browsers are told to run only the scripts and styles whose hashes are in the header.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

from starlette.responses import Response

_HERE = Path(__file__).parent
# In this order they are one module: what a file needs of another is declared further up.
SCRIPTS = ("base.js", "server.js", "conversation.js", "chat.js", "pool.js", "charts.js", "engine.js", "main.js")
_ICON = "icon.svg"


def paths_of(root_path: str) -> frozenset[str]:
    """Returns the paths of the page, as the routes are found by: / and the prefix itself, without a slash.

    Args:
        root_path (`str`):
            Prefix that paths may have.
    """
    return frozenset({"/", ""} if root_path else {"/"})


async def show_page() -> Response:
    """Returns the page."""
    body, headers = assemble()
    return Response(body, media_type="text/html", headers=headers)


@functools.cache
def assemble() -> tuple[bytes, dict[str, str]]:
    """Returns the page and its headers."""
    style = _read("page.css")
    script = "\n".join(_read(name) for name in SCRIPTS)
    icon = "data:image/svg+xml;base64," + base64.b64encode(_read(_ICON).encode()).decode()
    page = _read("page.html")
    for mark, part in {"/* page.css */": style, "/* scripts */": script, "icon.svg": icon}.items():
        assert page.count(mark) == 1, f"page.html has the mark {mark!r} once"
        page = page.replace(mark, part)
    return page.encode(), _headers(style, script)


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _headers(style: str, script: str) -> dict[str, str]:
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        # A browser that knows these two refuses every way to make markup of a text, `innerHTML` among them.
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",  # a newer server has a newer page
    }


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
