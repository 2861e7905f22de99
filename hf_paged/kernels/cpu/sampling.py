"""Choosing tokens by native code: the best ones, draws with top-k, top-p and min-p, and what log-probabilities need."""

from __future__ import annotations

import functools

import torch

from . import library

BEST, ANY, TRUNCATED = 0, 1, 2  # kinds of draws
NUM_SETTINGS = 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def load() -> bool:
    """Makes the operators of this file available, and returns whether they are."""
    if not library.load():
        return False
    _register_fakes()
    return True


def takes(scores: torch.Tensor) -> bool:
    """Returns whether the operators of this file can be used on some scores.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`.
    """
    return scores.device.type == "cpu" and scores.dtype in DTYPES and scores.stride(1) == 1 and load()


def argmax_tokens(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the first of the largest scores of each row.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]` float32, bfloat16 or float16 on the CPU, contiguous within a row.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[rows]` int64 token ids and `[rows]` float32 scores. A row that holds a
        NaN has token 0 and score NaN; one of nothing but -inf has token 0.
    """
    return torch.ops.hf_paged.argmax_tokens(scores)


def draw_tokens(
    scores: torch.Tensor, settings: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses a token in each row: the best one, any, or one of those that top-k, top-p and min-p leave.

    The token is the one at which the running sum of the weights `exp(score / temperature)` passes `uniform` times the
    whole: in the order of token ids for `ANY`, from the best token on for `TRUNCATED` (equal scores by token id). Only
    the tokens that may remain are sorted. The results are those of Transformers' temperature, top-k, top-p and min-p
    warpers in this order: tokens that tie with the k-th remain, and the others look at what top-k left.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]` float32, bfloat16 or float16 on the CPU, contiguous within a row.
        settings (`torch.Tensor`):
            `[rows, NUM_SETTINGS]` float64, contiguous: `BEST`, `ANY` or `TRUNCATED`; the temperature, from 1e-30 to
            1e30; top-k, 0 for all; top-p in (0, 1]; min-p in [0, 1]. Only `TRUNCATED` looks at the last three.
        uniform (`torch.Tensor`):
            `[rows]` float64 in (0, 1), contiguous.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[rows]` int64 token ids and `[rows]` float32, each row's largest score
        (NaN if it holds one). Where that is not finite the token is 0, unless it is `BEST`.
    """
    return torch.ops.hf_paged.draw_tokens(scores, settings, uniform)


def measure_tokens(scores: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what the log-probability and the rank of one token in each row need.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]` float32, bfloat16 or float16 on the CPU, contiguous within a row; each row's largest
            is finite.
        token_ids (`torch.Tensor`):
            `[rows]` int64, contiguous.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[rows]` float32, `log(sum(exp(scores)))`, and `[rows]` int64, how many
        scores are larger than the token's.

    Raises:
        RuntimeError: If a token is not one of the row's.
    """
    return torch.ops.hf_paged.measure_tokens(scores, token_ids)


def largest_tokens(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists the best tokens of each row, without sorting it.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]` float32, bfloat16 or float16 on the CPU, contiguous within a row, without NaN.
        k (`int`):
            How many, from 1 to `vocab_size`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[rows, k]` float32 scores, best first, and `[rows, k]` int64 token ids,
        those of equal scores ascending; -inf and 0 where fewer tokens have a score above -inf.
    """
    return torch.ops.hf_paged.largest_tokens(scores, k)


def philox_uniforms(keys: torch.Tensor) -> torch.Tensor:
    """Draws one uniform number for each (seed, branch, position), by Philox4x32-10.

    Args:
        keys (`torch.Tensor`):
            `[n, 3]` int64, contiguous: the seed (its 64 bits), the branch and the position (their lower 32).

    Returns:
        `torch.Tensor`: `[n]` float64, each strictly between 0 and 1.
    """
    return torch.ops.hf_paged.philox_uniforms(keys)


def _register_fakes() -> None:
    def per_row(scores: torch.Tensor, *dtypes: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tuple(scores.new_empty(scores.shape[0], dtype=dtype) for dtype in dtypes)

    def largest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (scores.shape[0], k)
        return scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=torch.int64)

    register = torch.library.register_fake
    register("hf_paged::argmax_tokens", lambda scores: per_row(scores, torch.int64, torch.float32))
    register("hf_paged::draw_tokens", lambda scores, *_: per_row(scores, torch.int64, torch.float32))
    register("hf_paged::measure_tokens", lambda scores, _: per_row(scores, torch.float32, torch.int64))
    register("hf_paged::largest_tokens", largest)
    register("hf_paged::philox_uniforms", lambda keys: per_row(keys, torch.float64)[0])
