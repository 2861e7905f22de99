"""The kernels behind `sampling.py`: chunks of all rows at once, then one program per row."""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_chunks import (
    NOWHERE,
    best_score,
    first_chunk_with,
    key_of,
    kth_largest,
    list_active,
    pick_chunk,
    score_of,
    weights_of,
    whole_mass,
)
from .sampling_search import kth_score, load_chunk, nth_equal, pick, search, weigh

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST_KEY = tl.constexpr(-2139095040)  # of the lowest finite number
NEXT_SHARE = tl.constexpr(1 / 64)


@triton.jit
def chunk_kernel(
    maxima_ptr, sums_ptr, scores_ptr, settings_ptr, row_stride, vocab_size, num_chunks, NUM_SETTINGS: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, tiles of `TILE` chunks). Writes each chunk's maximum, NaN if it holds one, and what it weighs beside
    its own best token."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    scores = tl.load(scores_ptr + row * row_stride + columns, mask=columns < vocab_size, other=float("-inf"))
    scores = scores.to(tl.float32)
    has_nan = tl.max((scores != scores).to(tl.int32), 1) > 0
    maxima = tl.where(has_nan, float("nan"), tl.max(scores, 1))
    tl.store(maxima_ptr + row * num_chunks + chunks, maxima, mask=chunks < num_chunks)
    if sums_ptr is not None:
        rate = LOG2E / tl.load(settings_ptr + row * NUM_SETTINGS + 1).to(tl.float32)
        best = tl.where(maxima > float("-inf"), maxima, 0.0)
        sums = tl.sum(weights_of(scores, best[:, None], rate), 1)
        tl.store(sums_ptr + row * num_chunks + chunks, sums, mask=chunks < num_chunks)


