"""A request to an ASGI application in this process: what a server would answer, without one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson


async def post_json(app: Callable[..., Awaitable[None]], path: str, body: Any) -> tuple[int, str, Any]:
    """Sends a request and waits for its answer. Cancelling it is what a client's leaving is to a server.

    Args:
        app (`Callable`):
            The application.
        path (`str`):
            Where to.
        body (`Any`):
            What orjson can write.

    Returns:
        `tuple[int, str, Any]`: Status, the request's id, and the answer's body, which is JSON.
    """
    request_id = uuid.uuid4().hex
    data = orjson.dumps(body)
    headers = {"host": "127.0.0.1", "content-type": "application/json", "x-request-id": request_id}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": ("127.0.0.1", 80),
    }
    messages = [{"type": "http.request", "body": data, "more_body": False}]
    answered = asyncio.Event()
    status, chunks = 500, []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            chunks.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    finally:
        answered.set()
    return status, request_id, orjson.loads(b"".join(chunks))
