"""How far one answer has followed its grammar."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import numpy as np

from ...errors import EngineError, InvalidRequestError
from .cache import CompiledGrammar
from .grammar_process import shorten


class Matcher:
    """Follows the tokens of one answer, and says which tokens may come next.

    Args:
        grammar (`CompiledGrammar`):
            The grammar.
        stop_token_ids (`Collection[int]`):
            The tokens that end the answer; allowed exactly where the grammar accepts.
    """

    def __init__(self, grammar: CompiledGrammar, stop_token_ids: Collection[int]):
        self.library = grammar.start.deep_copy()
        self.tokenizer = grammar.tokenizer
        self._num_consumed = 0
        self._has_ended = False
        known, ends = set(grammar.tokenizer.eos_token_ids), set(stop_token_ids)
        self._further_ends = sorted(ends - known)
        self._no_ends = sorted(known - ends)
        self._ends = ends

    def advance(self, token_ids: Sequence[int], lenient: bool = False) -> None:
        """Takes in the tokens that the answer got since the last time.

        Args:
            token_ids (`Sequence[int]`):
                All tokens of the answer so far.
            lenient (`bool`, defaults to `False`):
                A token that was not allowed is no error but ends the answer, as far as the grammar goes.

        Raises:
            InvalidRequestError: If the grammar became too large.
            EngineError: If a token is none that was allowed.
        """
        for place in range(self._num_consumed, len(token_ids)):
            self._has_ended = self._has_ended or token_ids[place] in self._ends
            if lenient and not self._has_ended:
                self._has_ended = not self.library.validate_tokens([token_ids[place]])
            if not self._has_ended and not self.library.consume_token(token_ids[place]):
                raise self.error() or EngineError(f"The token {token_ids[place]} left the grammar of its request.")
        self._num_consumed = len(token_ids)

    def copy(self) -> Matcher:
        """Returns one that has come as far, and goes its own way."""
        other = copy.copy(self)
        other.library = self.library.deep_copy()
        return other

    def fill(self, mask: np.ndarray) -> None:
        """Computes which tokens may come next, all of them after the end.

        Args:
            mask (`np.ndarray`):
                `[words]` int32, packed; for as many tokens as the model has.

        Raises:
            InvalidRequestError: If the grammar became too large.
        """
        if self._has_ended:
            mask.fill(-1)
            return
        words = np.frombuffer(self.library.compute_bitmask(), dtype=np.int32)[: len(mask)]
        error = self.error()
        if error is not None:
            raise error
        mask[: len(words)] = words
        self.finish_mask(mask)

    @property
    def is_done(self) -> bool:
        """Returns whether the grammar can go no further."""
        return self.library.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """Returns whether the answer may end here."""
        return self.library.is_accepting()

    def error(self) -> InvalidRequestError | None:
        """Returns why the grammar cannot be followed any more, if so."""
        if not self.library.is_error():
            return None
        return InvalidRequestError(
            "The grammar of `structured_outputs` cannot be followed any further: "
            f"{shorten(self.library.get_error())}. A simpler grammar may be."
        )

    def finish_mask(self, mask: np.ndarray) -> None:
        """Adapts a filled mask to the tokens that end this answer.

        Args:
            mask (`np.ndarray`):
                `[words]` int32, packed.
        """
        if not self._further_ends and not self._no_ends:
            return
        bits = mask.view(np.uint32)
        for token_id in self._no_ends:
            bits[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
        accepts = self.is_accepting
        for token_id in self._further_ends:
            if accepts:
                bits[token_id // 32] |= np.uint32(1 << token_id % 32)
            else:
                bits[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
