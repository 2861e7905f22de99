"""Request ids: a client's own if it is harmless, a new one otherwise."""

from __future__ import annotations

import re

from ..ids import new_id
from .asgi import App, Layer, Message, Receive, Scope, Send, is_anthropic

# Nothing that means something to a log, a terminal, a header or a path.
_SAFE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,127}")


class RequestIdMiddleware(Layer):
    """Gives each request an id, as `request.state.request_id`.

    Args:
        app (`Callable`):
            The next layer.
        answer (`bool`, defaults to `False`):
            Whether answers carry it in `X-Request-Id`. Those of Anthropic's API have it in `request-id`, as its clients
            look for it.
    """

    def __init__(self, app: App, answer: bool = False):
        super().__init__(app)
        self._answer = answer

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        names = [b"x-request-id"] * self._answer + [b"request-id"] * is_anthropic(scope["path"])
        if not names:
            await self.app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *((name, request_id.encode()) for name in names)]
            await send(message)

        await self.app(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and _SAFE.fullmatch(given[0]):
        return given[0].decode()
    return new_id()
