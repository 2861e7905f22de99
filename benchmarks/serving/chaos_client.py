"""A client that counts what becomes of each request, whatever happens to it or the server."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import time
from typing import Any

from hf_paged.tools.bench.serve_client import ConnectionLostError, HttpClient

# How streams of the four APIs end.
_ENDS = (b"data: [DONE]", b'"type":"message_stop"', b'"type":"response.completed"', b'"type":"response.incomplete"')
_ERRORS = (b'data: {"error"', b"event: error", b'"type":"response.failed"')
ANSWERED, REFUSED, FAILED, DROPPED, LOST = "answered", "refused", "failed", "dropped", "lost"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a request.

    Args:
        kind (`str`):
            answered; refused (4xx, or 503 with `Retry-After`); failed (the server said so); dropped (by its client);
            lost (no end, or a 5xx that says nothing).
        detail (`str`):
            Status or error.
        seconds (`float`):
            How long it took.
        body (`bytes`):
            What came.
    """

    kind: str
    detail: str = ""
    seconds: float = 0.0
    body: bytes = b""


class Tally:
    """Counts outcomes.

    Args:
        name (`str`):
            Of the scenario.
    """

    def __init__(self, name: str):
        self.name = name
        self.sent = 0
        self.kinds: collections.Counter[str] = collections.Counter()
        self.details: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.notes: dict[str, Any] = {}

    def add(self, outcome: Outcome) -> None:
        """Counts one.

        Args:
            outcome (`Outcome`):
                What became of it.
        """
        self.sent += 1
        self.kinds[outcome.kind] += 1
        if outcome.kind != ANSWERED:
            self.details[f"{outcome.kind}: {outcome.detail[:120]}"] += 1

    def expect(self, is_so: bool, what: str) -> None:
        """Notes a problem.

        Args:
            is_so (`bool`):
                Whether all is well.
            what (`str`):
                What should be.
        """
        if not is_so:
            self.problems.append(what)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        counts = {kind: self.kinds[kind] for kind in (ANSWERED, REFUSED, FAILED, DROPPED, LOST)}
        told = {"details": dict(self.details.most_common()), "problems": self.problems, "notes": self.notes}
        return {"name": self.name, "sent": self.sent, **counts, **told}


async def ask(
    client: HttpClient, path: str, body: dict[str, Any] | bytes, *, timeout: float = 60.0, drop_after: int | None = None
) -> Outcome:
    """Sends a request and returns what became of it.

    Args:
        client (`HttpClient`):
            The server.
        path (`str`):
            Where to.
        body (`dict[str, Any]` or `bytes`):
            JSON; bytes are sent as they are.
        timeout (`float`, defaults to 60.0):
            Seconds after which the request is lost.
        drop_after (`int`, *optional*):
            Leave after so many pieces of the answer.
    """
    begin = time.perf_counter()
    pieces: list[bytes] = []
    enough = asyncio.Event()

    def on_body(piece: bytes, now: float) -> None:
        pieces.append(piece)
        if drop_after is not None and len(pieces) >= drop_after:
            enough.set()

    def end(kind: str, detail: str = "") -> Outcome:
        return Outcome(kind, detail, time.perf_counter() - begin, b"".join(pieces))

    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sending = asyncio.create_task(client.send("POST", path, data, on_body))
    leaving = asyncio.create_task(enough.wait())
    done, _ = await asyncio.wait((sending, leaving), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if sending not in done:
        sending.cancel()
        await asyncio.wait((sending,))
        return end(DROPPED) if enough.is_set() else end(LOST, f"no end within {timeout:g} s")
    try:
        answer = sending.result()
    except ConnectionLostError as error:
        return end(LOST, f"connection lost: {error}")
    except OSError as error:
        return end(REFUSED, f"no connection: {type(error).__name__}")
    return _judge(answer.status, answer.headers, answer.body, end, b"".join(pieces))


def _judge(status: int, headers: dict[str, str], body: bytes, end: Any, streamed: bytes) -> Outcome:
    if status == 200:
        if not headers.get("content-type", "").startswith("text/event-stream"):
            return end(ANSWERED)
        if any(mark in streamed for mark in _ERRORS):
            if b'"invalid_request_error"' in streamed:  # parameters whose contradiction only shows in a step
                return end(REFUSED, "400 in the stream")
            return end(FAILED, streamed[-300:].decode("utf-8", "replace"))
        return end(ANSWERED) if any(mark in streamed for mark in _ENDS) else end(LOST, "the stream has no end")
    said = body[:300].decode("utf-8", "replace")
    try:
        has_form = "message" in json.loads(body)["error"]
    except (ValueError, LookupError, TypeError):
        return end(LOST, f"{status} without an error in OpenAI's form: {said}")
    if status == 503 and "retry-after" in headers:
        return end(REFUSED, "503")
    if 400 <= status < 500 and has_form:
        return end(REFUSED, str(status))
    return end(FAILED, f"{status}: {said}")
