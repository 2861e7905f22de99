"""Adding a number to the scores of some tokens."""

from __future__ import annotations

import torch

from .processors import Batch


class LogitBias:
    """Adds `logit_bias` to the scores (Transformers' `SequenceBiasLogitsProcessor` for single tokens).

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        biases = {row: request.params.logit_bias or {} for row, request in enumerate(batch.requests)}
        self._places = batch.positions({row: list(bias) for row, bias in biases.items()})
        self._values = batch.tensor(
            [value for bias in biases.values() for token_id, value in bias.items() if token_id < batch.vocab_size]
        )

    def is_active(self) -> bool:
        """Returns whether a request of the batch has a bias."""
        return len(self._places) > 0

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        scores.view(-1)[self._places] += self._values
