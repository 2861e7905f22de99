"""Adding a number to the scores of tokens that would complete a sequence."""

from __future__ import annotations

import collections

import torch

from .processors import Batch, ends_with


class SequenceBias:
    """Adds `sequence_bias` to the scores (Transformers' `SequenceBiasLogitsProcessor`).

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self._batch = batch
        self._always: dict[int, float] = {}  # by place in the flattened scores
        self._sequences: list[tuple[list[int], tuple[int, ...], int, float]] = []  # a request's tokens, prefix, place
        for row, request, features in batch.features:
            for sequence, bias in features.sequence_bias:
                if sequence[-1] >= batch.vocab_size:
                    continue
                place = row * batch.vocab_size + sequence[-1]
                if len(sequence) == 1:
                    self._always[place] = bias
                else:
                    self._sequences.append((request.token_ids, sequence[:-1], place, bias))

    def is_active(self) -> bool:
        """Returns whether a request of the batch has a bias."""
        return bool(self._always or self._sequences)

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        biases = collections.defaultdict(float, self._always)  # several sequences may end with one token
        for token_ids, prefix, place, bias in self._sequences:
            if ends_with(token_ids, prefix):
                biases[place] += bias
        places = torch.tensor(list(biases), dtype=torch.int64, device=scores.device)
        scores.view(-1)[places] += self._batch.tensor(list(biases.values()))
