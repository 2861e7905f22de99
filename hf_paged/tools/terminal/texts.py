"""Texts that somebody else has written, a model or a server: shown and written down, never obeyed."""

from __future__ import annotations

import json
from typing import Any

# They move the cursor, change colours and ring the bell, or, the last two, turn the order of what is read around.
_CONTROLS = [code for code in (*range(32), 127, *range(0x80, 0xA0)) if chr(code) not in "\n\t"]
_CONTROLS += [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SURROGATES = range(0xD800, 0xE000)  # no encoding has them
_SHOWN = dict.fromkeys((*_CONTROLS, *_SURROGATES), "\N{REPLACEMENT CHARACTER}")
_ESCAPED = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *_SURROGATES)}


def printable(text: str) -> str:
    """Returns a text without what a terminal would obey: it shows it instead.

    Args:
        text (`str`):
            What somebody else has written.
    """
    return text.translate(_SHOWN)


def has_surrogates(text: str) -> bool:
    """Returns whether a text has halves of characters, which JSON can name, but no file or answer can hold.

    Args:
        text (`str`):
            What somebody else has written.
    """
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns JSON with letters as they are, and escaped what a terminal would obey.

    Args:
        value (`Any`):
            An answer, an entry of a file.
        indent (`int`, *optional*):
            Of each level; all is on one line by default.
    """
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(_ESCAPED)
