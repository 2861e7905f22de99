"""Structured output in Transformers' own loop: beams, assistants, whatever the engine does not run by itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from ...errors import NotSupportedError
from ..sampling.bitmask import apply_bitmask
from .cache import CompiledGrammar
from .matcher import Matcher


class GrammarLogitsProcessor(LogitsProcessor):
    """Leaves each row the tokens that its grammar allows.

    It keeps the state of every row by its tokens, so that rows may be reordered, dropped and doubled.

    Args:
        grammar (`CompiledGrammar`):
            The grammar.
        eos_token_ids (`Collection[int]`):
            The tokens that end a row; at least one.

    Raises:
        NotSupportedError: If no token ends a row, so that the loop would have nothing to choose at the end.
    """

    def __init__(self, grammar: CompiledGrammar, eos_token_ids: Collection[int]):
        if not eos_token_ids:
            raise NotSupportedError("`structured_outputs` in Transformers' own loop needs an `eos_token_id`.")
        self._start = Matcher(grammar, eos_token_ids)
        self._matchers: dict[tuple[int, ...], Matcher] = {}
        self._prompt_length: int | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """Returns the scores, minus infinity for tokens that are not allowed.

        Args:
            input_ids (`torch.LongTensor`):
                `[rows, length]`.
            scores (`torch.FloatTensor`):
                `[rows, vocab_size]`.

        Raises:
            InvalidRequestError: If the grammar became too large.
        """
        if self._prompt_length is None:
            self._prompt_length = input_ids.shape[1]
        rows = [tuple(row) for row in input_ids[:, self._prompt_length :].tolist()]
        matchers = {row: self._matcher(row) for row in rows}
        num_words = -(-scores.shape[1] // 32)
        masks = np.zeros((len(rows), num_words), dtype=np.int32)
        for mask, row in zip(masks, rows, strict=True):
            matchers[row].fill(mask)
        self._matchers = matchers
        scores = scores.to(torch.float32, copy=True)  # type: ignore[assignment]
        apply_bitmask(scores, torch.from_numpy(masks))
        return scores

    def _matcher(self, tokens: tuple[int, ...]) -> Matcher:
        known = self._matchers.get(tokens)
        if known is not None:
            return known
        matcher = (self._matchers.get(tokens[:-1]) or self._start).copy()
        matcher.advance(tokens, lenient=True)  # beams of no probability are given any token
        return matcher
