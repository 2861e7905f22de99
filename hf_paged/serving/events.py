"""The pieces of a chat answer as they come, whatever API asked for it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..generation.outputs import Logprob

SseEvent = dict[str, Any]  # one of a stream of another API than the chats', with its `type`


@dataclasses.dataclass(slots=True)
class TextDelta:
    """More of a text that an answer is made of.

    Args:
        index (`int`):
            Which of the `n` answers.
        text (`str`):
            New text; may be empty if tokens came that add none.
        token_ids (`list[int]`):
            The tokens that came with it.
        logprobs (`list[dict[int, Logprob]]`, *optional*):
            One entry for each of these tokens, if asked for.
    """

    index: int
    text: str
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None


class ContentDelta(TextDelta):
    """More of the answer itself."""

    __slots__ = ()


class ReasoningDelta(TextDelta):
    """More of what the model thinks before it answers."""

    __slots__ = ()


@dataclasses.dataclass(slots=True)
class ToolCallStart:
    """A call of a tool begins.

    Args:
        index (`int`):
            Which of the `n` answers.
        call (`int`):
            Which of the answer's calls, from 0.
        id (`str`):
            The call's id, the same in all later pieces.
        name (`str`):
            Of the function.
    """

    index: int
    call: int
    id: str
    name: str


@dataclasses.dataclass(slots=True)
class ToolCallArguments:
    """More of a call's arguments.

    Args:
        index (`int`):
            Which of the `n` answers.
        call (`int`):
            Which of the answer's calls.
        text (`str`):
            New text of the JSON object.
    """

    index: int
    call: int
    text: str


@dataclasses.dataclass(slots=True)
class ChoiceEnd:
    """An answer has ended.

    Args:
        index (`int`):
            Which of the `n` answers.
        finish_reason (`str`):
            `"stop"`, `"length"` or `"tool_calls"`.
        stop_reason (`int` or `str`, *optional*):
            The stop token or stop string that ended it.
    """

    index: int
    finish_reason: str
    stop_reason: int | str | None = None


ChatEvent = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ChoiceEnd


@dataclasses.dataclass(slots=True)
class Usage:
    """Tokens of a request.

    Args:
        prompt_tokens (`int`):
            Of its prompts.
        completion_tokens (`int`):
            Generated, over all answers.
        cached_tokens (`int`):
            Of the prompts, found in the prefix cache.
        reasoning_tokens (`int`):
            Of the generated ones, spent on thinking.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
