"""The inner loop of the attention kernel: from a tile's place in the cache to the running softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile_rows(
    table_ptr, start, limit, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Returns where a tile's keys lie, in rows of `cache.view(-1, head_dim)` for K/V head 0, int64 `[TILE]`."""
    if TILE <= BLOCK_SIZE:
        block_id = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        rows = block_id * (NUM_KV_HEADS * BLOCK_SIZE) + (start % BLOCK_SIZE + tl.arange(0, TILE))
    else:
        # One id is loaded per block, not per key.
        entries = start // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE)
        if MASKED:
            block_ids = tl.load(table_ptr + entries, mask=entries * BLOCK_SIZE < limit, other=0)
        else:
            block_ids = tl.load(table_ptr + entries)
        slots = tl.arange(0, BLOCK_SIZE)[None, :] + block_ids.to(tl.int64)[:, None] * (NUM_KV_HEADS * BLOCK_SIZE)
        rows = tl.reshape(slots, [TILE])
    return rows


@triton.jit
def _load(pointers, present, in_head, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Loads keys or values: those of `MASKED` tiles where present, those of `PADDED` heads where in the head."""
    if MASKED and PADDED:
        data = tl.load(pointers, mask=present & in_head, other=0.0)
    elif MASKED:
        data = tl.load(pointers, mask=present, other=0.0)
    elif PADDED:
        data = tl.load(pointers, mask=in_head, other=0.0)
    else:
        data = tl.load(pointers)
    return data


@triton.jit
def _visit_keys(  # noqa: PLR0913 - a loop takes what its kernel has
    first, end, limit, query, query_positions, slopes, scale, softcap, window, key_ptr, value_ptr, key_scale_ptr,
    value_scale_ptr, table_ptr, accumulator, highest, total, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Folds the keys `first ... end - 1` into the running output, maximum and sum."""
    KEY_PAD: tl.constexpr = query.shape[1]
    VALUE_PAD: tl.constexpr = accumulator.shape[1]
    key_dims = tl.arange(0, KEY_PAD)[:, None]
    value_dims = tl.arange(0, VALUE_PAD)[None, :]
    for start in range(first, end, TILE):
        rows = _tile_rows(table_ptr, start, limit, NUM_KV_HEADS, BLOCK_SIZE, TILE, MASKED)
        positions = start + tl.arange(0, TILE)
        present = positions < limit
        keys = _load(
            key_ptr + rows[None, :] * KEY_DIM + key_dims, present[None, :], key_dims < KEY_DIM, MASKED,
            KEY_PAD != KEY_DIM,
        )  # fmt: skip
        scores = tl.dot(query, keys.to(query.dtype), input_precision="ieee")
        factor = 1.0
        if key_scale_ptr is not None:
            scores *= (_load(key_scale_ptr + rows, present, present, MASKED, False).to(tl.float32) * scale)[None, :]
        elif softcap is None and slopes is None:
            # Multiplied where the maximum is subtracted: one instruction does both.
            factor = scale
        else:
            scores *= scale
        if softcap is not None:
            # softcap * tanh(x), where `scale` has made of the scores 2 * log2(e) * x.
            scores = softcap * (1 - 2 / (1 + tl.exp2(scores)))
        distance = positions[None, :] - query_positions[:, None]
        if slopes is not None:
            scores += slopes[:, None] * distance.to(tl.float32)
        if MASKED:
            visible = distance <= 0
            if window is not None:
                visible &= distance > -window
            scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        shift = new_highest
        if MASKED:
            # A row that has seen nothing yet has a maximum of -inf, and -inf - -inf is NaN.
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * factor - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 1)
        if value_scale_ptr is not None:
            weights *= _load(value_scale_ptr + rows, present, present, MASKED, False).to(tl.float32)[None, :]
        values = _load(
            value_ptr + rows[:, None] * VALUE_DIM + value_dims, present[:, None], value_dims < VALUE_DIM, MASKED,
            VALUE_PAD != VALUE_DIM,
        ).to(query.dtype)  # fmt: skip
        accumulator = tl.dot(weights.to(query.dtype), values, accumulator * decay[:, None], input_precision="ieee")
        highest = new_highest
    return accumulator, highest, total


@triton.jit
def visit_key_range(  # noqa: PLR0913 - a loop takes what its kernel has
    first, unmasked_from, masked_from, end, limit, query, query_positions, slopes, scale, softcap, window, key_ptr,
    value_ptr, key_scale_ptr, value_scale_ptr, table_ptr, kv_head, highest, total, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Returns output, maximum and sum over keys that are masked, from `unmasked_from` on not, and then masked again."""
    accumulator = tl.zeros([query.shape[0], VALUE_PAD], tl.float32)
    key_ptr += kv_head * (BLOCK_SIZE * KEY_DIM)
    value_ptr += kv_head * (BLOCK_SIZE * VALUE_DIM)
    if key_scale_ptr is not None:
        key_scale_ptr += kv_head * BLOCK_SIZE
        value_scale_ptr += kv_head * BLOCK_SIZE
    if window is not None:
        accumulator, highest, total = _visit_keys(
            first, unmasked_from, limit, query, query_positions, slopes, scale, softcap, window, key_ptr, value_ptr,
            key_scale_ptr, value_scale_ptr, table_ptr, accumulator, highest, total, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM,
            VALUE_DIM, TILE, True,
        )  # fmt: skip
    accumulator, highest, total = _visit_keys(
        unmasked_from, masked_from, limit, query, query_positions, slopes, scale, softcap, window, key_ptr, value_ptr,
        key_scale_ptr, value_scale_ptr, table_ptr, accumulator, highest, total, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM,
        VALUE_DIM, TILE, False,
    )  # fmt: skip
    return _visit_keys(
        masked_from, end, limit, query, query_positions, slopes, scale, softcap, window, key_ptr, value_ptr,
        key_scale_ptr, value_scale_ptr, table_ptr, accumulator, highest, total, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM,
        VALUE_DIM, TILE, True,
    )  # fmt: skip
