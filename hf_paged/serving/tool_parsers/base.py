"""What every tool-call parser gives out, and the loop that they share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from ..incremental_reader import SPACES, IncrementalParser, Markers, Reading


class ParsedText(NamedTuple):
    """Text to show to the user.

    Args:
        text (`str`):
            The text.
    """

    text: str


class ParsedCallStart(NamedTuple):
    """A call begins.

    Args:
        call_index (`int`):
            Which of the answer's calls, counted from 0.
        name (`str`):
            The function.
    """

    call_index: int
    name: str


class ParsedArguments(NamedTuple):
    """A piece of a call's arguments, which joined are a JSON object.

    Args:
        call_index (`int`):
            Which of the answer's calls, counted from 0.
        text (`str`):
            The piece.
    """

    call_index: int
    text: str


ParsedEvent = ParsedText | ParsedCallStart | ParsedArguments


class ToolParser(IncrementalParser):
    """Finds the calls in one answer as its text arrives.

    What is no call, or breaks off before its name and the beginning of its arguments are there, is text. A call that
    has begun stays, with the arguments that came. Whitespace around calls belongs to the format and is left out.

    Class attributes: `opens` and `closes` are the markers in front of calls and behind them, and `bare` says whether
    calls may stand at the answer's beginning without a marker. A tokenizer may hold markers as special tokens; then
    the answer must be decoded with `skip_special_tokens=False`.

    Args:
        functions (`Mapping[str, Any]`, *optional*):
            The functions that the request declares, with the schemas of their parameters. A call without a marker has
            to name one of these: other JSON, or other brackets, are an answer.
        forbidden (`Collection[str]`, *optional*, defaults to `()`):
            Functions of which a call, with or without a marker, is text.
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    bare: bool = False
    id_style: str = "openai"  # see `new_call_id`

    def __init__(self, functions: Mapping[str, Any] | None = None, forbidden: Collection[str] = ()):
        super().__init__()
        self._functions = functions
        self._forbidden = forbidden
        self._markers = Markers([*self.opens, *self.closes])
        self._events: list[ParsedEvent] = []
        self._spaces: list[str] = []  # whitespace that is left out if a call follows
        self._blank = True  # nothing but whitespace since the beginning or the last call
        self.num_calls = 0

    @classmethod
    def markers(cls) -> frozenset[str]:
        """Returns the texts that mark calls."""
        return frozenset((*cls.opens, *cls.closes))

    def feed(self, text: str) -> list[ParsedEvent]:
        """Takes the answer's next text.

        Args:
            text (`str`):
                Any piece of it.

        Returns:
            `list`: What is certain by now, `ParsedText`, `ParsedCallStart` and `ParsedArguments` in the answer's order.
        """
        self._push(text)
        return self._taken()

    def finish(self) -> list[ParsedEvent]:
        """Returns the rest, once no more text will come."""
        self._close()
        if self._spaces and not self.num_calls:
            self._events.append(ParsedText("".join(self._spaces)))
        return self._taken()

    def _calls(self, marker: str) -> Reading[None]:
        """Reads the calls behind a marker, or, without one, at the beginning; returns at what is not theirs."""
        raise NotImplementedError

    def _parse(self) -> Reading[None]:
        reader = self._reader
        reader.record()
        if self.bare:
            yield from reader.run(SPACES)
            yield from self._calls("")
        while True:
            self._emit_text(reader.recorded())
            marker = yield from reader.until(self._markers, self._emit_text)
            if not marker:
                return
            reader.record(marker)
            if marker in self.opens:
                yield from reader.run(SPACES)
                yield from self._calls(marker)
            elif self.num_calls and self._blank:
                reader.recorded()  # a call's own end

    def _may_call(self, name: str, marked: bool) -> bool:
        return name not in self._forbidden and (marked or self._functions is None or name in self._functions)

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        if self._blank:
            self._spaces.append(text)
            if text.isspace():
                return
            self._blank = False
            text = "".join(self._spaces)
            self._spaces.clear()
        self._events.append(ParsedText(text))

    def _start_call(self, name: str) -> None:
        self._reader.recorded()
        self._spaces.clear()
        self._blank = True
        self._events.append(ParsedCallStart(self.num_calls, name))
        self.num_calls += 1

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._events.append(ParsedArguments(self.num_calls - 1, text))

    def _taken(self) -> list[ParsedEvent]:
        """The events so far, neighbours of one kind joined."""
        taken: list[ParsedEvent] = []
        for (kind, call_index), group in groupby(self._events, key=_kind):
            if kind is ParsedText:
                taken.append(ParsedText("".join([event[-1] for event in group])))
            elif kind is ParsedArguments:
                taken.append(ParsedArguments(call_index, "".join([event[-1] for event in group])))
            else:
                taken += group
        self._events.clear()
        return taken


def _kind(event: ParsedEvent) -> tuple[type[ParsedEvent], int]:
    return type(event), 0 if isinstance(event, ParsedText) else event.call_index


def is_valid_text(text: str) -> bool:
    """Returns whether a text can be sent: half of a surrogate pair, `"\\ud800"`, has no UTF-8.

    Args:
        text (`str`):
            What an escape in a model's answer may have made.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
