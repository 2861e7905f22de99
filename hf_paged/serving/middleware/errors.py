"""Whatever a route raises becomes an answer; what is our own mistake is logged once."""

from __future__ import annotations

from ..errors import to_api_error
from .asgi import Layer, Message, Receive, Scope, Send, refuse


class ErrorMiddleware(Layer):
    """The innermost layer: a request that fails gets an error, and nothing else notices."""

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        except Exception as error:
            if started:  # all that is left is to break off
                raise
            await refuse(to_api_error(error), scope, receive, send)
