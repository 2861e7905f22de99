"""Bodies: read whole, but no further than the limit, and looked at before anybody works with them."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import orjson

from ..errors import ApiError
from .asgi import App, Layer, Message, Receive, Scope, Send, header, refuse

MAX_DEPTH = 128
MAX_CONTAINERS = 100_000
MAX_VALUES = 1_000_000
_IN_THREAD = 256 << 10  # looking at more than this would hold up the event loop
_METHODS = {"POST", "PUT", "PATCH", "DELETE"}
# One that does not end is taken to the end: looking for it again from each quote within would take for ever.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_OTHERS = bytes(sorted(set(range(256)) - set(b"[{]}")))


class BodyMiddleware(Layer):
    """Reads bodies, and refuses what is too large (413), no JSON (415, 400), or nested too deep (400).

    Args:
        app (`Callable`):
            The next layer.
        limit (`int`):
            Bytes of a body at most.
    """

    def __init__(self, app: App, limit: int):
        super().__init__(app)
        self._limit = limit

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in _METHODS:
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
            if body is None:
                return
            await _look_at(scope, body)
        except ApiError as error:
            await refuse(error, scope, receive, send)
            return
        read = False

        async def receive_body() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, receive_body, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; `None` if the client has left."""
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._limit:
            raise self._too_large(f"{int(length)} bytes")
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limit:
                raise self._too_large("more")
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"The body may have {self._limit} bytes and has {size}; split the request, or have the server's operator "
            "raise `--max-body-mib`.",
            code="body_too_large",
            headers={"Connection": "close"},  # the rest is not read
        )


async def _look_at(scope: Scope, body: bytes) -> None:
    if not body:
        return
    encoding = header(scope, b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise ApiError(415, "Compressed bodies are not taken: send it without `Content-Encoding`.")
    kind = (header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        # Web pages of others may send anything else without being asked first.
        shown = kind[:80].decode("latin-1") or "nothing"
        raise ApiError(415, f"`Content-Type` must be application/json, got {shown!r}.", code="unsupported_media_type")
    if len(body) > _IN_THREAD:
        await asyncio.to_thread(check_json, body)
    else:
        check_json(body)


def check_json(body: bytes) -> None:
    """Refuses what is not JSON, strictly (no NaN, no lone surrogates), is nested too deep or has too many parts.

    Args:
        body (`bytes`):
            The text.

    Raises:
        ApiError: 400; says what is wrong and where.
    """
    _check_shape(body)
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, _why(body, error), code="invalid_json") from None


def _check_shape(body: bytes) -> None:
    """Looks at brackets and commas before anything is built from them: objects cost a hundred times their text."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH and body.count(b",") <= MAX_VALUES:
        return
    _check_count(body, b'"', 4 * MAX_VALUES, "quotation marks")  # two for a value, two for its name
    bare = _STRINGS.sub(b"", body)
    _check_count(bare, b"[{", MAX_CONTAINERS, "lists and objects")
    _check_count(bare, b"]}", MAX_CONTAINERS, "lists and objects")
    _check_count(bare, b",", MAX_VALUES, "values")
    steps = np.frombuffer(bare.translate(_BRACKETS, _OTHERS), np.int8)
    if steps.size and np.cumsum(steps, dtype=np.int32).max() > MAX_DEPTH:
        raise ApiError(400, f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")


def _check_count(text: bytes, marks: bytes, limit: int, what: str) -> None:
    count = sum(text.count(mark) for mark in marks)
    if count > limit:
        raise ApiError(400, f"The body has {count} {what}, and may have {limit}.", code="body_too_large")


def _why(body: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return f"The body is not UTF-8: byte {wrong.start} is {body[wrong.start]:#04x}."
    return f"The body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
