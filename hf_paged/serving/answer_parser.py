"""`AnswerParser`: from the text of one answer to reasoning, content and calls of tools."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from .incremental_reader import IncrementalParser, Markers, Reading
from .reasoning_parsers import ReasoningParser
from .tool_parsers import ParsedArguments, ParsedCallStart, ParsedEvent, ParsedText, ToolParser


class ParsedReasoning(NamedTuple):
    """Text that the model thought.

    Args:
        text (`str`):
            The text.
    """

    text: str


AnswerEvent = ParsedReasoning | ParsedEvent


class AnswerParser:
    """Turns one answer's text, piece by piece, into events: the one door to reasoning and tool parsers.

    ```python
    parser = AnswerParser(reasoning_parser, tool_parser)       # one for each of a request's n answers
    for delta in deltas:
        for event in parser.feed(delta.text):                  # ParsedReasoning(text) | ParsedText(text) |
            ...                                                # ParsedCallStart(call_index, name) |
    for event in parser.finish():                              # ParsedArguments(call_index, text)
        ...
    finish_reason = parser.finish_reason("stop")               # "tool_calls" if there was a call
    ```

    However the text is cut, the joined events are the same. Texts are never empty. Call indexes count from 0 without a
    gap; each call has a start and then, in one or more pieces, its arguments.

    Args:
        reasoning_parser (`ReasoningParser`, *optional*):
            Separates reasoning; without it there is none.
        tool_parser (`ToolParser`, *optional*):
            Finds calls; without it there are none.
        hidden (`Collection[str]`, *optional*, defaults to `()`):
            Special tokens to leave out of the texts, see `hidden_special_tokens`.
        max_calls (`int`, *optional*):
            Calls beyond these are left out: 1 for `parallel_tool_calls=false`.
    """

    def __init__(
        self,
        reasoning_parser: ReasoningParser | None = None,
        tool_parser: ToolParser | None = None,
        *,
        hidden: Collection[str] = (),
        max_calls: int | None = None,
    ):
        self._reasoning = reasoning_parser
        self._tools = tool_parser
        markers = _markers(reasoning_parser, tool_parser)
        unread = [text for text in hidden if text not in markers]
        self._filter = _Without(unread) if unread else None
        self._hidden_markers = [text for text in hidden if text in markers]
        self._max_calls = max_calls
        self.num_calls = 0

    def feed(self, text: str) -> list[AnswerEvent]:
        """Takes the answer's next text.

        Args:
            text (`str`):
                Any piece of it.

        Returns:
            `list`: The events that are certain by now.
        """
        return self._read(self._filter.feed(text) if self._filter else text, last=False)

    def finish(self) -> list[AnswerEvent]:
        """Returns the remaining events, once no more text will come."""
        return self._read(self._filter.finish() if self._filter else "", last=True)

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns the choice's `finish_reason`: `"tool_calls"` if the model ended by itself after at least one call.

        An answer that was cut off is `"length"`, also in the middle of a call.

        Args:
            reason (`str`, *optional*):
                Why the engine ended the answer.
        """
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def _read(self, text: str, last: bool) -> list[AnswerEvent]:
        pieces: list[Any] = [("content", text)] if text else []
        if self._reasoning is not None:
            pieces = self._reasoning.feed(text) if text else []
            pieces += self._reasoning.finish() if last else []
        events: list[AnswerEvent] = []
        for kind, piece in pieces:
            if kind == "reasoning":
                events.append(ParsedReasoning(piece))
            elif self._tools is None:
                events.append(ParsedText(piece))
            else:
                events += self._tools.feed(piece)
        if last and self._tools is not None:
            events += self._tools.finish()
        return [event for event in map(self._shown, events) if event is not None]

    def _shown(self, event: AnswerEvent) -> AnswerEvent | None:
        if isinstance(event, (ParsedCallStart, ParsedArguments)):
            if self._max_calls is not None and event.call_index >= self._max_calls:
                return None
            self.num_calls = event.call_index + 1
            return event
        text = event.text
        for marker in self._hidden_markers:
            text = text.replace(marker, "")
        return event._replace(text=text) if text else None


class _Without(IncrementalParser):
    """Leaves strings out of a text."""

    def __init__(self, texts: Collection[str]):
        super().__init__()
        self._markers = Markers(texts)
        self._kept: list[str] = []

    def _parse(self) -> Reading[None]:
        while (yield from self._reader.until(self._markers, self._kept.append)):
            pass

    def feed(self, text: str) -> str:
        self._push(text)
        return self._taken()

    def finish(self) -> str:
        self._close()
        return self._taken()

    def _taken(self) -> str:
        text = "".join(self._kept)
        self._kept.clear()
        return text


def _markers(*parsers: ReasoningParser | ToolParser | type[ReasoningParser] | type[ToolParser] | None) -> set[str]:
    return {marker for parser in parsers if parser is not None for marker in parser.markers()}


def hidden_special_tokens(
    tokenizer: Any,
    reasoning_parser: type[ReasoningParser] | None = None,
    tool_parser: type[ToolParser] | None = None,
) -> frozenset[str] | None:
    """Returns what an `AnswerParser` has to hide because its parsers read special tokens.

    Some tokenizers hold markers (`[TOOL_CALLS]`, `<|python_tag|>`) as special tokens, which decoding leaves out. The
    answer must then be decoded with `skip_special_tokens=False`, and the parser leaves out the others.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.
        reasoning_parser (`type[ReasoningParser]`, *optional*):
            The class of the reasoning parser.
        tool_parser (`type[ToolParser]`, *optional*):
            The class of the tool parser.

    Returns:
        `frozenset[str]` or `None`: All special tokens, for `AnswerParser(hidden=...)`; `None` if no marker is one, so
        that the answer may be decoded without special tokens.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    return frozenset(special) if special & _markers(reasoning_parser, tool_parser) else None
