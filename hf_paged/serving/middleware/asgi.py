"""ASGI's types, and how a layer answers by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse, Response

from ..access_log import note_refusal
from ..errors import ApiError
from ..protocol.anthropic import anthropic_error

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Layer:
    """What requests pass before a route sees them; whatever else ASGI has goes past it.

    Args:
        app (`Callable`):
            The next layer.
    """

    def __init__(self, app: App):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it.

        Args:
            scope (`MutableMapping[str, Any]`):
                Of the request.
            receive (`Callable`):
                Its body.
            send (`Callable`):
                Where the answer goes.
        """
        await (self._handle if scope["type"] == "http" else self.app)(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


def error_response(error: ApiError, path: str) -> Response:
    """Returns the answer that tells a client of an error, in the form of the API that it used.

    Args:
        error (`ApiError`):
            The error.
        path (`str`):
            Of the request: Anthropic's messages have a form of their own.
    """
    note_refusal(error.code, error.param)
    body = anthropic_error(error) if is_anthropic(path) else error.body()
    return JSONResponse(body, error.status, error.headers)


def is_anthropic(path: str) -> bool:
    """Returns whether a path is one of Anthropic's API.

    Args:
        path (`str`):
            Of the request.
    """
    return "/v1/messages" in path


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request with an error.

    Args:
        error (`ApiError`):
            The error.
        scope (`MutableMapping[str, Any]`):
            Of the request.
        receive (`Callable`):
            Its body.
        send (`Callable`):
            Where the answer goes.
    """
    await error_response(error, scope["path"])(scope, receive, send)


def header(scope: Scope, name: bytes) -> bytes | None:
    """Returns the first header of a name.

    Args:
        scope (`MutableMapping[str, Any]`):
            Of the request.
        name (`bytes`):
            In lower case.
    """
    return next((value for key, value in scope["headers"] if key == name), None)
