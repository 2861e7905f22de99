"""Numbers in place of NaN and infinity."""

from __future__ import annotations

import torch

from .processors import Batch


class InvalidValues:
    """Replaces NaN by 0 and infinities by the largest numbers (Transformers' `InfNanRemoveLogitsProcessor`).

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self.rows = [row for row, _, features in batch.features if features.remove_invalid_values]

    def is_active(self) -> bool:
        """Returns whether a request of the batch asks for it."""
        return bool(self.rows)

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        rows = torch.tensor(self.rows, device=scores.device)
        scores[rows] = torch.nan_to_num(scores[rows], nan=0.0)
