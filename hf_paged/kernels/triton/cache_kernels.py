"""The kernels behind `cache.py`: rope and the store of K/V in one, and copies of blocks.

query   norm of heads -> rope -> new tensor
key     norm of heads -> rope -> (int8 or fp8, and a scale) -> slot of its token
value                            (int8 or fp8, and a scale) -> slot of its token
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_rotated(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    heads, mask, norm_ptr, cos_ptr, sin_ptr, sin_sign, eps, offset, DIM: tl.constexpr, PAD: tl.constexpr,
    PAIRS: tl.constexpr, BEGIN: tl.constexpr, HALF: tl.constexpr, COS_STEP: tl.constexpr, NORM_KIND: tl.constexpr,
):  # fmt: skip
    """Loads heads, normed and rotated, as `[heads, PAD]` float32; 0 outside of the mask `[heads, 1]`.

    `heads` points at the first numbers, `[heads, 1]`. `PAIRS`: 0 halves, 1 interleaved, 2 read interleaved and written
    as halves. Number d of the result is made of the number `own` of the head and its partner.
    """
    d = tl.arange(0, PAD)
    turned = d - BEGIN
    is_rotary = (turned >= 0) & (turned < 2 * HALF)
    pair, second = turned, turned
    own, partner = d, d
    if HALF > 0:
        if PAIRS == 1:
            pair, second = turned // 2, turned % 2
            partner = tl.where(is_rotary, d + 1 - 2 * second, d)
        else:
            second = (turned >= HALF).to(tl.int32)
            pair = turned - HALF * second
            partner = tl.where(is_rotary, d + HALF - 2 * HALF * second, d)
            if PAIRS == 2:
                own = tl.where(is_rotary, BEGIN + 2 * pair + second, d)
                partner = tl.where(is_rotary, BEGIN + 2 * pair + 1 - second, d)
            elif HALF % 8 == 0 and BEGIN % 8 == 0:
                partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
    inside = mask & (d < DIM)[None, :]
    x = tl.load(heads + own[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = tl.full([PAD], 1.0, tl.float32)
    partner_factor = factor
    shift = tl.zeros_like(x)
    scale = shift + 1.0
    if NORM_KIND > 0:
        if NORM_KIND == 2:
            shift = tl.broadcast_to((tl.sum(x, 1) / DIM)[:, None], x.shape)
            x = tl.where(inside, x - shift, 0.0)
        scale = tl.broadcast_to(tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None], x.shape)
        if norm_ptr is not None:
            factor = tl.load(norm_ptr + own, mask=d < DIM, other=0.0).to(tl.float32) + offset
            partner_factor = tl.load(norm_ptr + partner, mask=d < DIM, other=0.0).to(tl.float32) + offset
        x = x * scale * factor[None, :]
    if HALF > 0:
        other = tl.load(heads + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        other = (other - shift) * scale * partner_factor[None, :]
        cos = tl.load(cos_ptr + pair * COS_STEP, mask=is_rotary, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + pair * COS_STEP, mask=is_rotary, other=0.0).to(tl.float32) * sin_sign
        sin = tl.where(second == 1, sin, -sin)
        x = tl.where(is_rotary[None, :] & inside, x * cos[None, :] + other * sin[None, :], x)
    return x


@triton.jit
def _store(x, target, rows, mask, scale_ptr, DIM: tl.constexpr, PAD: tl.constexpr):
    """Stores heads `[heads, PAD]` as rows of DIM numbers, quantized if there are scales."""
    d = tl.arange(0, PAD)
    if scale_ptr is not None:
        IS_INT8: tl.constexpr = target.dtype.element_ty == tl.int8
        LARGEST: tl.constexpr = 127.0 if IS_INT8 else 448.0
        is_nan = tl.max((x != x).to(tl.int32), 1) > 0
        scale = (tl.max(tl.abs(x), 1) / LARGEST).to(tl.float16)
        scale = tl.where(is_nan, float("nan"), scale.to(tl.float32))
        inverse = tl.where(scale > 0, 1.0 / scale, 0.0)  # a head of zeros, or of NaN
        x = x * inverse[:, None]
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), 0.0)
        if IS_INT8:
            x = tl.floor(x + 0.5)
        tl.store(scale_ptr + rows, scale.to(tl.float16), mask=mask)
    places = target + rows[:, None] * DIM + d[None, :]
    tl.store(places, x.to(target.dtype.element_ty), mask=mask[:, None] & (d < DIM)[None, :])


@triton.jit
def rope_store_kernel(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    output_ptr, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr, query_ptr, key_ptr, value_ptr,
    query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, slot_mapping_ptr, query_stride, query_head_stride, key_stride,
    key_head_stride, value_stride, value_head_stride, cos_stride, sin_sign, eps, offset, NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, BEGIN: tl.constexpr,
    HALF: tl.constexpr, COS_STEP: tl.constexpr, NORM_KIND: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, tiles of `HEADS` query heads, then of key heads, then of value heads)."""
    QUERY_TILES: tl.constexpr = (NUM_QUERY_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    heads = tl.arange(0, HEADS)
    if cos_ptr is not None:
        cos_ptr += token * cos_stride
        sin_ptr += token * cos_stride
    if tile < QUERY_TILES:
        heads += tile * HEADS
        mask = heads < NUM_QUERY_HEADS
        starts = query_ptr + token * query_stride + heads[:, None] * query_head_stride
        x = _load_rotated(
            starts, mask[:, None], query_norm_ptr, cos_ptr, sin_ptr, sin_sign, eps, offset, KEY_DIM, KEY_PAD, PAIRS,
            BEGIN, HALF, COS_STEP, NORM_KIND,
        )  # fmt: skip
        _store(x, output_ptr, token * NUM_QUERY_HEADS + heads, mask, None, KEY_DIM, KEY_PAD)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:  # padding goes nowhere
            heads += (tile - QUERY_TILES) % KV_TILES * HEADS
            mask = heads < NUM_KV_HEADS
            rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
            if tile < QUERY_TILES + KV_TILES:
                starts = key_ptr + token * key_stride + heads[:, None] * key_head_stride
                x = _load_rotated(
                    starts, mask[:, None], key_norm_ptr, cos_ptr, sin_ptr, sin_sign, eps, offset, KEY_DIM, KEY_PAD,
                    PAIRS, BEGIN, HALF, COS_STEP, NORM_KIND,
                )  # fmt: skip
                _store(x, key_cache_ptr, rows, mask, key_scale_ptr, KEY_DIM, KEY_PAD)
            else:
                starts = value_ptr + token * value_stride + heads[:, None] * value_head_stride
                x = _load_rotated(
                    starts, mask[:, None], None, None, None, sin_sign, eps, offset, VALUE_DIM, VALUE_PAD, 0, 0, 0, 1, 0
                )
                _store(x, value_cache_ptr, rows, mask, value_scale_ptr, VALUE_DIM, VALUE_PAD)


@triton.jit(do_not_specialize=["num_copies"])
def copy_blocks_kernel(addresses_ptr, words_ptr, pairs_ptr, num_copies, BLOCK: tl.constexpr):
    """Grid: (copies, tensors). A tensor has its address and how many words of 8 bytes a block of it has, an even
    number; `pairs_ptr` has all sources, then all destinations."""
    copy, tensor = tl.program_id(0), tl.program_id(1)
    base = tl.load(addresses_ptr + tensor).to(tl.pointer_type(tl.int64))
    num_words = tl.multiple_of(tl.load(words_ptr + tensor), 2)
    source = tl.multiple_of(base + tl.load(pairs_ptr + copy) * num_words, 16)
    destination = tl.multiple_of(base + tl.load(pairs_ptr + num_copies + copy) * num_words, 16)
    for start in range(0, num_words, BLOCK):
        words = start + tl.arange(0, BLOCK)
        mask = words < num_words
        tl.store(destination + words, tl.load(source + words, mask=mask), mask=mask)
