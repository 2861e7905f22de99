"""A block-table attention kernel for decoding, prefill and prefixes that several requests share.

One program computes `BLOCK_M` rows for one K/V head of one request. A row is a pair (query token, query head of the
K/V head's group), so that keys loaded once serve the whole group, and decoding fills the tensor cores' 16 rows:

    rows of K/V head h:  | token 0: head h*G ... h*G + G - 1 | token 1: ... | ...      (G = heads per group)

Keys are visited `TILE` at a time with the running maximum and sum of the online softmax (Milakov and Gimelshein,
arXiv 1805.02867; Dao et al., arXiv 2205.14135), in units of log2, because `exp2` is the hardware's. Only tiles at the
edges of what a row may see are masked:

    keys      | masked: window begins | seen by all rows, unmasked ......... | masked: causal edge |
    splits    | split 0 ................. | split 1 ................ | split 2 ...................... |

With several splits each writes a normalized part and its log-sum-exp, which `reduce.py` merges. Lengths are read on
the device, so that a captured launch serves other lengths; a split without keys leaves at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import configs
from .tiles import visit_key_range

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MIN_KEYS_PER_SPLIT = tl.constexpr(configs.MIN_KEYS_PER_SPLIT)


@triton.jit
def _key_range(
    request, first_position, limit, split, num_splits, starts_ptr, window, TILE: tl.constexpr
):  # fmt: skip
    """Returns a split's keys as four borders: masked from the first, unmasked from the second, masked from the third.

    Some row sees the keys before `limit`; no row lies before the keys up to `first_position`.
    """
    first = 0
    if starts_ptr is not None:
        first = tl.load(starts_ptr + request)
    if window is not None:
        first = tl.maximum(first_position - window + 1, 0) // TILE * TILE
    share = tl.maximum(tl.cdiv(limit - first, num_splits), MIN_KEYS_PER_SPLIT)
    share = tl.cdiv(share, TILE) * TILE
    first += split * share
    end = tl.minimum(first + share, limit)
    masked_from = first + tl.maximum(tl.minimum(end, first_position + 1) - first, 0) // TILE * TILE
    unmasked_from = first
    if window is not None:
        unmasked_from += tl.cdiv(tl.maximum(limit - window - first, 0), TILE) * TILE
        unmasked_from = tl.minimum(unmasked_from, masked_from)
    return first, unmasked_from, masked_from, end


@triton.jit
def _softmax_of_nothing(sinks_ptr, heads, row_mask, split, BLOCK_M: tl.constexpr):
    """Returns maximum and sum of rows that have seen no key; a sink counts in the first split."""
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
        highest = tl.where(split == 0, sinks, highest)
        total += tl.where(split == 0, 1.0, 0.0)
    return highest, total


# What differs from step to step, or lies anywhere in a buffer, must not lead to compiling once more for a 1, a multiple
# of 16 or an aligned pointer.
@triton.jit(
    do_not_specialize=["window", "first_request", "max_blocks", "num_splits", "rows_per_part"],
    do_not_specialize_on_alignment=[
        "lse_ptr", "block_tables_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr", "starts_ptr", "sinks_ptr", "slopes_ptr",
    ],
)  # fmt: skip
def paged_attention_kernel(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    output_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, block_tables_ptr,
    cu_seqlens_q_ptr, seq_lens_ptr, starts_ptr, sinks_ptr, slopes_ptr, scale, softcap, window, first_request,
    max_blocks, num_splits, rows_per_part, query_stride_token, query_stride_head, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Grid: (requests, K/V heads, tiles of `BLOCK_M // GROUP` query tokens x splits).

    Pointers, softcap and window are `None` where a call has none. `scale` and `softcap` come in units of log2. Keys
    before a request's start are another launch's. `SHARED`: a request is a run of requests and all its tokens come
    after the keys.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    request = first_request + tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2) % num_splits
    # The last tiles see the most keys: they go first.
    first_query = (tl.num_programs(2) // num_splits - 1 - tl.program_id(2) // num_splits) * BLOCK_Q
    first_token = tl.load(cu_seqlens_q_ptr + request)
    query_len = tl.load(cu_seqlens_q_ptr + request + 1) - first_token
    if first_query >= query_len:
        return
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = (queries < query_len) & (rows < BLOCK_Q * GROUP)
    tokens = (first_token + queries).to(tl.int64)
    output_rows = split.to(tl.int64) * rows_per_part + tokens * (NUM_KV_HEADS * GROUP) + heads

    limit = tl.load(seq_lens_ptr + request)
    first_position = limit - 1
    query_positions = tl.full([BLOCK_M], 0, tl.int32) + first_position
    if not SHARED:
        query_positions = limit - query_len + queries
        first_position = limit - query_len + first_query
        limit = tl.minimum(first_position + BLOCK_Q, limit)
    first, unmasked_from, masked_from, end = _key_range(
        request, first_position, limit, split, num_splits, starts_ptr, window, TILE
    )
    if lse_ptr is not None:  # noqa: SIM102 - of a constant, and of a number on the device
        if (first >= end) & (num_splits > 1):
            tl.store(lse_ptr + output_rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_mask)
            return

    key_dims = tl.arange(0, KEY_PAD)[None, :]
    query_ptrs = query_ptr + tokens[:, None] * query_stride_token + heads[:, None] * query_stride_head + key_dims
    query = tl.load(query_ptrs, mask=row_mask[:, None] & (key_dims < KEY_DIM), other=0.0)
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + heads, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
    highest, total = _softmax_of_nothing(sinks_ptr, heads, row_mask, split, BLOCK_M)
    accumulator, highest, total = visit_key_range(
        first, unmasked_from, masked_from, end, limit, query, query_positions, slopes, scale, softcap, window,
        key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, block_tables_ptr + request.to(tl.int64) * max_blocks,
        kv_head, highest, total, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, VALUE_PAD, TILE,
    )  # fmt: skip

    value_dims = tl.arange(0, VALUE_PAD)[None, :]
    output = accumulator / tl.where(total > 0, total, 1.0)[:, None]
    output_mask = row_mask[:, None] & (value_dims < VALUE_DIM)
    tl.store(
        output_ptr + output_rows[:, None] * VALUE_DIM + value_dims, output.to(output_ptr.dtype.element_ty), output_mask
    )
    if lse_ptr is not None:
        tl.store(lse_ptr + output_rows, (highest + tl.log2(total)) * LN2, mask=row_mask)
