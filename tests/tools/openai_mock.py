"""A server that speaks OpenAI's API and says what it is told, for tests of clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

WORDS = ["one ", "two ", "three ", "four ", "five ", "six ", "seven ", "eight "]


class OpenAIMock:
    """Answers `max_tokens` words, one chunk each, and does what the prompt says: `status 503`, `error`, `cut off`, ...

    Attributes:
        bodies: What was asked.
        headers: Of each request.
        delay: Seconds before each chunk.
        separator: Between events.
        with_usage: Whether the last chunk counts tokens.
        most: The most requests at a time.
    """

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.delay, self.separator, self.with_usage = 0.0, "\n\n", True
        self.most = self.open = 0
        self.url = ""
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.answer)
        self.app.post("/v1/chat/completions")(self.answer)

    def models(self) -> dict:
        return {"object": "list", "data": [{"id": "mock", "object": "model", "root": "nowhere"}]}

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        is_chat = "messages" in body
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        if isinstance(prompt, str) and prompt.startswith("status"):
            return JSONResponse({"error": {"message": "no"}}, status_code=int(prompt.split()[1]))
        count = body.get("max_tokens") or body.get("max_completion_tokens") or 8
        return StreamingResponse(self.stream(prompt, count, is_chat), media_type="text/event-stream")

    async def stream(self, prompt: str, count: int, is_chat: bool) -> Iterator[str]:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if is_chat:
                yield self.event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
            yield ": keep-alive" + self.separator
            for number in range(count):
                await asyncio.sleep(self.delay)
                if number == 2 and prompt == "error":
                    yield self.event(error={"message": "the engine fell over"})
                    return
                if number == 2 and prompt == "cut off":
                    return
                word = WORDS[number % len(WORDS)]
                reason = "length" if number == count - 1 else None
                said = {"delta": {"content": word}} if is_chat else {"text": word}
                yield self.event(choices=[{"index": 0, "finish_reason": reason, **said}])
            if self.with_usage:
                yield self.event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2 * count})
            yield "data: [DONE]" + self.separator
        finally:
            self.open -= 1

    def event(self, **fields) -> str:
        return f"data: {json.dumps(fields)}{self.separator}"


@contextlib.contextmanager
def running(app, **options) -> Iterator[str]:
    """Serves an application on a free port, in a thread, and returns its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < end, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
