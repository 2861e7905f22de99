"""Choosing tokens on a GPU: the best ones, and draws with temperature, top-k, top-p and min-p, without sorting.

    all rows     chunks of 128 scores: maxima, and sums of exp(score / temperature)     one pass over the scores
    each row     the best token  |  any token by its share  |  a token of those that remain: only chunks that may hold
                 one are read again

Random numbers are counted by (seed, branch, position), so that a request's tokens do not depend on its batch, and are
those of `generation/sampling/random.py`.
"""

from __future__ import annotations

import torch
import triton

from .launching import DTYPES, check, check_dtype, on_device, register_limit
from .sampling_kernels import chunk_kernel, draw_kernel

BEST, ANY, TRUNCATED = 0, 1, 2  # kinds of draws, as the native operator for CPUs has them
NUM_SETTINGS = 5

# What this file can: dtypes, and rows up to a size.
CAPABLE_DTYPES = DTYPES
MAX_VOCAB_SIZE = 1 << 19
CHUNK = 128
TILE = 16  # chunks that a program reads at a time
STRIP = 512  # chunks whose maxima it looks at at a time
NUM_WARPS = {4: 8, 2: 4}  # of the draws, by the size of a score
UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # of a float32 that holds such a number


def argmax_tokens(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the first of the largest scores of each row.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]` float32, bfloat16 or float16, contiguous within a row.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[rows]` int64 token ids and `[rows]` float32 scores. A row that holds a
        NaN has token 0 and score NaN; one of nothing but -inf has token 0.

    Raises:
        NotSupportedError: If the dtype, the size or the strides are not taken.
    """
    return _launched(scores, None, None)


def draw_tokens(scores: torch.Tensor, settings: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses a token in each row: the best one, any, or one of those that top-k, top-p and min-p leave.

    The token is the one at which the running sum of the weights `exp(score / temperature)` passes a uniform number
    times the whole: in the order of token ids for `ANY`, from the best token on for `TRUNCATED` (equal scores by token
    id). The tokens that remain are those of Transformers' temperature, top-k, top-p and min-p warpers in this order:
    tokens that tie with the k-th remain, and the others look at what top-k left; of tokens with equal scores at the
    border of top-p, those with the lower ids remain.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]` float32, bfloat16 or float16, contiguous within a row.
        settings (`torch.Tensor`):
            `[rows, NUM_SETTINGS]` float64 or float32, contiguous: `BEST`, `ANY` or `TRUNCATED`; the temperature, from
            1e-30 to 1e30; top-k, 0 for all; top-p in (0, 1]; min-p in [0, 1]. Only `TRUNCATED` looks at the last three.
            The values are not checked, as that would wait for the device.
        keys (`torch.Tensor`):
            `[rows, 3]` int64, contiguous: the seed (its 64 bits), the branch and the position (their lower 32).

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[rows]` int64 token ids and `[rows]` float32, each row's largest score
        (NaN if it holds one). Where that is not finite the token is 0, unless it is `BEST`.

    Raises:
        NotSupportedError: If a dtype, a size or strides are not taken.
    """
    rows = len(scores)
    fits = settings.shape == (rows, NUM_SETTINGS) and settings.is_contiguous() and settings.is_floating_point()
    check(fits, f"`settings` is {list(settings.shape)} of {settings.dtype}; it must be [{rows}, {NUM_SETTINGS}].")
    fits = keys.shape == (rows, 3) and keys.is_contiguous() and keys.dtype == torch.int64
    check(fits, f"`keys` is {list(keys.shape)} of {keys.dtype}; it must be int64 [{rows}, 3].")
    return _launched(scores, settings, keys)


def _launched(
    scores: torch.Tensor, settings: torch.Tensor | None, keys: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_dtype("scores", scores, CAPABLE_DTYPES)
    check(scores.dim() == 2, f"`scores` is {list(scores.shape)}; it must be [rows, vocab_size].")
    num_rows, vocab_size = scores.shape
    check(0 < vocab_size <= MAX_VOCAB_SIZE, f"rows have {vocab_size} scores; from 1 to {MAX_VOCAB_SIZE} are taken.")
    check(vocab_size == 1 or scores.stride(1) == 1, "rows of scores must be contiguous.")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    best = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    if not num_rows:
        return tokens, best
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    maxima = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=scores.device)
    sums = active = None
    if settings is not None:
        sums, active = torch.empty_like(maxima), torch.empty_like(maxima, dtype=torch.int32)
    sizes = scores.stride(0), vocab_size, num_chunks
    with on_device(scores):
        chunk_kernel[(num_rows, triton.cdiv(num_chunks, TILE))](
            maxima, sums, scores, settings, *sizes, NUM_SETTINGS=NUM_SETTINGS, CHUNK=CHUNK, TILE=TILE, num_warps=4
        )
        draw_kernel[(num_rows,)](
            tokens, best, active, maxima, sums, scores, settings, keys, *sizes, NUM_SETTINGS=NUM_SETTINGS,
            SHIFT=UNUSED_BITS[scores.dtype], CHUNK=CHUNK, STRIP=STRIP, TILE=TILE,
            num_warps=NUM_WARPS[scores.element_size()], **register_limit(scores),
        )  # fmt: skip
    return tokens, best
