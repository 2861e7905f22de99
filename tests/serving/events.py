"""Reads streams of server-sent events as clients do, and puts chunks together again."""

from __future__ import annotations

import json
from typing import Any

import pytest


def events_of(text: str) -> list[dict[str, Any]]:
    """The objects of a stream, which must end with `[DONE]` and have nothing else but comments."""
    parts = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts), "each event is one line of data"
    assert parts[-1] == "data: [DONE]" and parts.count("data: [DONE]") == 1
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def joined_chat(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By index, the message that the chunks of a chat spell, with `finish_reason` and `logprobs`."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"content": "", "calls": [], "logprobs": [], "token_ids": []})
            assert "finish_reason" not in whole, "nothing comes behind an answer's end"
            delta = choice["delta"]
            whole["content"] += delta.get("content") or ""
            if "reasoning_content" in delta:
                assert delta["reasoning"] == delta["reasoning_content"]
                whole["reasoning"] = whole.get("reasoning", "") + delta["reasoning"]
            if "role" in delta:
                assert "role" not in whole and whole["content"] == delta["content"], "it comes first"
                whole["role"] = delta["role"]
            for call in delta.get("tool_calls", ()):
                _join_call(whole["calls"], call)
            whole["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            whole["token_ids"] += choice.get("token_ids", [])
            if choice["finish_reason"] is not None:
                whole["finish_reason"], whole["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    return choices


def _join_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    if call["index"] == len(calls):
        calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
    else:
        assert call["index"] == len(calls) - 1 and "id" not in call
        calls[-1]["function"]["arguments"] += call["function"]["arguments"]


def joined_completion(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By index, the text that the chunks of a completion spell, with `logprobs`, `finish_reason` and `stop_reason`."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert whole["finish_reason"] is None, "nothing comes behind an answer's end"
            whole["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"] = whole["logprobs"] or {}
                whole["logprobs"].setdefault(name, []).extend(values)
            whole["finish_reason"], whole["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    return choices


def assert_alike(one: Any, other: Any) -> None:
    """The same, but for the last digits of numbers, which depend on what ran beside a request."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_alike(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_alike(left, right)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-4)
    else:
        assert one == other
