"""Draining: once the server is told to stop, what runs may end and nothing new begins."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import overloaded
from .asgi import App, Layer, Receive, Scope, Send, refuse
from .keys import OPEN_PATHS


class Work:
    """The requests that are being answered, but for probes and watchers.

    Args:
        is_draining (`Callable[[], bool]`):
            Whether the server is stopping.
        refused (`Callable[[str], None]`, *optional*):
            Told why, for each request that is refused.
    """

    def __init__(self, is_draining: Callable[[], bool], refused: Callable[[str], None] | None = None):
        self.is_draining = is_draining
        self.refused = refused
        self.num_running = 0


class DrainingMiddleware(Layer):
    """Counts requests, and answers new ones with 503 while the server is stopping.

    Args:
        app (`Callable`):
            The next layer.
        work (`Work`):
            The count.
        retry_after (`int`, defaults to 5):
            Seconds after which another server should have taken over.
    """

    def __init__(self, app: App, work: Work, retry_after: int = 5):
        super().__init__(app)
        self._work = work
        self._retry_after = retry_after

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].rpartition("/")[2] in _PROBES:
            await self.app(scope, receive, send)
            return
        if self._work.is_draining():
            if self._work.refused is not None:
                self._work.refused("shutting_down")
            error = overloaded(
                "The server is shutting down and takes no new requests.", "shutting_down", self._retry_after
            )
            error.headers["Connection"] = "close"
            await refuse(error, scope, receive, send)
            return
        self._work.num_running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._work.num_running -= 1


# Whoever watches the engine may go on with that, and keeps nobody from leaving.
_PROBES = {path.removeprefix("/") for path in OPEN_PATHS} | {
    "metrics",
    "load",
    "get_load",
    "loads",
    "version",
    "events",
}
