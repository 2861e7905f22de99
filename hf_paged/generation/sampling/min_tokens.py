"""No ending before a number of tokens."""

from __future__ import annotations

import torch

from .processors import Batch


class MinTokens:
    """Removes the tokens that end a request while it has fewer than `min_tokens` (`MinNewTokensLengthLogitsProcessor`).

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self._requests = {
            row: request
            for row, request in enumerate(batch.requests)
            if request.params.min_tokens and request.stop_token_ids
        }
        self._places = {row: batch.positions({row: sorted(r.stop_token_ids)}) for row, r in self._requests.items()}

    def _rows(self) -> list[int]:
        return [row for row, r in self._requests.items() if r.num_output_tokens < r.params.min_tokens]

    def is_active(self) -> bool:
        """Returns whether a request of the batch is too short yet."""
        return bool(self._requests) and bool(self._rows())

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        scores.view(-1)[torch.cat([self._places[row] for row in self._rows()])] = -torch.inf