@triton.jit
def _uniform(keys_ptr):
    """A number strictly between 0 and 1 with 52 random bits and a half, of (seed, branch, position); Philox4x32-10."""
    seed = tl.load(keys_ptr)
    branch = tl.load(keys_ptr + 1).to(tl.uint32)
    position = tl.load(keys_ptr + 2).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, position, branch, position * 0, position * 0)
    high = (first >> 6).to(tl.float64) * 67108864.0
    return (high + (second >> 6).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _ratio(a, b):
    """Of float64 numbers, in float32: a division in float64 is a call, which spills; 0 if b is."""
    divisor = b.to(tl.float32)
    return (a.to(tl.float32) / tl.where(divisor > 0, divisor, float("inf"))).to(tl.float64)


@triton.jit
def _draw_any(
    scores_ptr, maxima_ptr, sums_ptr, best, rate, uniform, vocab_size, num_chunks, CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
):  # fmt: skip
    """Draws from all tokens: first the chunk, then the token in it."""
    target = uniform * whole_mass(maxima_ptr, sums_ptr, num_chunks, best, rate, STRIP)
    chunk, before, mass = pick_chunk(maxima_ptr, sums_ptr, num_chunks, target, best, rate, STRIP)
    scores, _ = load_chunk(scores_ptr, chunk, vocab_size, CHUNK)
    weights = weights_of(scores, best, rate).to(tl.float64)
    # The chunk's weight was summed beside its own best token before; the share of the way through it is kept.
    return chunk * CHUNK + pick(weights, (target - before) * _ratio(tl.sum(weights, 0), mass), CHUNK)


@triton.jit
def _key_of_weight(weight, best, settings_ptr, slack, SHIFT: tl.constexpr):
    """The key of the least score that weighs so much; `slack` lowers it so that rounding cannot matter."""
    temperature = tl.load(settings_ptr + 1).to(tl.float32)
    score = best + temperature * tl.log(weight.to(tl.float32)) - slack * (1.0 + tl.abs(best))
    key = key_of(score, SHIFT)
    key += (score_of(key, SHIFT) < score).to(tl.int32)  # keys of 16-bit scores are rounded down
    return tl.minimum(tl.maximum(key, LOWEST_KEY >> SHIFT), key_of(best, SHIFT))


@triton.jit
def _draw_truncated(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    scores_ptr, active_ptr, maxima_ptr, sums_ptr, settings_ptr, keys_ptr, best, rate, vocab_size, num_chunks,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr, STRIP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Draws from the tokens that top-k, then top-p, then min-p leave."""
    top_k = tl.load(settings_ptr + 2).to(tl.float32)
    top_p = tl.load(settings_ptr + 3).to(tl.float64)
    min_p = tl.load(settings_ptr + 4).to(tl.float64)
    lowest = key_of(best, 0) * 0 + LOWEST_KEY
    low = lowest >> SHIFT
    if top_k > 0:
        bound = kth_largest(maxima_ptr, num_chunks, top_k, lowest, key_of(best, 0), STRIP)
        low = tl.maximum(bound >> SHIFT, low)
        num_active = list_active(active_ptr, maxima_ptr, num_chunks, score_of(low, SHIFT), STRIP)
        low = kth_score(scores_ptr, active_ptr, num_active, vocab_size, low, top_k, best, SHIFT, CHUNK, TILE)
        num_active = list_active(active_ptr, maxima_ptr, num_chunks, score_of(low, SHIFT), STRIP)  # mostly fewer
        mass = weigh(scores_ptr, active_ptr, num_active, vocab_size, low, best, rate, SHIFT, CHUNK, TILE)
        limit = top_p * mass
    else:
        # Mostly few tokens hold the share p; tokens that weigh less are looked at only if they are needed.
        limit = whole_mass(maxima_ptr, sums_ptr, num_chunks, best, rate, STRIP)
        share = (1.0 - top_p) * limit * NEXT_SHARE
        limit *= top_p
        least_share = share * (0.25 / vocab_size).to(tl.float64)
        mass = limit
        num_active = 0
        is_short = True
        while is_short:
            share = tl.where(share < least_share, 0.0, share)
            low = _key_of_weight(tl.maximum(share, min_p), best, settings_ptr, 1e-5, SHIFT)
            num_active = list_active(active_ptr, maxima_ptr, num_chunks, score_of(low, SHIFT), STRIP)
            mass = weigh(scores_ptr, active_ptr, num_active, vocab_size, low, best, rate, SHIFT, CHUNK, TILE)
            is_short = (share > min_p) & (mass < limit * 1.000001)
            share *= NEXT_SHARE
    if top_p < 1:
        low, mass, above = search(
            scores_ptr, active_ptr, num_active, vocab_size, low, mass, limit, best, rate, False, SHIFT, CHUNK, TILE
        )
        # Of equal tokens at the border the first ones remain.
        weight = weights_of(score_of(low, SHIFT), best, rate).to(tl.float64)
        number = tl.maximum(tl.ceil(_ratio(limit - above, weight)), 0.0)
        mass = tl.minimum(mass, above + number * weight)
    if min_p > 0:
        bound = _key_of_weight(min_p, best, settings_ptr, 0.0, SHIFT)
        if bound > low:
            low = bound
            mass = weigh(scores_ptr, active_ptr, num_active, vocab_size, low, best, rate, SHIFT, CHUNK, TILE)
    target = _uniform(keys_ptr) * mass
    low, _, above = search(
        scores_ptr, active_ptr, num_active, vocab_size, low, mass, target, best, rate, True, SHIFT, CHUNK, TILE
    )
    score = score_of(low, SHIFT)
    number = tl.maximum(_ratio(target - above, weights_of(score, best, rate).to(tl.float64)), 0.0).to(tl.int32)
    return nth_equal(scores_ptr, active_ptr, num_active, vocab_size, score, number, CHUNK, TILE)


@triton.jit
def draw_kernel(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    tokens_ptr, best_ptr, active_ptr, maxima_ptr, sums_ptr, scores_ptr, settings_ptr, keys_ptr, row_stride, vocab_size,
    num_chunks, NUM_SETTINGS: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr, STRIP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (rows). Without settings the best token is taken."""
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * row_stride
    maxima_ptr += row * num_chunks
    best, has_nan = best_score(maxima_ptr, num_chunks, STRIP)
    tl.store(best_ptr + row, tl.where(has_nan, float("nan"), best))
    kind = 0
    if settings_ptr is not None:
        settings_ptr += row * NUM_SETTINGS
        kind = tl.load(settings_ptr).to(tl.int32)
    token = 0
    if has_nan | (best == float("-inf")):
        token = 0
    elif kind == 0:
        scores, columns = load_chunk(
            scores_ptr, first_chunk_with(maxima_ptr, num_chunks, best, STRIP), vocab_size, CHUNK
        )
        token = tl.min(tl.where(scores == best, columns, NOWHERE), 0)
    elif best < float("inf"):  # noqa: SIM102 - one is known when compiling
        if settings_ptr is not None:
            rate = LOG2E / tl.load(settings_ptr + 1).to(tl.float32)
            sums_ptr += row * num_chunks
            keys_ptr += row * 3
            if kind == 1:
                token = _draw_any(
                    scores_ptr, maxima_ptr, sums_ptr, best, rate, _uniform(keys_ptr), vocab_size, num_chunks, CHUNK,
                    STRIP,
                )  # fmt: skip
            else:
                token = _draw_truncated(
                    scores_ptr, active_ptr + row * num_chunks, maxima_ptr, sums_ptr, settings_ptr, keys_ptr, best, rate,
                    vocab_size, num_chunks, SHIFT, CHUNK, STRIP, TILE,
                )  # fmt: skip
    tl.store(tokens_ptr + row, token)
