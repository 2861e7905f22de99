"""Keys: every path but the open ones needs one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence

from ..errors import ApiError
from .asgi import App, Layer, Receive, Scope, Send, refuse

# What probes of a cluster ask for; it says nothing but up or down.
OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})


class KeyMiddleware(Layer):
    """Refuses requests without one of the keys (401), as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    Whether a path is open is decided by the path that the routes are found by, never by the `Host` header or a URL
    that is put together from it, and only for the very texts of `open_paths`.

    Args:
        app (`Callable`):
            The next layer.
        keys (`Sequence[str]`):
            Of which a request must carry one.
        root_path (`str`, *optional*):
            Prefix that paths may have.
        open_paths (`frozenset[str]`, defaults to `OPEN_PATHS`):
            What needs no key.
    """

    def __init__(self, app: App, keys: Sequence[str], root_path: str = "", open_paths: frozenset[str] = OPEN_PATHS):
        super().__init__(app)
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = open_paths | {root_path + path for path in open_paths}

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self._open and not self._has_key(scope):
            error = ApiError(
                401,
                "This server needs a key: send `Authorization: Bearer KEY` with one that it was started with.",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refuse(error, scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        # All are compared, with all keys, each in the same time: how long it takes says nothing about a key.
        found = [hmac.compare_digest(_digest(given), key) for given in _given_keys(scope) for key in self._digests]
        return any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _given_keys(scope: Scope) -> Iterator[bytes]:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()
        elif name == b"x-api-key":
            yield value
