"""A gateway that says what it is told to say: raw bytes on a real socket, so that it can also break off."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from examples.gateways.common.load import TOKENS, Client

Script = Callable[[int, dict[str, Any]], bytes]


def http(status: int, body: bytes, *headers: str, kind: str = "application/json") -> bytes:
    """A whole answer."""
    lines = [f"HTTP/1.1 {status} Said", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def answer(tokens: int = TOKENS, text: str = "a text", reason: str = "length") -> bytes:
    """An answer in one piece."""
    choice = {"message": {"content": text}, "finish_reason": reason}
    return http(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode())


def stream(*chunks: Any, reason: str | None = "length", done: bool = True, **usage: Any) -> bytes:
    """A stream of chunks, with a text and the usage around them."""
    told = [{"choices": [{"delta": {"content": "a text"}}]}, *chunks]
    told.append({"choices": [{"delta": {}, "finish_reason": reason}]})
    told.append({"choices": [], "usage": {"completion_tokens": TOKENS} | usage})
    events = [json.dumps(chunk) for chunk in told] + (["[DONE]"] if done else [])
    return http(200, "".join(f"data: {event}\n\n" for event in events).encode(), kind="text/event-stream")


def right(number: int, body: dict[str, Any]) -> bytes:
    """What a good gateway says."""
    return stream() if body.get("stream") else answer()


def full(status: int = 503, *headers: str) -> bytes:
    """A refusal."""
    return http(status, b'{"error": {"message": "the queue is full"}}', *headers)


class Unfinished(bytes):
    """A beginning after which nothing comes."""


NEVER = Unfinished()


class FakeServer:
    """What `/metrics` of one of our servers says, if all requests of a fake gateway go there."""

    def __init__(self, running: float = 0, aborted: float = 0, usage: float = 0, *, is_told: bool = True):
        self.running, self.aborted, self.usage, self.is_told = running, aborted, usage, is_told

    def left(self) -> None:
        """A client has left: an engine that is not told goes on to the answer's end."""
        self.aborted += self.is_told

    def metrics(self) -> dict[str, float]:
        return {
            'hf_paged:num_requests_running{model_name="a"}': self.running,
            'hf_paged:num_requests_waiting{model_name="a"}': 0.0,
            'hf_paged:kv_cache_usage_perc{model_name="a"}': self.usage,
            'hf_paged:request_success_total{finished_reason="abort",model_name="a"}': self.aborted,
            'hf_paged:request_success_total{finished_reason="length",model_name="a"}': 40.0,
            'vllm:request_success_total{finished_reason="abort",model_name="a"}': self.aborted,
        }


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        return json.loads(content)
    except ValueError:
        return {}


@contextlib.asynccontextmanager
async def gateway(script: Script, server: FakeServer | None = None, timeout: float = 30.0) -> AsyncIterator[Client]:
    """A client of a gateway that answers by a script, which gets the request's number and body."""
    numbers, behind = iter(range(10**6)), server or FakeServer()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].split("\r\n")[0])
            body = _parsed(await reader.readexactly(length))
            behind.running += 1
            said = script(next(numbers), body)
            writer.write(said)
            await writer.drain()
            if isinstance(said, Unfinished):
                await reader.read()  # until the client leaves
                behind.left()
            behind.running -= 1
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener, Client(url, "demo", timeout=timeout) as client:
        yield client
