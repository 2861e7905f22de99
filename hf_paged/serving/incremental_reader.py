"""Text that arrives in pieces, read by a parser that is written as if all of it were there.

A parser is a generator: whenever it needs more text than has come, it yields, and `feed` resumes it. Every decision
rests on characters that have come, or on the end of the text, never on where a piece happened to end; so the joined
result cannot depend on how the text was cut. What was read is not looked at again, and what is held back is never
longer than a marker: the time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields where more text is needed
Sink = Callable[[str], object]

SPACES = re.compile(r"\s*")


class Markers:
    """Strings to look for in text that is still arriving.

    Args:
        texts (`Collection[str]`):
            The strings, none of them empty. Where several match, the first counts, then the longest.
    """

    def __init__(self, texts: Collection[str]):
        self._pattern = re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        self._first = {text[0] for text in texts}
        self._longest = max(map(len, texts), default=0)

    def find(self, text: str, start: int, closed: bool) -> tuple[int, int]:
        """Looks for the next marker.

        Args:
            text (`str`):
                What has come.
            start (`int`):
                Where to look from.
            closed (`bool`):
                Whether no more text will come.

        Returns:
            `tuple[int, int]`: Where the marker begins and ends. Without one, both are the place from which on the text
            may become a marker.
        """
        held = len(text) if closed else self._held_from(text, start)
        found = self._pattern.search(text, start)
        return found.span() if found and found.start() < held else (held, held)

    def _held_from(self, text: str, start: int) -> int:
        """The first place from which on the text is the beginning of a marker, and not yet more than that."""
        for place in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[place] in self._first and text[place:] in self._beginnings:
                return place
        return len(text)


class IncrementalReader:
    """The text that has come and is not read yet, with the reading that parsers are made of."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._closed = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        """Adds text that has come.

        Args:
            text (`str`):
                The text.
        """
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """Says that no more text will come."""
        self._closed = True

    def record(self, text: str = "") -> None:
        """Remembers from now on what is read, to give it back if it turns out to be no call.

        Args:
            text (`str`, *optional*, defaults to `""`):
                What was read just before and belongs to it.
        """
        self._record = [text]

    def recorded(self) -> str:
        """Returns what was read since `record` and stops remembering; nothing if that was stopped already."""
        text = "".join(self._record or ())
        self._record = None
        return text

    def peek(self) -> Reading[str]:
        """Returns the next character without reading it; none at the end of the text."""
        while self._at == len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def take(self, count: int = 1) -> Reading[str]:
        """Reads some characters; fewer at the end of the text.

        Args:
            count (`int`, *optional*, defaults to 1):
                How many.
        """
        while len(self._text) - self._at < count and not self._closed:
            yield
        return self._read_to(min(self._at + count, len(self._text)))

    def accept(self, literal: str) -> Reading[bool]:
        """Reads a literal if it comes next, and nothing otherwise.

        Args:
            literal (`str`):
                The characters to look for.

        Returns:
            `bool`: Whether it came.
        """
        while not self._closed and len(self._text) - self._at < len(literal):
            if not literal.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(literal, self._at):
            return False
        self._read_to(self._at + len(literal))
        return True

    def run(self, characters: re.Pattern[str], sink: Sink | None = None) -> Reading[None]:
        """Reads all characters of a set that come next.

        Args:
            characters (`re.Pattern`):
                A set of characters, starred.
            sink (`Callable`, *optional*):
                Gets them as they come.
        """
        while True:
            found = characters.match(self._text, self._at)
            text = self._read_to(found.end() if found else self._at)
            if text and sink is not None:
                sink(text)
            if self._at < len(self._text) or self._closed:
                return
            yield

    def word(self, characters: re.Pattern[str]) -> Reading[str]:
        """Reads all characters of a set that come next and returns them.

        Args:
            characters (`re.Pattern`):
                A set of characters, starred.
        """
        parts: list[str] = []
        yield from self.run(characters, parts.append)
        return "".join(parts)

    def until(self, markers: Markers, sink: Sink) -> Reading[str]:
        """Reads up to and with the next marker.

        Args:
            markers (`Markers`):
                What to look for.
            sink (`Callable`):
                Gets the text before it, as soon as it can be no part of a marker.

        Returns:
            `str`: The marker; empty at the end of the text.
        """
        while True:
            start, end = markers.find(self._text, self._at, self._closed)
            text = self._read_to(start)
            if text:
                sink(text)
            if end > start:
                return self._read_to(end)
            if self._closed:
                return ""
            yield

    def _read_to(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None and text:
            self._record.append(text)
        return text


class IncrementalParser:
    """A generator over a reader, fed with pieces of text. A subclass writes `_parse`."""

    def __init__(self) -> None:
        self._reader = IncrementalReader()
        self._running = self._parse()

    def _parse(self) -> Reading[None]:
        raise NotImplementedError

    def _push(self, text: str) -> None:
        self._reader.push(text)
        next(self._running, None)

    def _close(self) -> None:
        self._reader.close()
        next(self._running, None)
