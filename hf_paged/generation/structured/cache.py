"""Compiled grammars that may be wanted again."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any

from ...errors import InvalidRequestError
from .params import GrammarSource
from .tokenizers import GrammarTokenizer

MAX_ENTRIES = 1024
MAX_BYTES = 2**27
# The answers that follow a grammar share an automaton, which grows with them: what it learns of each token is counted
# with the grammar, and one that has grown by so much is compiled anew when it is next wanted.
BYTES_PER_TOKEN = 2**11
MAX_GROWTH = 2**26


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar, ready to be followed by any number of answers.

    Args:
        source (`GrammarSource`):
            What it was compiled from.
        tokenizer (`GrammarTokenizer`):
            What it was compiled for.
        start (`LLMatcher`):
            A matcher at the start; it is copied, never used.
        num_bytes (`int`):
            What it holds.
    """

    source: GrammarSource
    tokenizer: GrammarTokenizer
    start: Any
    num_bytes: int

    def __repr__(self) -> str:
        return f"CompiledGrammar({self.source.kind!r}, {self.source.text[:60]!r}, {self.num_bytes:,} bytes)"


@dataclasses.dataclass
class _Entry:
    outcome: CompiledGrammar | str
    num_bytes: int
    growth: int = 0


class GrammarCache:
    """The last grammars that were compiled, and those that were refused. Thread-safe.

    Args:
        max_entries (`int`, *optional*):
            Grammars at most.
        max_bytes (`int`, *optional*):
            What they may hold together.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES):
        self.num_bytes = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: collections.OrderedDict[tuple[str, GrammarSource], _Entry] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tokenizer: GrammarTokenizer, source: GrammarSource) -> CompiledGrammar | None:
        """Returns a grammar that is there.

        Args:
            tokenizer (`GrammarTokenizer`):
                What it was compiled for.
            source (`GrammarSource`):
                What it was compiled from.

        Raises:
            InvalidRequestError: If it was refused.
        """
        with self._lock:
            entry = self._entries.get((tokenizer.name, source))
            if entry is None:
                return None
            self._entries.move_to_end((tokenizer.name, source))
        if isinstance(entry.outcome, str):
            raise InvalidRequestError(entry.outcome)
        return entry.outcome

    def put(self, tokenizer: GrammarTokenizer, source: GrammarSource, outcome: CompiledGrammar | str) -> None:
        """Keeps a grammar, or why it was refused.

        Args:
            tokenizer (`GrammarTokenizer`):
                What it was compiled for.
            source (`GrammarSource`):
                What it was compiled from.
            outcome (`CompiledGrammar` or `str`):
                The grammar, or the message.
        """
        size = 2 * len(source.text) + (len(outcome) if isinstance(outcome, str) else outcome.num_bytes)
        with self._lock:
            self._drop((tokenizer.name, source))
            self._entries[tokenizer.name, source] = _Entry(outcome, size)
            self.num_bytes += size
            self._shrink()

    def used(self, grammar: CompiledGrammar, num_tokens: int, is_worn_out: bool) -> None:
        """An answer has followed a grammar to its end.

        Args:
            grammar (`CompiledGrammar`):
                The grammar.
            num_tokens (`int`):
                How many tokens the answer has.
            is_worn_out (`bool`):
                Whether the grammar became too large.
        """
        key = grammar.tokenizer.name, grammar.source
        growth = BYTES_PER_TOKEN * num_tokens
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.outcome is not grammar:
                return
            entry.growth += growth
            entry.num_bytes += growth
            self.num_bytes += growth
            if is_worn_out or entry.growth > MAX_GROWTH:
                self._drop(key)
            self._shrink()

    def _drop(self, key: tuple[str, GrammarSource]) -> None:
        entry = self._entries.pop(key, None)
        self.num_bytes -= entry.num_bytes if entry is not None else 0

    def _shrink(self) -> None:
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))
