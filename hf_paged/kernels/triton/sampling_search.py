"""Finding tokens by their scores without sorting: what the kernels of `sampling.py` are made of.

A row is read in chunks of `CHUNK`; those that may hold a token that remains are listed once (`list_active`), and all
questions are then put to these alone. Each question is one of two: how many tokens have at least some score, and what
do they weigh. The answers grow as the score falls, so that the score at which one passes a target is found by halving
(`search`), with scores as whole numbers in the same order (`key_of`): no more steps than a score has bits.

    weight of a token = 2 ** ((score - best) * rate),   rate = log2(e) / temperature

Sums are taken in a fixed order, so that a row's result does not depend on what is beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(1 << 30)  # larger than any column


@triton.jit
def key_of(score, SHIFT: tl.constexpr):
    """Returns a float32 score as an integer, in the same order; scores of 16-bit dtypes leave `SHIFT` bits unused."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def score_of(key, SHIFT: tl.constexpr):
    """Returns the score of an integer."""
    bits = (key << SHIFT) | ((key >> 31) & ((1 << SHIFT) - 1))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(scores, best, rate):
    """Returns the weights of tokens, float32; 1 for the best."""
    return tl.exp2((scores - best) * rate)


@triton.jit
def list_active(active_ptr, maxima_ptr, num_chunks, least, CHUNKS: tl.constexpr):
    """Writes down the chunks whose maximum is at least some score, in order; returns how many."""
    chunks = tl.arange(0, CHUNKS)
    is_active = tl.load(maxima_ptr + chunks, mask=chunks < num_chunks, other=float("-inf")) >= least
    places = tl.cumsum(is_active.to(tl.int32), 0) - 1
    tl.debug_barrier()  # all have read the list before it is written anew, and it is written before it is read
    tl.store(active_ptr + places, chunks, mask=is_active)
    tl.debug_barrier()
    return tl.sum(is_active.to(tl.int32), 0)


@triton.jit
def load_active(scores_ptr, active_ptr, first, num_active, vocab_size, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Loads the `TILE` chunks of the list from `first` on; returns float32 scores and their columns `[TILE, CHUNK]`."""
    places = first + tl.arange(0, TILE)
    is_listed = places < num_active
    chunks = tl.load(active_ptr + places, mask=is_listed, other=0)
    columns = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = is_listed[:, None] & (columns < vocab_size)
    return tl.load(scores_ptr + columns, mask=mask, other=float("-inf")).to(tl.float32), columns


@triton.jit
def weigh(
    scores_ptr, active_ptr, num_active, vocab_size, low, best, rate, SHIFT: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Returns what the active tokens from a key on weigh, float64."""
    least = score_of(low, SHIFT)
    masses = tl.zeros([TILE], tl.float64)
    for first in range(0, num_active, TILE):
        scores, _ = load_active(scores_ptr, active_ptr, first, num_active, vocab_size, CHUNK, TILE)
        masses += tl.sum(tl.where(scores >= least, weights_of(scores, best, rate), 0.0), 1).to(tl.float64)
    return tl.sum(masses, 0)


@triton.jit
def count(
    scores_ptr, active_ptr, num_active, vocab_size, low, SHIFT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr
):
    """Returns how many active tokens there are from a key on, float32: integers would be counted through the stack."""
    least = score_of(low, SHIFT)
    counts = tl.zeros([TILE], tl.float32)
    for first in range(0, num_active, TILE):
        scores, _ = load_active(scores_ptr, active_ptr, first, num_active, vocab_size, CHUNK, TILE)
        counts += tl.sum(tl.where(scores >= least, 1.0, 0.0), 1)
    return tl.sum(counts, 0)


@triton.jit
def search(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    scores_ptr, active_ptr, num_active, vocab_size, low, target, best, rate, BY_COUNT: tl.constexpr,
    STRICT: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns the largest key from which on tokens are at least `target` (more than it if `STRICT`); `low` if none."""
    high = key_of(best, SHIFT) + 1
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # of both, without overflow
        if BY_COUNT:
            measured = count(scores_ptr, active_ptr, num_active, vocab_size, middle, SHIFT, CHUNK, TILE)
        else:
            measured = weigh(scores_ptr, active_ptr, num_active, vocab_size, middle, best, rate, SHIFT, CHUNK, TILE)
        is_reached = measured > target if STRICT else measured >= target
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low


@triton.jit
def kth_largest(maxima, k, low, high):
    """Returns the key of the k-th largest of some numbers, or `low` if there are fewer above it; exact to 2**-8 of it.

    It is a bound only: the lower 16 bits of keys are not looked at.
    """
    low = low >> 16
    high = (high >> 16) + 1
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # of both, without overflow
        is_reached = tl.sum((maxima >= score_of(middle << 16, 0)).to(tl.int32), 0) >= k
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low << 16


@triton.jit
def nth_equal(scores_ptr, active_ptr, num_active, vocab_size, score, number, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Returns the column of the token with a score that has `number` of them before it, or of the last one."""
    found = tl.full([TILE * CHUNK], -1, tl.int32)
    seen = 0
    for first in range(0, num_active, TILE):
        scores, columns = load_active(scores_ptr, active_ptr, first, num_active, vocab_size, CHUNK, TILE)
        is_equal = tl.reshape((scores == score).to(tl.int32), [TILE * CHUNK])
        rank = seen + tl.cumsum(is_equal, 0) - 1
        is_before = (is_equal > 0) & (rank <= number)
        found = tl.maximum(found, tl.where(is_before, tl.reshape(columns, [TILE * CHUNK]), -1))
        seen += tl.sum(is_equal, 0)
    return tl.max(found, 0)


@triton.jit
def pick(weights, target, SIZE: tl.constexpr):
    """Returns the first place with weight at which the running sum passes a target, or the last one with weight."""
    places = tl.arange(0, SIZE)
    is_behind = (tl.cumsum(weights, 0) > target) & (weights > 0)
    first = tl.min(tl.where(is_behind, places, NOWHERE), 0)
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    return tl.minimum(first, last)
