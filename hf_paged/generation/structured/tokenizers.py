"""Tokenizers as the grammar library has them, made once for each."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import threading
import weakref
from typing import Any

from ...errors import InvalidRequestError, NotSupportedError
from . import grammar_process


@dataclasses.dataclass(frozen=True, eq=False)
class GrammarTokenizer:
    """A tokenizer for grammars.

    Args:
        name (`str`):
            Tells it from others.
        definition (`dict[str, Any]`):
            How another process makes the same.
        library (`LLTokenizer`):
            The grammar library's own.
        eos_token_ids (`tuple[int, ...]`):
            The tokens that it takes for ends.
    """

    name: str
    definition: dict[str, Any] = dataclasses.field(repr=False)  # megabytes
    library: Any = dataclasses.field(repr=False)
    eos_token_ids: tuple[int, ...]

    @property
    def num_words(self) -> int:
        """Returns the words of 32 bits that a mask has."""
        return -(-self.library.vocab_size // 32)


_made: weakref.WeakKeyDictionary[Any, dict[tuple, GrammarTokenizer]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer and the model's side of it.

    Args:
        tokenizer (`PreTrainedTokenizerFast`):
            The tokenizer.
        vocab_size (`int`):
            Tokens that the model's logits have.
        eos_token_ids (`frozenset[int]`):
            Tokens that end an answer.

    Raises:
        NotSupportedError: If the tokenizer is not of the tokenizers library.
    """

    tokenizer: Any
    vocab_size: int
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer)

    def find(self) -> GrammarTokenizer | None:
        """Returns the tokenizer for grammars, if it has been made."""
        return _made.get(self.tokenizer, {}).get(self._key())

    def make(self) -> GrammarTokenizer:
        """Returns the tokenizer for grammars; takes a second the first time.

        Raises:
            InvalidRequestError: If the grammar library cannot use it.
        """
        tokenizer, key = self.tokenizer, self._key()
        with _lock:
            found = _made.setdefault(tokenizer, {}).get(key)
            if found is None:
                found = _make(tokenizer.backend_tokenizer, max(self.vocab_size, len(tokenizer)), key[-1])
                _made[tokenizer][key] = found
            return found

    def _key(self) -> tuple[int, int, tuple[int, ...]]:
        ends = tuple(sorted(token for token in self.eos_token_ids if 0 <= token < self.vocab_size))
        return len(self.tokenizer), self.vocab_size, ends


def check_tokenizer(tokenizer: Any) -> None:
    """Checks that grammars can be compiled for a tokenizer.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A tokenizer.

    Raises:
        NotSupportedError: If it is not of the tokenizers library.
    """
    if not hasattr(getattr(tokenizer, "backend_tokenizer", None), "to_str"):
        raise NotSupportedError(
            f"`structured_outputs` needs a fast tokenizer (of the tokenizers library), and {type(tokenizer).__name__} "
            "is none; load it with `AutoTokenizer.from_pretrained(name, use_fast=True)`."
        )


def _make(backend: Any, vocab_size: int, eos: tuple[int, ...]) -> GrammarTokenizer:
    backend = copy.copy(backend)
    backend.no_padding()
    backend.no_truncation()
    definition = {"json": backend.to_str(), "vocab_size": vocab_size, "eos_token_ids": list(eos)}
    name = hashlib.blake2b(repr(sorted(definition.items())).encode(), digest_size=16).hexdigest()
    try:
        library = grammar_process.make_tokenizer(definition)
    except ValueError as error:
        raise InvalidRequestError(f"Structured output cannot use this tokenizer: {error}") from error
    return GrammarTokenizer(name, definition, library, tuple(library.eos_tokens))


def forget_lock() -> None:
    """In a forked process the thread that held it may not exist."""
    global _lock
    _lock = threading.Lock()
