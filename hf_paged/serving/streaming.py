"""Server-sent events: chunks as they come, comments while nothing comes, an abort when nobody reads any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import orjson
import pydantic_core
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import RequestAbortedError
from .access_log import CLIENT_LEFT
from .errors import ApiError, to_api_error
from .events import SseEvent, Usage

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not collect chunks


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


def to_json(content: Any) -> bytes:
    """Returns plain values as JSON, also such as came from a client.

    Args:
        content (`Any`):
            The values.
    """
    try:
        return orjson.dumps(content)
    except TypeError:  # whole numbers of more than 64 bits, which a schema or a call may hold
        return pydantic_core.to_json(content, inf_nan_mode="null")


class JSONAnswer(Response):
    """A JSON answer.

    Args:
        content (`Any`):
            Plain values.
        status_code (`int`, defaults to 200):
            Of HTTP.
        headers (`dict[str, str]`, *optional*):
            Further headers.
    """

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None):
        super().__init__(to_json(content), status_code, headers)


def error_events(error: ApiError) -> bytes:
    """Returns how a stream of OpenAI's ends that failed.

    Args:
        error (`ApiError`):
            What went wrong.
    """
    return b"data: " + orjson.dumps(error.body()) + b"\n\n" + DONE


def to_sse(events: Iterable[SseEvent]) -> bytes:
    """Returns events as streams of other APIs than the chats' tell them, each with its type as the event's name.

    Args:
        events (`Iterable[dict[str, Any]]`):
            Each has a `type`.
    """
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event)) for event in events)


class EventStream(Response):
    """An answer of server-sent events.

    The next chunk is taken only when the last one has been handed to the connection: what comes meanwhile waits where
    it is made, and a slow reader holds up nobody but itself.

    Args:
        chunks (`AsyncIterator[bytes]`):
            Whole events. What it raises becomes the last event.
        abort (`Callable[[], None]`):
            Called when the client has gone, and at the end whatever happened.
        keep_alive (`float`):
            Seconds of silence after which a comment is sent; 0 for never.
        format_error (`Callable[[ApiError], bytes]`, defaults to `error_events`):
            Makes the last event of an error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        abort: Callable[[], None],
        keep_alive: float,
        format_error: Callable[[ApiError], bytes] = error_events,
    ):
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(_HEADERS)
        del self.headers["content-length"]
        self._chunks = chunks
        self._abort = abort
        self._keep_alive = keep_alive or float("inf")
        self._format_error = format_error
        self._sent = 0.0  # when, by the event loop's clock, something was sent last
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream; called by the server.

        Args:
            scope (`Scope`):
                Of ASGI.
            receive (`Receive`):
                Of ASGI.
            send (`Send`):
                Of ASGI.
        """
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_watched(receive, send)
        finally:
            self._abort()
        if not self._gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_watched(self, receive: Receive, send: Send) -> None:
        self._sent = asyncio.get_running_loop().time()
        keeper = asyncio.create_task(self._keep(receive, send))
        try:
            await self._send_chunks(send)
        except ClientGone:
            self._gone = True
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _send_chunks(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        try:
            async for chunk in self._chunks:
                await self._send_part(send, chunk)
                self._sent = now()
        except ClientGone:
            raise
        except Exception as error:
            if self._gone and isinstance(error, RequestAbortedError):
                return
            await self._send_part(send, self._format_error(to_api_error(error)))

    async def _send_part(self, send: Send, part: bytes) -> None:
        try:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        except OSError as error:  # how some servers say that the client has gone; a deadline is an OSError, too
            raise ClientGone from error

    async def _keep(self, receive: Receive, send: Send) -> None:
        """Watches for the client's leaving, and keeps proxies from closing a silent connection."""
        now = asyncio.get_running_loop().time
        while True:
            try:
                async with asyncio.timeout_at(self._sent + self._keep_alive):
                    message = await receive()
            except TimeoutError:
                if now() >= self._sent + self._keep_alive:  # nothing was sent meanwhile
                    with contextlib.suppress(OSError):
                        await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
                    self._sent = now()
                continue
            if message["type"] == "http.disconnect":
                self._gone = True
                self._abort()
                return


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Waits for an answer, and gives it up if the client closes the connection.

    Args:
        request (`Request`):
            Whose body has been read.
        work (`Awaitable`):
            Makes the answer; it is cancelled when the client has gone.

    Raises:
        ClientGone: If the client has gone.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watcher.cancel()
        task.cancel()  # no effect on one that has ended
        await asyncio.wait((task, watcher))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def wants_stream(request: Request, stream: bool | None, stream_on_accept: bool) -> bool:
    """Returns whether a client wants a stream.

    Args:
        request (`Request`):
            With its headers.
        stream (`bool`, *optional*):
            What the body says.
        stream_on_accept (`bool`):
            Whether `Accept` counts where the body does not say.
    """
    if stream is not None or not stream_on_accept:
        return bool(stream)
    return "text/event-stream" in request.headers.get("accept", "")


def usage_json(usage: Usage, *, reasoning: bool = False) -> dict[str, Any]:
    """Returns `usage` in OpenAI's form.

    Args:
        usage (`Usage`):
            The counts.
        reasoning (`bool`, defaults to `False`):
            Whether the model thinks before it answers.
    """
    result: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if reasoning:
        result["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return result


class ChunkWriter:
    """Writes the chunks of a stream; what is the same in all of them is made once.

    Args:
        head (`dict[str, Any]`):
            Id, object, time and model.
        usage (`Callable[[], dict[str, Any]]`):
            Returns the counts so far.
        include_usage (`bool`):
            Whether a chunk with the counts ends the stream; the others have `null` then.
        continuous_usage (`bool`):
            Whether all chunks have the counts so far.
    """

    def __init__(
        self,
        head: dict[str, Any],
        usage: Callable[[], dict[str, Any]],
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ):
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._usage = usage
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    def chunk(self, choice: dict[str, Any], **further: Any) -> bytes:
        """Returns a chunk.

        Args:
            choice (`dict[str, Any]`):
                The only one in it.
            further (`Any`):
                What else is in it, beside the choices.
        """
        beside = b"]," + orjson.dumps(further)[1:-1] if further else b"]"
        return (
            self._head + orjson.dumps(choice) + beside + (self._with_usage() if self._continuous_usage else self._tail)
        )

    def _with_usage(self) -> bytes:
        return b',"usage":' + orjson.dumps(self._usage()) + b"}\n\n"

    def end(self) -> bytes:
        """Returns what ends the stream: the counts, if they are wanted, and the mark that nothing follows."""
        if not self._include_usage:
            return DONE
        return self._head + b"]" + self._with_usage() + DONE


async def answer_unless_gone(request: Request, work: Awaitable[Response]) -> Response:
    """Returns an answer, or one that nobody will read if the client closes the connection before it is there.

    Args:
        request (`Request`):
            Whose body has been read.
        work (`Awaitable[Response]`):
            Makes the answer; it is cancelled when the client has gone.
    """
    try:
        return await unless_gone(request, work)
    except ClientGone:
        return Response(status_code=CLIENT_LEFT)  # nobody gets it; the access log does
