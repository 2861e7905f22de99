"""`ChatAnswer`: what the engine says, as reasoning, content and calls of tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..generation.answer_stream import AnswerDelta, AnswerStream
from ..generation.outputs import Logprob
from .answer_parser import AnswerEvent, AnswerParser, ParsedReasoning
from .events import (
    ChatEvent,
    ChoiceEnd,
    ContentDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from .logprobs import token_texts
from .tool_parsers import ParsedArguments, ParsedCallStart, new_call_id


@dataclasses.dataclass(slots=True)
class ToolCall:
    """A call of a tool.

    Args:
        id (`str`):
            The call's id.
        name (`str`):
            Of the function.
        arguments (`str`):
            A JSON object as text.
    """

    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class Choice:
    """One whole answer of a chat.

    Args:
        index (`int`):
            Which of the `n` answers.
        content (`str`):
            Its text.
        reasoning (`str`):
            What the model thought before.
        tool_calls (`list[ToolCall]`):
            The tools that it calls.
        finish_reason (`str`):
            `"stop"`, `"length"` or `"tool_calls"`.
        stop_reason (`int` or `str`, *optional*):
            The stop token or stop string that ended it.
        token_ids (`list[int]`):
            Its tokens.
        logprobs (`list[dict[int, Logprob]]`):
            One entry for each token, if they were asked for.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)

    def add(self, event: ChatEvent) -> None:
        """Takes in the next piece.

        Args:
            event (`ChatEvent`):
                A piece of this answer.
        """
        if isinstance(event, ToolCallStart):
            self.tool_calls.append(ToolCall(event.id, event.name))
        elif isinstance(event, ToolCallArguments):
            self.tool_calls[event.call].arguments += event.text
        elif isinstance(event, ChoiceEnd):
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        else:
            self.token_ids += event.token_ids
            self.logprobs += event.logprobs or ()
            if isinstance(event, ContentDelta):
                self.content += event.text
            else:
                self.reasoning += event.text


class AnswerReader:
    """Makes the events of one of a chat's answers.

    Args:
        parser (`AnswerParser`, *optional*):
            Finds reasoning and calls; without one all is content.
        new_call_id (`Callable[[], str]`, defaults to OpenAI's):
            Makes the ids of calls.
        reasoning (`ReasoningCounter`, *optional*):
            Counts the tokens of the reasoning.
        show_reasoning (`bool`, defaults to `True`):
            Whether the client gets the reasoning.
    """

    def __init__(
        self,
        parser: AnswerParser | None = None,
        *,
        new_call_id: Callable[[], str] = new_call_id,
        reasoning: ReasoningCounter | None = None,
        show_reasoning: bool = True,
    ):
        self._parser = parser
        self._new_call_id = new_call_id
        self._show_reasoning = show_reasoning
        self._token_ids: list[int] = []  # that came, and have not been given out
        self._logprobs: list[dict[int, Logprob]] = []
        self._num_told = 0
        self._has_begun = False
        self.reasoning = reasoning

    def read(self, delta: AnswerDelta, wants_tokens: bool) -> list[ChatEvent]:
        """Returns the events of what is new.

        Args:
            delta (`AnswerDelta`):
                What is new of the answer.
            wants_tokens (`bool`):
                Whether tokens that add no text are worth an event.
        """
        parser, index, reason = self._parser, delta.index, delta.finish_reason
        events: list[ChatEvent] = []
        if parser is None:
            if delta.text:
                events.append(ContentDelta(index, delta.text))
        else:
            parsed = parser.feed(delta.text) if delta.text else []
            if reason is not None:
                parsed += parser.finish()
                reason = parser.finish_reason(reason)
            if self.reasoning is not None:
                self.reasoning.add(delta.token_ids, parsed)
            self._has_begun = self._has_begun or bool(parsed)
            for piece in parsed:
                _add(events, self._event(index, piece))
        if wants_tokens:
            self._attach_tokens(events, delta)
        if reason is not None:
            events.append(ChoiceEnd(index, reason, delta.stop_reason))
        return events

    def _event(self, index: int, piece: AnswerEvent) -> ChatEvent | None:
        if isinstance(piece, ParsedReasoning):
            return ReasoningDelta(index, piece.text) if self._show_reasoning else None
        if isinstance(piece, ParsedCallStart):
            return ToolCallStart(index, piece.call_index, self._new_call_id(), piece.name)
        if isinstance(piece, ParsedArguments):
            return ToolCallArguments(index, piece.call_index, piece.text)
        return ContentDelta(index, piece.text)

    def _attach_tokens(self, events: list[ChatEvent], delta: AnswerDelta) -> None:
        """Tokens travel with the first text of their kind that came with them, or alone."""
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        if self.reasoning is None:
            num_thought = 0
        elif not self._has_begun and delta.finish_reason is None:
            return  # nothing says yet what they are; the text of whole answers comes at their end
        else:
            num_thought = max(0, self.reasoning.num_silent - self._num_told)
        for kind, first, last in ((ReasoningDelta, 0, num_thought), (ContentDelta, num_thought, None)):
            token_ids, logprobs = self._token_ids[first:last], self._logprobs[first:last]
            if not token_ids or (kind is ReasoningDelta and not self._show_reasoning):
                continue
            carrier = next((event for event in events if type(event) is kind), None)
            if carrier is None:
                carrier = kind(delta.index, "")
                events.insert(0 if kind is ReasoningDelta else len(events), carrier)
            assert isinstance(carrier, TextDelta), "of one of the two kinds"
            carrier.token_ids, carrier.logprobs = token_ids, logprobs or None
        self._num_told += len(self._token_ids)
        self._token_ids, self._logprobs = [], []


