"""Where answers come from: a model of this machine or a server, both behind the same three methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Write = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is known of an answer once it has ended.

    Args:
        text (`str`):
            All of it.
        finish_reason (`str`, *optional*):
            `"stop"`, `"length"`, or what a server says.
        prompt_tokens (`int`, *optional*):
            Of the prompt; a server may not say.
        completion_tokens (`int`, *optional*):
            Of the answer.
        cached_tokens (`int`, *optional*):
            Of the prompt, those that were computed before.
        first_token_seconds (`float`, *optional*):
            Until its first text was there.
        seconds (`float`, defaults to 0.0):
            Until its end.
    """

    text: str
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Returns the speed after the first token, or of all where there is only one."""
        if not self.completion_tokens or self.first_token_seconds is None:
            return None
        if self.completion_tokens > 1 and self.seconds > self.first_token_seconds:
            return (self.completion_tokens - 1) / (self.seconds - self.first_token_seconds)
        return self.completion_tokens / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        speed = self.tokens_per_s
        return dataclasses.asdict(self) | {"tokens_per_s": None if speed is None else round(speed, 2)}

    def describe(self) -> str:
        """Returns a line for people: tokens, tokens per second, time to the first token."""
        parts = [] if self.completion_tokens is None else [_counted(self.completion_tokens, "token")]
        if self.tokens_per_s is not None and (self.completion_tokens or 0) > 1:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.first_token_seconds is not None:
            parts.append(f"first after {self.first_token_seconds:.2f} s")
        if self.prompt_tokens is not None:
            cached = f", {self.cached_tokens} cached" if self.cached_tokens else ""
            parts.append(f"prompt of {self.prompt_tokens}{cached}")
        if self.finish_reason == "length":
            parts.append("cut at its length limit")
        return ", ".join(parts)


class Answerer(Protocol):
    """A model that answers. What is written comes in pieces; Ctrl-C is `KeyboardInterrupt` and ends the answer."""

    name: str
    max_model_len: int | None

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any], write: Write) -> Answer:
        """Answers a conversation.

        Args:
            messages (`Sequence[Mapping[str, Any]]`):
                With `role` and `content`.
            sampling (`Mapping[str, Any]`):
                Fields of `SamplingParams` that were given.
            write (`Callable[[str], Any]`):
                Gets the answer's text piece by piece.

        Raises:
            InvalidRequestError: If the conversation, or a parameter, is refused.
        """

    def complete(self, prompt: str, sampling: Mapping[str, Any], write: Write) -> Answer:
        """Continues a text.

        Args:
            prompt (`str`):
                The text.
            sampling (`Mapping[str, Any]`):
                Fields of `SamplingParams` that were given.
            write (`Callable[[str], Any]`):
                Gets the answer's text piece by piece.

        Raises:
            InvalidRequestError: If the prompt, or a parameter, is refused.
        """

    def close(self) -> None:
        """Frees everything."""


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
