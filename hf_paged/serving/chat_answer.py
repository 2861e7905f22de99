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
            for piece in parsed:
                _add(events, self._event(index, piece))
        if wants_tokens and delta.token_ids:
            _attach_tokens(events, delta)
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


def _add(events: list[ChatEvent], event: ChatEvent | None) -> None:
    """Adds an event, or its text to the one before it, if that is of the same kind."""
    last = events[-1] if events else None
    if isinstance(event, (TextDelta, ToolCallArguments)) and type(last) is type(event):
        # Arguments of another call come after its start.
        last.text += event.text
    elif event is not None:
        events.append(event)


def _attach_tokens(events: list[ChatEvent], delta: AnswerDelta) -> None:
    """Tokens travel with the first text that came with them, or alone."""
    carrier = next((event for event in events if isinstance(event, TextDelta)), None)
    if carrier is None:
        carrier = ContentDelta(delta.index, "")
        events.append(carrier)
    carrier.token_ids, carrier.logprobs = delta.token_ids, delta.logprobs


class ReasoningCounter:
    """Counts the tokens that an answer spent on thinking: up to the closing tag, if that is one token.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's.
        close (`str`):
            The closing tag. Where it is several tokens, the reasoning's text is tokenized again at the end.
    """

    def __init__(self, tokenizer: Any, close: str):
        self._tokenizer = tokenizer
        token_id = tokenizer.convert_tokens_to_ids(close)
        is_token = token_id is not None and token_id != tokenizer.unk_token_id
        self._close_id: int | None = token_id if is_token else None
        self._closed = False
        self._num_tokens = 0
        self._text = ""

    def add(self, token_ids: Sequence[int], pieces: Sequence[AnswerEvent]) -> None:
        """Takes in what is new.

        Args:
            token_ids (`Sequence[int]`):
                New tokens.
            pieces (`Sequence[AnswerEvent]`):
                New pieces of text.
        """
        self._text += "".join([piece.text for piece in pieces if isinstance(piece, ParsedReasoning)])
        if self._close_id is None or self._closed:
            return
        self._closed = self._close_id in token_ids
        self._num_tokens += token_ids.index(self._close_id) + 1 if self._closed else len(token_ids)

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens the reasoning has, so far."""
        if not self._text:
            return 0
        if self._close_id is None:
            return len(self._tokenizer(self._text, add_special_tokens=False, verbose=False)["input_ids"])
        return self._num_tokens


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
