"""Tokens that are never generated, or not at the beginning."""

from __future__ import annotations

import torch

from .processors import Batch


class SuppressedTokens:
    """Removes `suppress_tokens` always and `begin_suppress_tokens` at `begin_index`.

    Transformers' `SuppressTokensLogitsProcessor` and `SuppressTokensAtBeginLogitsProcessor`.

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self._always = batch.positions({row: features.suppress_tokens for row, _, features in batch.features})
        self._begin = [
            (request, features.begin_index, batch.positions({row: features.begin_suppress_tokens}))
            for row, request, features in batch.features
            if features.begin_suppress_tokens
        ]

    def is_active(self) -> bool:
        """Returns whether a token of the batch is suppressed in this step."""
        return len(self._always) > 0 or any(request.num_output_tokens == begin for request, begin, _ in self._begin)

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        now = [places for request, begin, places in self._begin if request.num_output_tokens == begin]
        scores.view(-1)[torch.cat([self._always, *now])] = -torch.inf