def _add(events: list[ChatEvent], event: ChatEvent | None) -> None:
    """Adds an event, or its text to the one before it, if that is of the same kind."""
    last = events[-1] if events else None
    if isinstance(event, (TextDelta, ToolCallArguments)) and type(last) is type(event):
        # Arguments of another call come after its start.
        last.text += event.text
    elif event is not None:
        events.append(event)


class ReasoningCounter:
    """Counts the tokens that an answer spends on thinking: up to its closing tag, be that one token or several.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's.
        close (`str`):
            The closing tag.
    """

    def __init__(self, tokenizer: Any, close: str):
        self._token_texts = token_texts(tokenizer)
        self._close = close.encode()
        self._last = b""  # in which the tag may have begun
        self._num_tokens = 0
        self._num_breaks = 0  # tokens between the closing tag and what follows, which nobody sees
        self._has_text = self._has_ended = self._is_followed = False

    def add(self, token_ids: Sequence[int], pieces: Sequence[AnswerEvent]) -> None:
        """Takes in what is new.

        Args:
            token_ids (`Sequence[int]`):
                New tokens.
            pieces (`Sequence[AnswerEvent]`):
                New pieces of text.
        """
        thoughts = [isinstance(piece, ParsedReasoning) for piece in pieces]
        self._has_text = self._has_text or any(thoughts)
        if not self._has_ended:
            token_ids = token_ids[self._count(token_ids) :]
            if not self._has_ended and not all(thoughts):  # there is no reasoning in this answer
                self._has_ended = self._is_followed = True
                self._num_tokens = 0
        self._pass_breaks(token_ids)

    def _count(self, token_ids: Sequence[int]) -> int:
        """Counts up to the closing tag; returns how many of the tokens that are."""
        for place, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            self._last += self._token_texts.bytes_of(token_id)
            if self._close in self._last:
                self._has_ended = True
                return place
            self._last = self._last[-len(self._close) :]
        return len(token_ids)

    def _pass_breaks(self, token_ids: Sequence[int]) -> None:
        if self._is_followed:
            return
        for token_id in token_ids:
            if self._token_texts.bytes_of(token_id).strip(b"\n"):
                self._is_followed = True
                return
            self._num_breaks += 1

    @property
    def num_silent(self) -> int:
        """Returns how many of the answer's tokens, so far, come before its content."""
        return self._num_tokens + self._num_breaks

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens the reasoning has, so far."""
        return self._num_tokens if self._has_text else 0


class ChatAnswer:
    """The answers of a chat as they come: an async iterator of lists of events, for all `n` answers together.

    Each list has what came since the last one. `async with` aborts the request on leaving, unless it has ended.

    Args:
        stream (`AnswerStream`):
            From the engine.
        readers (`Sequence[AnswerReader]`):
            One for each answer.
        wants_tokens (`bool`, defaults to `False`):
            Whether events carry tokens and log-probabilities.
    """

    def __init__(self, stream: AnswerStream, readers: Sequence[AnswerReader], *, wants_tokens: bool = False):
        self.stream = stream
        self._readers = readers
        self._wants_tokens = wants_tokens
        self._num_generated = 0

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Returns the prompt's tokens."""
        return self.stream.prompt_token_ids

    @property
    def has_reasoning(self) -> bool:
        """Returns whether the answers may begin with reasoning."""
        return self._readers[0].reasoning is not None

    @property
    def usage(self) -> Usage:
        """Returns the tokens so far; the final counts once the answers have ended."""
        reasoning = [reader.reasoning.num_tokens for reader in self._readers if reader.reasoning is not None]
        return Usage(
            len(self.stream.prompt_token_ids), self._num_generated, self.stream.num_cached_tokens, sum(reasoning)
        )

    def abort(self, error: BaseException | None = None) -> None:
        """Ends the request, unless it has ended.

        Args:
            error (`BaseException`, *optional*):
                What the reader is told.
        """
        self.stream.abort(error)

    def __aiter__(self) -> ChatAnswer:
        return self

    async def __anext__(self) -> list[ChatEvent]:
        while True:
            events: list[ChatEvent] = []
            for delta in await self.stream.__anext__():
                self._num_generated += len(delta.token_ids)
                events += self._readers[delta.index].read(delta, self._wants_tokens)
            if events:
                return events

    async def collect(self) -> list[Choice]:
        """Waits for the end.

        Returns:
            `list[Choice]`: The whole answers, by index.

        Raises:
            EngineError: If the request failed or was aborted.
        """
        choices = [Choice(index) for index in range(len(self._readers))]
        async with self:
            async for events in self:
                for event in events:
                    choices[event.index].add(event)
        return choices

    async def __aenter__(self) -> ChatAnswer:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stream.__aexit__(*exception)
