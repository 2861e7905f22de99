"""A message of `/v1/messages`, and the events that tell of it, made of the pieces of a chat answer."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from .events import (
    ChatEvent,
    ChoiceEnd,
    ContentDelta,
    ReasoningDelta,
    SseEvent,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class MessageBuilder:
    """Collects an answer into a message. Each method returns the events that a stream tells meanwhile.

        message_start
          content_block_start, content_block_delta, ..., content_block_stop     one block at a time
        message_delta, message_stop

    Args:
        message_id (`str`):
            The message's id.
        model (`str`):
            What the client called the model.
        thinking (`str`, defaults to `"hidden"`):
            `"shown"`, `"omitted"` (that the model thinks is told, not what) or `"hidden"`.
    """

    def __init__(self, message_id: str, model: str, thinking: str = "hidden"):
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(Usage()),
        }
        self._thinking = thinking
        self._blocks: list[dict[str, Any]] = self.message["content"]
        self._open_type: str | None = None  # of the last block, while it is being written
        self._arguments = ""
        self._blank = ""  # white space that becomes text if more text follows
        self._end = ChoiceEnd(0, "stop")

    def begin(self, usage: Usage) -> list[SseEvent]:
        """The prompt has been computed.

        Args:
            usage (`Usage`):
                Tokens of the prompt.
        """
        self.message["usage"] = message_usage(usage)
        return [{"type": "message_start", "message": {**self.message, "content": []}}]

    def add(self, event: ChatEvent) -> list[SseEvent]:
        """A piece of the answer has come.

        Args:
            event (`ChatEvent`):
                The piece.
        """
        if isinstance(event, ContentDelta):
            return self._add_text(event.text)
        if isinstance(event, ReasoningDelta):
            return self._add_thinking(event.text)
        if isinstance(event, ToolCallStart):
            return self._open({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        if isinstance(event, ToolCallArguments):
            return self._add_arguments(event.text)
        assert isinstance(event, ChoiceEnd), f"unknown event {event!r}"
        self._end = event
        return []

    def end(self, usage: Usage, length_reason: str = "max_tokens") -> list[SseEvent]:
        """The answer is complete.

        Args:
            usage (`Usage`):
                Its tokens.
            length_reason (`str`, defaults to `"max_tokens"`):
                The stop reason, if the answer was cut.
        """
        events: list[SseEvent] = []
        if self._blank and not self._blocks:  # white space is all there is
            events += self._open({"type": "text", "text": ""}) + self._add_delta(self._blank)
        events += self._close()
        reason, stop = _STOP_REASONS[self._end.finish_reason], self._end.stop_reason
        if reason == "end_turn" and isinstance(stop, str):
            reason = "stop_sequence"
        elif reason == "max_tokens":
            reason = length_reason
        delta = {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}
        self.message.update(**delta, usage=message_usage(usage))
        events.append({"type": "message_delta", "delta": delta, "usage": self.message["usage"]})
        return [*events, {"type": "message_stop"}]

    # ------------------------------------------------------------------ pieces

    def _add_text(self, text: str) -> list[SseEvent]:
        text = self._blank + text
        if not text:
            return []
        if self._open_type == "text":
            return self._add_delta(text)
        if text.isspace():
            self._blank = text
            return []
        return self._open({"type": "text", "text": ""}) + self._add_delta(text)

    def _add_delta(self, text: str) -> list[SseEvent]:
        self._blocks[-1]["text"] += text
        self._blank = ""
        return [self._delta({"type": "text_delta", "text": text})]

    def _add_thinking(self, text: str) -> list[SseEvent]:
        if not text or self._thinking == "hidden":
            return []
        block = {"type": "thinking", "thinking": "", "signature": ""}
        events = [] if self._open_type == "thinking" else self._open(block)
        if self._thinking == "omitted":
            return events
        self._blocks[-1]["thinking"] += text
        return [*events, self._delta({"type": "thinking_delta", "thinking": text})]

    def _add_arguments(self, text: str) -> list[SseEvent]:
        assert self._open_type == "tool_use", "arguments follow the start of their call"
        self._arguments += text
        return [self._delta({"type": "input_json_delta", "partial_json": text})] if text else []

    def _delta(self, delta: dict[str, Any]) -> SseEvent:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    # ------------------------------------------------------------------ blocks

    def _open(self, block: dict[str, Any]) -> list[SseEvent]:
        """Begins a block; what was being written is complete."""
        events = self._close()
        if block["type"] != "text":
            self._blank = ""
        self._blocks.append(block)
        self._open_type = block["type"]
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _close(self) -> list[SseEvent]:
        """Ends the block that is being written, if there is one."""
        if self._open_type is None:
            return []
        if self._open_type == "tool_use":
            self._blocks[-1]["input"] = _parsed_arguments(self._arguments)
            self._arguments = ""
        self._open_type = None
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


def message_usage(usage: Usage) -> dict[str, Any]:
    """Returns tokens as Anthropic counts them: what was cached is not among the input tokens.

    Args:
        usage (`Usage`):
            Tokens of a request.
    """
    thinking = {"output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}} if usage.reasoning_tokens else {}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **thinking,
    }


def _parsed_arguments(text: str) -> dict[str, Any]:
    """A call's arguments; of one that was cut as much as there is, as a stream's reader would make of it."""
    try:
        parsed = from_json(text, allow_partial="trailing-strings") if text else {}
    except ValueError:
        parsed = {}
    return parsed if isinstance(parsed, dict) else {}
