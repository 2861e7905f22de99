"""A block-table attention kernel for decoding and prefill.

One program computes `BLOCK_M` rows for one K/V head of one request. A row is a pair (query token, query head of the
K/V head's group), so that keys loaded once serve the whole group, and decoding fills the tensor cores' 16 rows:

    rows of K/V head h:  | token 0: head h*G ... h*G + G - 1 | token 1: ... | ...      (G = heads per group)

Keys are visited `TILE` at a time with the running maximum and sum of the online softmax (Milakov and Gimelshein,
arXiv 1805.02867; Dao et al., arXiv 2205.14135). Scores are kept in units of log2, because `exp2` is the hardware's.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows_of_keys(
    table_ptr, positions, start, limit, kv_head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Returns where the keys of a tile lie: row numbers of `cache.view(-1, head_dim)`, int64."""
    if TILE > BLOCK_SIZE:
        # One id is loaded per block, not per key.
        entries = start // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE)
        block_ids = tl.load(table_ptr + entries, mask=entries * BLOCK_SIZE < limit, other=0)
        block_ids = tl.broadcast_to(block_ids[:, None], [TILE // BLOCK_SIZE, BLOCK_SIZE])
        block_ids = tl.reshape(block_ids, [TILE]).to(tl.int64)
    else:
        block_ids = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
    return (block_ids * KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def _visit_tile(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    start,
    limit,
    query,
    query_positions,
    slopes,
    scale,
    softcap,
    window,
    key_ptr,
    value_ptr,
    block_table_ptr,
    kv_head,
    accumulator,
    highest,
    total,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Folds the keys `start ... start + TILE - 1` into the running output, maximum and sum."""
    positions = start + tl.arange(0, TILE)
    rows = _rows_of_keys(block_table_ptr, positions, start, limit, kv_head, NUM_KV_HEADS, BLOCK_SIZE, TILE)
    key_dims = tl.arange(0, KEY_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    key_mask = (key_dims[:, None] < KEY_DIM) & (positions[None, :] < limit)
    value_mask = (value_dims[None, :] < VALUE_DIM) & (positions[:, None] < limit)
    if not MASKED:
        key_mask = key_dims[:, None] < KEY_DIM
        value_mask = value_dims[None, :] < VALUE_DIM
    keys = tl.load(key_ptr + rows[None, :] * KEY_DIM + key_dims[:, None], mask=key_mask, other=0.0)
    values = tl.load(value_ptr + rows[:, None] * VALUE_DIM + value_dims[None, :], mask=value_mask, other=0.0)

    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    distance = positions[None, :] - query_positions[:, None]
    if HAS_ALIBI:
        scores += slopes[:, None] * distance.to(tl.float32)
    scores *= LOG2E
    if MASKED:
        visible = distance <= 0
        if HAS_WINDOW:
            visible &= distance > -window
        scores = tl.where(visible, scores, float("-inf"))

    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A row that has seen nothing yet has a maximum of -inf, and -inf - -inf is NaN.
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(highest - shift)
    total = total * decay + tl.sum(weights, 1)
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator, input_precision="ieee")
    return accumulator, new_highest, total


# Numbers that differ from step to step must not lead to compiling once more for a 1 or a multiple of 16.
@triton.jit(do_not_specialize=["first_request", "max_blocks", "window"])
def paged_attention_kernel(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    output_ptr,
    lse_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    sinks_ptr,
    slopes_ptr,
    scale,
    softcap,
    window,
    first_request,
    max_blocks,
    query_stride_token,
    query_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    RETURN_LSE: tl.constexpr,
):
    """Grid: (requests, K/V heads, tiles of `BLOCK_M // GROUP` query tokens); programs past a request's end leave."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    request = first_request + tl.program_id(0)
    kv_head = tl.program_id(1)
    first_query = tl.program_id(2) * BLOCK_Q
    first_token = tl.load(cu_seqlens_q_ptr + request)
    query_len = tl.load(cu_seqlens_q_ptr + request + 1) - first_token
    if first_query >= query_len:
        return
    num_computed = tl.load(seq_lens_ptr + request) - query_len

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = (queries < query_len) & (rows < BLOCK_Q * GROUP)
    tokens = (first_token + queries).to(tl.int64)
    query_positions = num_computed + queries
    key_dims = tl.arange(0, KEY_PAD)
    query = tl.load(
        query_ptr + tokens[:, None] * query_stride_token + heads[:, None] * query_stride_head + key_dims[None, :],
        mask=row_mask[:, None] & (key_dims[None, :] < KEY_DIM),
        other=0.0,
    )
    accumulator = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=row_mask, other=0.0).to(tl.float32)

    # Keys start ... limit - 1 are seen by some row; those before `unmasked_end` by every row.
    limit = num_computed + tl.minimum(first_query + BLOCK_Q, query_len)
    start = 0
    unmasked_end = (num_computed + first_query + 1) // TILE * TILE
    if HAS_WINDOW:
        start = tl.maximum(num_computed + first_query - window + 1, 0) // TILE * TILE
        unmasked_end = start
    block_table_ptr = block_tables_ptr + request.to(tl.int64) * max_blocks
    for tile in range(start, unmasked_end, TILE):
        accumulator, highest, total = _visit_tile(
            tile, limit, query, query_positions, slopes, scale, softcap, window, key_ptr, value_ptr, block_table_ptr,
            kv_head, accumulator, highest, total, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD,
            TILE, False, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI,
        )  # fmt: skip
    for tile in range(unmasked_end, limit, TILE):
        accumulator, highest, total = _visit_tile(
            tile, limit, query, query_positions, slopes, scale, softcap, window, key_ptr, value_ptr, block_table_ptr,
            kv_head, accumulator, highest, total, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD,
            TILE, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI,
        )  # fmt: skip

    value_dims = tl.arange(0, VALUE_PAD)
    output_rows = tokens * NUM_HEADS + heads
    output = (accumulator / total[:, None]).to(output_ptr.dtype.element_ty)
    output_mask = row_mask[:, None] & (value_dims[None, :] < VALUE_DIM)
    tl.store(output_ptr + output_rows[:, None] * VALUE_DIM + value_dims[None, :], output, mask=output_mask)
    if RETURN_LSE:
        tl.store(lse_ptr + output_rows, (highest + tl.log2(total)) / LOG2E, mask=row_mask)
