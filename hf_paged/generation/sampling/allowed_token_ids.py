"""Only some tokens may be generated."""

from __future__ import annotations

import torch

from .processors import Batch


class AllowedTokenIds:
    """Removes all tokens but `allowed_token_ids`.

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        allowed = {
            row: request.params.allowed_token_ids
            for row, request in enumerate(batch.requests)
            if request.params.allowed_token_ids is not None
        }
        self._rows = torch.tensor(list(allowed), dtype=torch.int64, device=batch.device)
        self._places = batch.positions(allowed)

    def is_active(self) -> bool:
        """Returns whether a request of the batch allows some tokens only."""
        return len(self._rows) > 0

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        flat = scores.view(-1)
        kept = flat[self._places]
        scores[self._rows] = -torch.inf
        flat[self._places] = kept
