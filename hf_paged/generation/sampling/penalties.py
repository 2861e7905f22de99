"""Repetition, presence and frequency penalties."""

from __future__ import annotations

import numpy as np
import torch

from ..request import Request
from .processors import Batch
from .token_counts import TokenCounts


class Penalties:
    """Penalties for tokens that are there already.

    The repetition penalty divides positive and multiplies negative scores of tokens in the prompt or the answer, once
    per token (Keskar et al. 2019, "CTRL", as in Transformers). The presence and frequency penalties are subtracted from
    tokens in the answer, the second once for each time (OpenAI's definition).

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self._batch = batch
        self._rows: list[int] = []
        self._counts: list[TokenCounts] = []
        factors: list[tuple[float, float, float]] = []
        for row, request in enumerate(batch.requests):
            params = request.params
            factor = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            if factor != (1, 0, 0):
                self._rows.append(row)
                self._counts.append(_counts_of(batch, request))
                factors.append(factor)
        self._factors = np.array(factors, dtype=np.float32).reshape(-1, 3)

    def is_active(self) -> bool:
        """Returns whether a request of the batch has a penalty."""
        return bool(self._rows)

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        batch = self._batch
        for counts in self._counts:
            counts.update()
        lengths = [len(counts.token_ids) for counts in self._counts]
        token_ids = np.concatenate([counts.token_ids for counts in self._counts])
        times = np.concatenate([counts.counts for counts in self._counts])
        repetition, presence, frequency = np.repeat(self._factors, lengths, axis=0).T
        places = np.repeat(np.array(self._rows), lengths) * batch.vocab_size + token_ids
        if len(token_ids) and token_ids.max() >= batch.vocab_size:
            known = token_ids < batch.vocab_size
            places, times = places[known], times[known]
            repetition, presence, frequency = repetition[known], presence[known], frequency[known]
        flat, index = scores.view(-1), torch.from_numpy(places).to(batch.device)
        values, penalty = flat[index], batch.tensor(repetition)
        values = torch.where(values < 0, values * penalty, values / penalty)
        flat[index] = values - batch.tensor(frequency * times + presence * (times > 0))


def _counts_of(batch: Batch, request: Request) -> TokenCounts:
    # A prompt of embeddings has no tokens; what stands in their place must not be penalized.
    with_prompt = request.params.repetition_penalty != 1 and request.extras.prompt_embeds is None
    return batch.memory.recall(request, "token counts", lambda request: TokenCounts(request, with_prompt))
