"""Tokenizers as the grammar library has them, made once for each."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import threading
import weakref
from collections.abc import Iterable
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
    definition: dict[str, Any]
    library: Any
    eos_token_ids: tuple[int, ...]

    @property
    def num_words(self) -> int:
        """Returns the words of 32 bits that a mask has."""
        return -(-self.library.vocab_size // 32)


_made: weakref.WeakKeyDictionary[Any, dict[tuple, GrammarTokenizer]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def find_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> GrammarTokenizer | None:
    """Returns a tokenizer for grammars that has been made already.

    Args:
        tokenizer (`PreTrainedTokenizerFast`):
            A tokenizer.
        vocab_size (`int`):
            Tokens that the model's logits have.
        eos_token_ids (`Iterable[int]`):
            Tokens that end an answer.
    """
    return _made.get(tokenizer, {}).get(_key(tokenizer, vocab_size, eos_token_ids))


def grammar_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> GrammarTokenizer:
    """Returns a tokenizer for grammars; the first time takes a second.

    Args:
        tokenizer (`PreTrainedTokenizerFast`):
            A tokenizer.
        vocab_size (`int`):
            Tokens that the model's logits have.
        eos_token_ids (`Iterable[int]`):
            Tokens that end an answer.

    Raises:
        NotSupportedError: If it is not of the tokenizers library.
        InvalidRequestError: If the grammar library cannot use it.
    """
    check_tokenizer(tokenizer)
    key = _key(tokenizer, vocab_size, eos_token_ids)
    with _lock:
        found = _made.setdefault(tokenizer, {}).get(key)
        if found is None:
            found = _make(tokenizer.backend_tokenizer, max(vocab_size, len(tokenizer)), key[-1])
            _made[tokenizer][key] = found
        return found


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


def _key(tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> tuple[int, int, tuple[int, ...]]:
    return len(tokenizer), vocab_size, tuple(sorted(token for token in eos_token_ids if 0 <= token < vocab_size))


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
