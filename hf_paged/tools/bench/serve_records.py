"""What is known of each request: when its pieces came, what they said, how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

_loads: Callable[[bytes], Any] = json.loads
with contextlib.suppress(ImportError):  # faster, where it is there
    import orjson

    _loads = orjson.loads

_TEXTS = ("content", "reasoning", "reasoning_content", "refusal", "tool_calls")


class EventReader:
    """Cuts a stream of server-sent events into the data of each.

    Args:
        on_data (`Callable[[bytes], None]`):
            Gets the data of each event.
    """

    def __init__(self, on_data: Callable[[bytes], None]):
        self._on_data = on_data
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        """Takes what arrived.

        Args:
            piece (`bytes`):
                Cut anywhere.
        """
        buffer = self._rest + piece
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._rest = buffer.split(b"\n\n")
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                self._on_data(b"\n".join(lines))


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """One request. Times are readings of `time.perf_counter`.

    Args:
        planned (`float`):
            When it should have been sent.
        start (`float`):
            When it was sent, or a connection for it opened.
        arrivals (`list[float]`):
            When pieces of the answer came that carry text, a call or tokens.
        end (`float`):
            When the last piece of the answer came.
        prompt_tokens (`int`, *optional*):
            As the server counts.
        output_tokens (`int`, *optional*):
            As the server counts.
        texts (`list[str]`):
            The answer.
        finish_reason (`str`, *optional*):
            As the server says.
        is_complete (`bool`):
            Whether the stream ended as it should.
        error_kind (`str`, *optional*):
            A few words for counting: `"http 503"`, `"connection"`, ...
        error (`str`):
            What was said.
    """

    planned: float = 0.0
    start: float = 0.0
    arrivals: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    texts: list[str] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    is_complete: bool = False
    error_kind: str | None = None
    error: str = ""

    @property
    def succeeded(self) -> bool:
        """Returns whether the answer came to its end without an error."""
        return self.is_complete and self.error_kind is None

    @property
    def ttft(self) -> float:
        """Returns seconds to the first token, or to the end of an answer without text."""
        return (self.arrivals[0] if self.arrivals else self.end) - self.start

    @property
    def latency(self) -> float:
        """Returns seconds to the last piece."""
        return self.end - self.start

    @property
    def gaps(self) -> list[float]:
        """Returns seconds between pieces."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def num_output_tokens(self) -> int:
        """Returns the tokens that the server counted, or else the pieces."""
        return len(self.arrivals) if self.output_tokens is None else self.output_tokens

    @property
    def tpot(self) -> float | None:
        """Returns seconds for each token behind the first, or `None` if there is none."""
        return (self.latency - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None

    def fail(self, kind: str, message: str) -> None:
        """Notes what went wrong; the first time counts.

        Args:
            kind (`str`):
                A few words for counting.
            message (`str`):
                What was said.
        """
        if self.error_kind is None:
            self.error_kind, self.error = kind, message


class StreamRecorder:
    """Writes an answer that comes as a stream into a record.

    Args:
        record (`RequestRecord`):
            The record.
    """

    def __init__(self, record: RequestRecord):
        self.record = record
        self._now = 0.0
        self._reader = EventReader(self._take)

    def feed(self, piece: bytes, now: float) -> None:
        """Takes a piece of the answer's body.

        Args:
            piece (`bytes`):
                What arrived.
            now (`float`):
                When.
        """
        self._now = now
        self._reader.feed(piece)

    def _take(self, data: bytes) -> None:
        record = self.record
        if data == b"[DONE]":
            record.is_complete = True
            return
        try:
            self._take_chunk(_loads(data))
        except (ValueError, TypeError, AttributeError):  # no JSON, or nothing of OpenAI's
            record.fail("bad event", data[:200].decode("utf-8", "replace"))

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        record = self.record
        if "error" in chunk:
            record.fail("error in stream", str(chunk["error"])[:500])
            return
        if usage := chunk.get("usage"):
            record.prompt_tokens, record.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        for choice in chunk.get("choices") or ():
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        record = self.record
        record.end = self._now
        delta = choice.get("delta")
        if delta is None:
            carried = text = choice.get("text")
        else:
            text = delta.get("content")
            carried = any(delta.get(name) for name in _TEXTS)
        if not isinstance(text, str | None):
            raise TypeError
        if carried or choice.get("token_ids"):
            record.arrivals.append(self._now)
        if text:
            record.texts.append(text)
        if choice.get("finish_reason"):
            record.finish_reason = choice["finish_reason"]
