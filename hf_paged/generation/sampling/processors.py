"""The list of score processors, in Transformers' order, and what they have in common.

A processor is one file of this folder. It is built for a batch of requests, does nothing for those that do not use it,
and is kept while the batch stays the same. All of them come before temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from ..request import Request
from .token_counts import TokenCounts


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """The requests that processors are built for.

    Args:
        requests (`Sequence[Request]`):
            Request i belongs to row i of the scores.
        vocab_size (`int`):
            Columns of the scores. Token ids beyond it are ignored, as they cannot be generated.
        device (`torch.device`):
            Where the scores are.
        token_counts (`dict[str, TokenCounts]`):
            What is known of each request's tokens, by request id; outlives the batch.
    """

    requests: Sequence[Request]
    vocab_size: int
    device: torch.device
    token_counts: dict[str, TokenCounts]

    def positions(self, token_ids: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Returns the places of some tokens in the flattened scores.

        Args:
            token_ids (`Mapping[int, Sequence[int]]`):
                Tokens by row.

        Returns:
            `torch.Tensor`: int64, by row, without tokens beyond the vocabulary.
        """
        places = [
            row * self.vocab_size + token_id
            for row, ids in token_ids.items()
            for token_id in ids
            if token_id < self.vocab_size
        ]
        return torch.tensor(places, dtype=torch.int64, device=self.device)

    def tensor(self, values: Sequence[float] | np.ndarray) -> torch.Tensor:
        """Returns numbers as a float32 tensor on the scores' device.

        Args:
            values (`Sequence[float]` or `np.ndarray`):
                The numbers.
        """
        return torch.as_tensor(np.asarray(values, dtype=np.float32), device=self.device)


class Processor(Protocol):
    """Changes the scores of the rows that use one feature."""

    def __init__(self, batch: Batch):
        """Collects what the feature needs of each request.

        Args:
            batch (`Batch`):
                The requests.
        """

    def is_active(self) -> bool:
        """Returns whether it changes any score in this step."""
        ...

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        ...
