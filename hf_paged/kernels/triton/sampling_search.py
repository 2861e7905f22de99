"""Finding tokens by their scores without sorting: what the kernels of `sampling.py` are made of.

A row is read in chunks of `CHUNK`; those that may hold a token that remains are listed once (`list_active`), and all
questions are then put to these alone. Each question is one of two: how many tokens have at least some score, and what
do they weigh. The answers grow as the score falls, so that the score at which one passes a target is found by halving
(`search`), with scores as whole numbers in the same order (`key_of`): no more steps than a score has bits.

Sums are taken in a fixed order, so that a row's result does not depend on what is beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_chunks import NOWHERE, key_of, middle_of, score_of, weights_of


@triton.jit
def load_chunk(scores_ptr, chunk, vocab_size, CHUNK: tl.constexpr):
    """Loads the float32 scores of one chunk, and their columns."""
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(scores_ptr + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32), columns


@triton.jit
def load_active(scores_ptr, active_ptr, first, num_active, vocab_size, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Loads the float32 scores of the `TILE` chunks of the list from `first` on, `[TILE, CHUNK]`."""
    places = first + tl.arange(0, TILE)
    is_listed = places < num_active
    chunks = tl.load(active_ptr + places, mask=is_listed, other=0)
    columns = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    mask = is_listed[:, None] & (columns < vocab_size)
    return tl.load(scores_ptr + columns, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def weigh(
    scores_ptr, active_ptr, num_active, vocab_size, low, best, rate, SHIFT: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Returns what the active tokens from a key on weigh, float64."""
    least = score_of(low, SHIFT)
    masses = tl.zeros([TILE], tl.float64)
    for first in range(0, num_active, TILE):
        scores = load_active(scores_ptr, active_ptr, first, num_active, vocab_size, CHUNK, TILE)
        masses += tl.sum(tl.where(scores >= least, weights_of(scores, best, rate), 0.0), 1).to(tl.float64)
    return tl.sum(masses, 0)


@triton.jit
def _count(
    scores_ptr, active_ptr, num_active, vocab_size, low, SHIFT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr
):
    """Returns how many active tokens there are from a key on, float32: integers would be counted through the stack."""
    least = score_of(low, SHIFT)
    counts = tl.zeros([TILE], tl.float32)
    for first in range(0, num_active, TILE):
        scores = load_active(scores_ptr, active_ptr, first, num_active, vocab_size, CHUNK, TILE)
        counts += tl.sum(tl.where(scores >= least, 1.0, 0.0), 1)
    return tl.sum(counts, 0)


@triton.jit
def kth_score(
    scores_ptr, active_ptr, num_active, vocab_size, low, k, best, SHIFT: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Returns the largest key from which on there are at least `k` active tokens; `low` if there is none."""
    high = key_of(best, SHIFT) + 1
    while low + 1 < high:
        middle = middle_of(low, high)
        is_reached = _count(scores_ptr, active_ptr, num_active, vocab_size, middle, SHIFT, CHUNK, TILE) >= k
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low


@triton.jit
def search(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    scores_ptr, active_ptr, num_active, vocab_size, low, mass, target, best, rate, STRICT: tl.constexpr,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Finds the largest key from which on tokens weigh at least `target` (more than it if `STRICT`), from a key on.

    `mass` is what tokens from `low` on weigh. Returns the key, `low` if there is none; what tokens from it on weigh,
    and what those above it do.
    """
    high = key_of(best, SHIFT) + 1
    above = mass * 0
    while low + 1 < high:
        middle = middle_of(low, high)
        measured = weigh(scores_ptr, active_ptr, num_active, vocab_size, middle, best, rate, SHIFT, CHUNK, TILE)
        is_reached = measured > target if STRICT else measured >= target
        low = tl.where(is_reached, middle, low)
        mass = tl.where(is_reached, measured, mass)
        high = tl.where(is_reached, high, middle)
        above = tl.where(is_reached, above, measured)
    return low, mass, above


@triton.jit
def nth_equal(scores_ptr, active_ptr, num_active, vocab_size, score, number, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Returns the column of the active token with a score that has `number` of them before it, or of the last one."""
    # First the last chunk that has one with so few before it, then the token in it.
    place = number * 0
    before = number * 0
    seen = number * 0
    for first in range(0, num_active, TILE):
        scores = load_active(scores_ptr, active_ptr, first, num_active, vocab_size, CHUNK, TILE)
        counts = tl.sum(tl.where(scores == score, 1.0, 0.0), 1).to(tl.int32)
        starts = seen + tl.cumsum(counts, 0) - counts
        fits = (counts > 0) & (starts <= number)
        place = tl.maximum(place, tl.max(tl.where(fits, first + tl.arange(0, TILE), 0), 0))
        before = tl.maximum(before, tl.max(tl.where(fits, starts, 0), 0))
        seen += tl.sum(counts, 0)
    scores, columns = load_chunk(scores_ptr, tl.load(active_ptr + place), vocab_size, CHUNK)
    is_equal = scores == score
    rank = before + tl.cumsum(is_equal.to(tl.int32), 0) - 1
    return tl.max(tl.where(is_equal & (rank <= number), columns, 0), 0)


@triton.jit
def pick(weights, target, SIZE: tl.constexpr):
    """Returns the first place with weight at which the running sum passes a target, or the last one with weight."""
    places = tl.arange(0, SIZE)
    is_behind = (tl.cumsum(weights, 0) > target) & (weights > 0)
    first = tl.min(tl.where(is_behind, places, NOWHERE), 0)
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    return tl.minimum(first, last)
