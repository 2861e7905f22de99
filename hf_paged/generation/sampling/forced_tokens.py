"""The first or the last token, forced."""

from __future__ import annotations

import torch

from .processors import Batch


class ForcedTokens:
    """Leaves only `forced_bos_token_id` after a prompt of one token, and only `forced_eos_token_id` at the end.

    Transformers' `ForcedBOSTokenLogitsProcessor` and `ForcedEOSTokenLogitsProcessor`.

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self._batch = batch
        self._users = [
            (row, request, features)
            for row, request, features in batch.features
            if features.forced_bos_token_id is not None or features.forced_eos_token_id
        ]

    def _forced(self) -> dict[int, tuple[int, ...]]:
        forced: dict[int, tuple[int, ...]] = {}
        for row, request, features in self._users:
            if features.forced_bos_token_id is not None and request.num_tokens == 1:
                forced[row] = (features.forced_bos_token_id,)
            if features.forced_eos_token_id and request.num_output_tokens + 1 == features.forced_eos_length:
                forced[row] = features.forced_eos_token_id
        return forced

    def is_active(self) -> bool:
        """Returns whether a token of the batch is forced in this step."""
        return bool(self._users) and bool(self._forced())

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        forced = self._forced()
        scores[torch.tensor(list(forced), device=scores.device)] = -torch.inf
        scores.view(-1)[self._batch.positions(forced)] = 0.0
