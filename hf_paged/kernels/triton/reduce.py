"""Merges attention over parts of a context: the splits of a launch, and prefixes that several requests share.

parts     [part, token, head, Dv]  float32, each normalized by its own softmax
part_lse  [part, token, head]      float32, log of the sum of its exponentials; -inf where a part saw nothing

output = sum over parts of part * exp(part_lse - lse),   lse = log of the sum of exp(part_lse)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .configs import merge_chunk, padded

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=["num_parts", "rows_per_part"], do_not_specialize_on_alignment=["lse_ptr", "part_lse_ptr"]
)
def merge_parts_kernel(
    output_ptr,
    lse_ptr,
    parts_ptr,
    part_lse_ptr,
    num_parts,
    rows_per_part,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (tokens x heads). Reads only parts that saw something: the others were never written."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, VALUE_PAD)[None, :]
    merged = tl.zeros([1, VALUE_PAD], tl.float32)
    highest = tl.full([1, 1], float("-inf"), tl.float32)
    total = tl.zeros([1, 1], tl.float32)
    for first in range(0, num_parts, CHUNK):
        indices = first + tl.arange(0, CHUNK)[:, None]
        rows = indices.to(tl.int64) * rows_per_part + row
        lse = tl.load(part_lse_ptr + rows, mask=indices < num_parts, other=float("-inf")) * LOG2E
        parts = tl.load(parts_ptr + rows * VALUE_DIM + dims, mask=(lse > float("-inf")) & (dims < VALUE_DIM), other=0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0)[None, :])
        # Where no part saw anything so far, -inf - -inf would be NaN.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(lse - shift)
        decay = tl.exp2(highest - shift)
        merged = merged * decay + tl.sum(parts * weights, 0)[None, :]
        total = total * decay + tl.sum(weights, 0)[None, :]
        highest = new_highest
    output = merged / tl.where(total > 0, total, 1.0)
    tl.store(output_ptr + row * VALUE_DIM + dims, output.to(output_ptr.dtype.element_ty), mask=dims < VALUE_DIM)
    if lse_ptr is not None:
        tl.store(lse_ptr + row + tl.arange(0, 1)[None, :], (highest + tl.log2(total)) * LN2)


def merge_parts(
    output: torch.Tensor, lse: torch.Tensor | None, parts: torch.Tensor, part_lse: torch.Tensor, first_token: int = 0
) -> None:
    """Merges the parts of some tokens, on the device that is current.

    Args:
        output (`torch.Tensor`):
            `[num_tokens, num_heads, Dv]`, contiguous; written from `first_token` on.
        lse (`torch.Tensor`, *optional*):
            float32 `[num_tokens, num_heads]`, contiguous; written likewise.
        parts (`torch.Tensor`):
            float32 `[num_parts, num_tokens, num_heads, Dv]`, contiguous.
        part_lse (`torch.Tensor`):
            float32 `[num_parts, num_tokens, num_heads]`, contiguous.
        first_token (`int`, defaults to 0):
            The first token to merge.
    """
    num_parts, num_tokens, num_heads, value_dim = parts.shape
    merge_parts_kernel[((num_tokens - first_token) * num_heads,)](
        output[first_token:],
        None if lse is None else lse[first_token:],
        parts[0, first_token:],
        part_lse[0, first_token:],
        num_parts,
        num_tokens * num_heads,
        VALUE_DIM=value_dim,
        VALUE_PAD=padded(value_dim),
        CHUNK=merge_chunk(value_dim),
        num_warps=1,
        num_stages=1,
    )
