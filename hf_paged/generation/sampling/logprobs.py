"""Log-probabilities and ranks under the model's own distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ...errors import NonFiniteLogitsError
from ...kernels.cpu import sampling as native
from ..outputs import Logprob
from .chunks import chunk_maxima, entries_above, row_blocks
from .truncation import padded_entries, top_k_thresholds

LOWEST_LOGPROB = -9999.0  # instead of -inf, which JSON cannot write; vLLM's number


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_best: Sequence[int]) -> list[dict[int, Logprob]]:
    """Computes the log-probabilities of one given token and of the best ones in each row.

    Args:
        logits (`torch.Tensor`):
            `[rows, vocab_size]`, the model's, unprocessed; each row's maximum is finite.
        token_ids (`Sequence[int]`):
            `[rows]` the given tokens.
        num_best (`Sequence[int]`):
            `[rows]` how many of the best tokens to list; 0 lists the given token alone.

    Returns:
        `list[dict[int, Logprob]]`: For each row token id -> log-probability (finite) and rank (from 1; equal tokens
        share the better one): the given token first, then the best ones in order, those of equal score by id.
    """
    results: list[dict[int, Logprob]] = []
    of_block = _native_logprobs if native.takes(logits) else _torch_logprobs
    for block in row_blocks(*logits.shape):
        results += of_block(logits[block], token_ids[block], num_best[block])
    return results


def _native_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_best: Sequence[int]
) -> list[dict[int, Logprob]]:
    tokens = torch.tensor(token_ids, dtype=torch.int64)
    log_sums, num_larger = native.measure_tokens(logits, tokens)
    normalizer, given = log_sums.numpy(), logits.gather(1, tokens[:, None])[:, 0].tolist()
    results = _given_logprobs(token_ids, given, normalizer, num_larger.add_(1).tolist())
    wanted = np.minimum(np.asarray(num_best), logits.shape[1])
    rows = np.flatnonzero(wanted)
    if len(rows):
        part = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]
        values, columns = (best.numpy() for best in native.largest_tokens(part, int(wanted.max())))
        for row, row_values, row_columns in zip(rows, values, columns, strict=True):
            _add_best(results[row], row_values[: wanted[row]], row_columns, normalizer[row])
    return results


def _torch_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_best: Sequence[int]
) -> list[dict[int, Logprob]]:
    scores = logits.float()
    normalizer = scores.logsumexp(dim=1).cpu().numpy()
    given = scores.gather(1, torch.tensor(token_ids, device=scores.device)[:, None])
    ranks = (scores > given).view(torch.uint8).sum(dim=1, dtype=torch.int32).add_(1).tolist()
    results = _given_logprobs(token_ids, given[:, 0].tolist(), normalizer, ranks)
    wanted = np.minimum(np.asarray(num_best), scores.shape[1])
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return results
    part = scores if len(rows) == len(scores) else scores[torch.from_numpy(rows).to(scores.device)]
    maxima = chunk_maxima(part)
    entries = entries_above(part, maxima, top_k_thresholds(part, maxima, wanted[rows]))
    for group, values, columns in padded_entries(*entries, num_rows=len(rows)):
        order = np.argsort(-values, axis=1, kind="stable")
        values, columns = np.take_along_axis(values, order, 1), np.take_along_axis(columns, order, 1)
        for row, row_values, row_columns in zip(rows[group], values, columns, strict=True):
            _add_best(results[row], row_values[: wanted[row]], row_columns, normalizer[row])
    return results


def _given_logprobs(
    token_ids: Sequence[int], values: Sequence[float], normalizer: np.ndarray, ranks: Sequence[int]
) -> list[dict[int, Logprob]]:
    return [
        {token_id: _logprob(value, log_sum, rank)}
        for token_id, value, log_sum, rank in zip(token_ids, values, normalizer, ranks, strict=True)
    ]


def _add_best(result: dict[int, Logprob], ordered: np.ndarray, columns: np.ndarray, log_sum: float) -> None:
    """Adds the best tokens of a row: their scores, best first, and their columns."""
    values = ordered.tolist()
    for place, (token_id, value) in enumerate(zip(columns.tolist(), values, strict=False)):
        if value == -math.inf:  # fewer tokens than asked for have any probability
            break
        rank = values.index(value, 0, place + 1) + 1
        result.setdefault(token_id, _logprob(value, log_sum, rank))


def _logprob(value: float, log_sum: float, rank: int) -> Logprob:
    return Logprob(max(float(value - log_sum), LOWEST_LOGPROB), rank)


def prompt_logprobs(logits: torch.Tensor, next_token_ids: Sequence[int], k: int) -> list[dict[int, Logprob]]:
    """Computes the log-probabilities of prompt tokens.

    Memory beyond the logits is bounded: they are widened to float32 a block of rows at a time.

    Args:
        logits (`torch.Tensor`):
            `[n, vocab_size]`, the model's, at n prompt positions.
        next_token_ids (`Sequence[int]`):
            `[n]` the token that follows each of these positions.
        k (`int`):
            How many of the best tokens to list beside the one that follows.

    Returns:
        `list[dict[int, Logprob]]`: n times token id -> log-probability and rank, as `token_logprobs`.

    Raises:
        NonFiniteLogitsError: If a row of the logits has NaN or infinity, or nothing but -inf.
    """
    next_token_ids = list(next_token_ids)
    assert len(logits) == len(next_token_ids), f"{len(logits)} rows of logits for {len(next_token_ids)} tokens"
    bad = (~torch.isfinite(logits.amax(dim=1))).nonzero()[:, 0].tolist() if len(logits) else []
    if bad:
        raise NonFiniteLogitsError(
            f"The model's logits at {len(bad)} of {len(logits)} prompt positions (the first is number {bad[0]} of "
            "these) are NaN or infinite, so `prompt_logprobs` cannot be computed; check the weights and the dtype."
        )
    return token_logprobs(logits, next_token_ids, [k] * len(next_token_ids))
