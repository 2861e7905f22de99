"""Choosing a token by a uniform number: the inverse of the cumulative distribution."""

from __future__ import annotations

import numpy as np
import torch

from .chunks import gather_chunks
from .truncation import Candidates, chunk_weights


def draw_candidates(candidates: Candidates, uniform: np.ndarray) -> np.ndarray:
    """Chooses one of the remaining tokens in each row.

    Args:
        candidates (`Candidates`):
            What remains of the rows.
        uniform (`np.ndarray`):
            `[n]` float64 in (0, 1), for `candidates.rows`.

    Returns:
        `np.ndarray`: `[n]` token ids.
    """
    each = np.arange(len(uniform))
    target = uniform * candidates.cumulative[each, candidates.counts - 1]
    # The first token whose running weight exceeds the target has weight: the one before does not exceed it.
    place = (candidates.cumulative <= target[:, None]).sum(axis=1)
    return candidates.tokens_at(np.minimum(place, candidates.counts - 1))


def draw_full(
    scores: torch.Tensor, best: torch.Tensor, rows: np.ndarray, temperature: np.ndarray, uniform: np.ndarray
) -> np.ndarray:
    """Chooses a token of the whole vocabulary in each row: first the chunk, then the token in it.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`.
        best (`torch.Tensor`):
            `[rows]` float32, each row's maximum, finite.
        rows (`np.ndarray`):
            `[n]` the rows to do.
        temperature (`np.ndarray`):
            `[n]` positive.
        uniform (`np.ndarray`):
            `[n]` float64 in (0, 1).

    Returns:
        `np.ndarray`: `[n]` token ids.
    """
    each = np.arange(len(rows))
    cumulative = np.cumsum(chunk_weights(scores, best, rows, temperature), axis=1)
    target = uniform * cumulative[:, -1]
    chunk = np.minimum((cumulative <= target[:, None]).sum(axis=1), cumulative.shape[1] - 1)
    end = cumulative[each, chunk]
    start = np.where(chunk > 0, cumulative[each, chunk - 1], 0)

    index = torch.from_numpy(rows).to(scores.device)
    values, columns = gather_chunks(scores, index, torch.from_numpy(chunk).to(scores.device))
    relative = values.cpu().numpy().astype(np.float64) - best[index].cpu().numpy()[:, None]
    weights = np.exp(relative / temperature[:, None])
    inside = np.cumsum(weights, axis=1)
    # The chunk's weight was summed in float32 above and in float64 here; the share of the way through it is kept.
    target = (target - start) / (end - start) * inside[:, -1]
    place = (inside <= target[:, None]).sum(axis=1)
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    return columns.cpu().numpy()[each, np.minimum(place, last)]
