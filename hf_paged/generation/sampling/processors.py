"""The list of score processors, in Transformers' order, and what they have in common.

A processor is one file of this folder. It is built for a batch of requests, does nothing for those that do not use it,
and is kept while the batch stays the same. All of them come before the callers' own processors (`row_processors`),
which come before temperature, top-k, top-p, min-p and whatever else cuts by probability (`warpers`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from ..request import Request
from .features import SamplingFeatures
from .memory import Memory


@dataclasses.dataclass(frozen=True)
class Batch:
    """The requests that processors are built for.

    Args:
        requests (`Sequence[Request]`):
            Request i belongs to row i of the scores.
        vocab_size (`int`):
            Columns of the scores. Token ids beyond it are ignored, as they cannot be generated.
        device (`torch.device`):
            Where the scores are.
        memory (`Memory`):
            What is kept of each request; outlives the batch.
    """

    requests: Sequence[Request]
    vocab_size: int
    device: torch.device
    memory: Memory = dataclasses.field(default_factory=Memory)

    @functools.cached_property
    def features(self) -> list[tuple[int, Request, SamplingFeatures]]:
        """Returns the row, the request and the features of those that have any."""
        return [
            (row, request, request.extras.features)
            for row, request in enumerate(self.requests)
            if request.extras.features is not None
        ]

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


def ends_with(token_ids: Sequence[int], sequence: Sequence[int]) -> bool:
    """Returns whether the last of some tokens are a sequence.

    Args:
        token_ids (`Sequence[int]`):
            The tokens.
        sequence (`Sequence[int]`):
            What they may end with; all of them end with an empty one.
    """
    start = len(token_ids) - len(sequence)
    return start >= 0 and tuple(token_ids[start:]) == tuple(sequence)
