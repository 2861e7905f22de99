"""A response of `/v1/responses`, and the events that tell of it, made of the pieces of a chat answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .errors import ApiError
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

Logprobs = list[dict[str, Any]]


def _no_logprobs(delta: ContentDelta) -> Logprobs:
    return []


class ResponseBuilder:
    """Collects an answer into a response object. Each method returns the events that a stream tells meanwhile.

        response.created, response.in_progress
          response.output_item.added                       one item at a time: reasoning, message or function_call
            response.content_part.added                    not for calls
              ....delta, ....delta, ....done
            response.content_part.done
          response.output_item.done
        response.completed | response.incomplete | response.failed

    Args:
        response (`dict[str, Any]`):
            The response object without output: what is known when the request has been accepted.
        logprobs_of (`Callable[[ContentDelta], list[dict]]`, *optional*):
            The log-probabilities of a piece in OpenAI's form; none by default.
    """

    def __init__(self, response: dict[str, Any], logprobs_of: Callable[[ContentDelta], Logprobs] = _no_logprobs):
        self.response = response
        self._logprobs_of = logprobs_of
        self._output: list[dict[str, Any]] = response["output"]
        self._item: dict[str, Any] | None = None  # the one that is being written, the last of the output
        self._blank = ""  # white space that becomes text if more text follows
        self._logprobs: Logprobs = []  # of tokens whose text has not come yet
        self._finish_reason: str | None = None
        self._number = 0

    def begin(self) -> list[SseEvent]:
        """The request has been accepted."""
        return [self._event("response.created", response=self._snapshot())] + [
            self._event("response.in_progress", response=self._snapshot())
        ]

    def add(self, event: ChatEvent) -> list[SseEvent]:
        """A piece of the answer has come.

        Args:
            event (`ChatEvent`):
                The piece.
        """
        if isinstance(event, ContentDelta):
            return self._add_text(event)
        if isinstance(event, ReasoningDelta):
            return self._add_reasoning(event.text)
        if isinstance(event, ToolCallStart):
            call = {"type": "function_call", "call_id": event.id, "name": event.name, "arguments": ""}
            return self._open("fc", call)
        if isinstance(event, ToolCallArguments):
            return self._add_arguments(event.text)
        assert isinstance(event, ChoiceEnd), f"unknown event {event!r}"
        self._finish_reason = event.finish_reason
        return []

    def end(self, usage: Usage) -> list[SseEvent]:
        """The answer is complete.

        Args:
            usage (`Usage`):
                Its tokens.
        """
        cut = self._finish_reason == "length"
        events: list[SseEvent] = []
        if not self._output:  # clients look for a first item
            events += self._open_message()
            events += self._add_delta(self._blank)
        status = "incomplete" if cut else "completed"
        events += self._close(status)
        self.response.update(status=status, usage=_usage(usage))
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return [*events, self._event(f"response.{status}", response=self.response)]

    def fail(self, error: ApiError) -> list[SseEvent]:
        """The answer will never be complete.

        Args:
            error (`ApiError`):
                Why.
        """
        if self._item is not None:
            self._item["status"] = "incomplete"
        code = "invalid_prompt" if error.status in (400, 422) else "server_error"
        self.response.update(status="failed", error={"code": code, "message": error.message})
        return [self._event("response.failed", response=self.response)]

    def _event(self, type_: str, **fields: Any) -> SseEvent:
        event = {"type": type_, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": []}

    def _place(self) -> dict[str, Any]:
        """Where the item that is being written is."""
        assert self._item is not None, "an item is open"
        return {"item_id": self._item["id"], "output_index": len(self._output) - 1}

    # ------------------------------------------------------------------ pieces

    def _is_open(self, type_: str) -> bool:
        return self._item is not None and self._item["type"] == type_

    def _add_text(self, delta: ContentDelta) -> list[SseEvent]:
        if delta.text or not self._is_open("function_call"):  # a call's tokens come as texts without text
            self._logprobs += self._logprobs_of(delta)
        text = self._blank + delta.text
        if not text:
            return []
        if self._is_open("message"):
            return self._add_delta(text)
        if text.isspace():
            self._blank = text
            return []
        return self._open_message() + self._add_delta(text)

    def _add_delta(self, text: str) -> list[SseEvent]:
        assert self._item is not None, "a message is open"
        part, logprobs = self._item["content"][0], self._logprobs
        part["text"] += text
        part["logprobs"] += logprobs
        self._blank, self._logprobs = "", []
        if not text:
            return []
        place = self._place()
        return [self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=logprobs)]

    def _add_reasoning(self, text: str) -> list[SseEvent]:
        if not text:
            return []
        events = [] if self._is_open("reasoning") else self._open_reasoning()
        assert self._item is not None, "reasoning is open"
        self._item["content"][0]["text"] += text
        return [*events, self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)]

    def _add_arguments(self, text: str) -> list[SseEvent]:
        assert self._item is not None and self._is_open("function_call"), "arguments follow the start of their call"
        self._item["arguments"] += text
        return [self._event("response.function_call_arguments.delta", **self._place(), delta=text)] if text else []

    # ------------------------------------------------------------------ items

    def _open_message(self) -> list[SseEvent]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._open("msg", {"type": "message", "role": "assistant", "content": [part]})

    def _open_reasoning(self) -> list[SseEvent]:
        part = {"type": "reasoning_text", "text": ""}
        return self._open("rs", {"type": "reasoning", "summary": [], "content": [part]})

    def _open(self, prefix: str, item: dict[str, Any]) -> list[SseEvent]:
        """Begins an item; what was being written is complete."""
        events = self._close("completed")
        # Log-probabilities and white space between two items belong to neither; before a message they are its own.
        if item["type"] != "message":
            self._blank, self._logprobs = "", []
        identity = f"{prefix}_{self.response['id'].removeprefix('resp_')}_{len(self._output)}"
        self._item = {"id": identity, **item, "status": "in_progress"}
        self._output.append(self._item)
        place = self._place()
        shown = {**self._item, "content": []} if "content" in item else dict(self._item)
        events.append(self._event("response.output_item.added", output_index=place["output_index"], item=shown))
        if "content" in item:
            part = _copied(item["content"][0])
            events.append(self._event("response.content_part.added", **place, content_index=0, part=part))
        return events

    def _close(self, status: str) -> list[SseEvent]:
        """Ends the item that is being written, if there is one."""
        if self._item is None:
            return []
        item, place = self._item, self._place()
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **place, **done)]
        else:
            part = item["content"][0]
            where = {**place, "content_index": 0}
            if item["type"] == "message":
                part["logprobs"] += self._logprobs  # of tokens without text, such as the one that ended the answer
                logprobs, self._logprobs = part["logprobs"], []
                events = [self._event("response.output_text.done", **where, text=part["text"], logprobs=logprobs)]
            else:
                events = [self._event("response.reasoning_text.done", **where, text=part["text"])]
            events.append(self._event("response.content_part.done", **where, part=part))
        events.append(self._event("response.output_item.done", output_index=place["output_index"], item=item))
        self._item = None
        return events


def _copied(part: dict[str, Any]) -> dict[str, Any]:
    """A part as it is now: its lists grow."""
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
