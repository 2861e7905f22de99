"""What a row's chunks say of it, without its scores: each chunk's maximum, and what it weighs beside that.

A row has `num_chunks` of them, however many: they are looked at `STRIP` at a time, so that one compiled kernel serves
every vocabulary and holds only a few of them in registers. Sums are taken in a fixed order.

    weight of a token = 2 ** ((score - best) * rate),   rate = log2(e) / temperature
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(1 << 30)  # larger than any chunk and column


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
def middle_of(low, high):
    """Returns the integer halfway between two, rounded down, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _maxima(maxima_ptr, chunks, num_chunks):
    return tl.load(maxima_ptr + chunks, mask=chunks < num_chunks, other=float("-inf"))


@triton.jit
def _masses(maxima_ptr, sums_ptr, chunks, num_chunks, best, rate):
    """Returns what chunks weigh, float64."""
    sums = tl.load(sums_ptr + chunks, mask=chunks < num_chunks, other=0.0)
    return (sums * weights_of(_maxima(maxima_ptr, chunks, num_chunks), best, rate)).to(tl.float64)


@triton.jit
def best_score(maxima_ptr, num_chunks, STRIP: tl.constexpr):
    """Returns a row's largest score, NaNs aside, and whether it holds a NaN."""
    best = tl.full([STRIP], float("-inf"), tl.float32)
    has_nan = tl.zeros([STRIP], tl.int32)
    for first in range(0, num_chunks, STRIP):
        maxima = _maxima(maxima_ptr, first + tl.arange(0, STRIP), num_chunks)
        best = tl.maximum(best, tl.where(maxima == maxima, maxima, float("-inf")))
        has_nan |= (maxima != maxima).to(tl.int32)
    return tl.max(best, 0), tl.max(has_nan, 0) > 0


@triton.jit
def first_chunk_with(maxima_ptr, num_chunks, best, STRIP: tl.constexpr):
    """Returns the first chunk that holds the best score."""
    found = tl.full([STRIP], NOWHERE, tl.int32)
    for first in range(0, num_chunks, STRIP):
        chunks = first + tl.arange(0, STRIP)
        found = tl.minimum(found, tl.where(_maxima(maxima_ptr, chunks, num_chunks) == best, chunks, NOWHERE))
    return tl.min(found, 0)


@triton.jit
def whole_mass(maxima_ptr, sums_ptr, num_chunks, best, rate, STRIP: tl.constexpr):
    """Returns what all tokens weigh, float64."""
    masses = tl.zeros([STRIP], tl.float64)
    for first in range(0, num_chunks, STRIP):
        masses += _masses(maxima_ptr, sums_ptr, first + tl.arange(0, STRIP), num_chunks, best, rate)
    return tl.sum(masses, 0)


@triton.jit
def pick_chunk(maxima_ptr, sums_ptr, num_chunks, target, best, rate, STRIP: tl.constexpr):
    """Returns the first chunk with weight at which the running sum passes a target, or the last one with weight; what
    the chunks before it weigh, and what it does."""
    passing = NOWHERE + tl.program_id(0) * 0
    last = tl.program_id(0) * 0
    seen = target * 0
    for first in range(0, num_chunks, STRIP):
        chunks = first + tl.arange(0, STRIP)
        masses = _masses(maxima_ptr, sums_ptr, chunks, num_chunks, best, rate)
        is_behind = (seen + tl.cumsum(masses, 0) > target) & (masses > 0)
        passing = tl.minimum(passing, tl.min(tl.where(is_behind, chunks, NOWHERE), 0))
        last = tl.maximum(last, tl.max(tl.where(masses > 0, chunks, 0), 0))
        seen += tl.sum(masses, 0)
    chunk = tl.minimum(passing, last)
    before = tl.zeros([STRIP], tl.float64)
    own = tl.zeros([STRIP], tl.float64)
    for first in range(0, num_chunks, STRIP):
        chunks = first + tl.arange(0, STRIP)
        masses = _masses(maxima_ptr, sums_ptr, chunks, num_chunks, best, rate)
        before += tl.where(chunks < chunk, masses, 0.0)
        own += tl.where(chunks == chunk, masses, 0.0)
    return chunk, tl.sum(before, 0), tl.sum(own, 0)


@triton.jit
def kth_largest(maxima_ptr, num_chunks, k, low, high, STRIP: tl.constexpr):
    """Returns the key of the k-th largest maximum, or `low` if there are fewer above it; exact to 2**-8 of it.

    It is a bound only: the lower 16 bits of keys are not looked at.
    """
    low = low >> 16
    high = (high >> 16) + 1
    while low + 1 < high:
        middle = middle_of(low, high)
        least = score_of(middle << 16, 0)
        counts = tl.zeros([STRIP], tl.float32)
        for first in range(0, num_chunks, STRIP):
            maxima = _maxima(maxima_ptr, first + tl.arange(0, STRIP), num_chunks)
            counts += tl.where(maxima >= least, 1.0, 0.0)
        is_reached = tl.sum(counts, 0) >= k
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low << 16


@triton.jit
def list_active(active_ptr, maxima_ptr, num_chunks, least, STRIP: tl.constexpr):
    """Writes down the chunks whose maximum is at least some score, in order; returns how many."""
    num_active = tl.program_id(0) * 0
    tl.debug_barrier()  # all have read the list before it is written anew, and it is written before it is read
    for first in range(0, num_chunks, STRIP):
        chunks = first + tl.arange(0, STRIP)
        is_active = _maxima(maxima_ptr, chunks, num_chunks) >= least
        places = num_active + tl.cumsum(is_active.to(tl.int32), 0) - 1
        tl.store(active_ptr + places, chunks, mask=is_active)
        num_active += tl.sum(is_active.to(tl.int32), 0)
    tl.debug_barrier()
    return num_active
