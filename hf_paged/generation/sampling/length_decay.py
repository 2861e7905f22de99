"""The longer the answer, the likelier its end."""

from __future__ import annotations

import numpy as np
import torch

from .processors import Batch


class LengthDecay:
    """Raises the end tokens' scores after `exponential_decay_length_penalty[0]` new tokens, more with each further one.

    Transformers' `ExponentialDecayLengthPenalty`: `|score| * (factor ** tokens beyond the start - 1)` is added to
    finite scores.

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self._batch = batch
        self._users = [
            (row, request, *features.exponential_decay_length_penalty)
            for row, request, features in batch.features
            if features.exponential_decay_length_penalty is not None and request.stop_token_ids
        ]

    def is_active(self) -> bool:
        """Returns whether an answer of the batch is long enough."""
        return any(request.num_output_tokens > start for _, request, start, _ in self._users)

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        ends: dict[int, list[int]] = {}
        factors: list[float] = []
        for row, request, start, factor in self._users:
            beyond = request.num_output_tokens - start
            if beyond > 0:
                ends[row] = sorted(token for token in request.stop_token_ids if token < self._batch.vocab_size)
                with np.errstate(over="ignore"):
                    factors += [float(np.power(np.float64(factor), beyond) - 1)] * len(ends[row])
        flat, places = scores.view(-1), self._batch.positions(ends)
        values = flat[places]
        # What grows beyond float32 stays its largest number: an infinite score has no probability.
        grown = (values + values.abs() * self._batch.tensor(factors)).nan_to_num(nan=0.0)
        flat[places] = torch.where(values.isfinite(), grown, values)
