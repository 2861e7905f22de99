"""RMS norm and layer norm in Triton, fused with the residual sum before them and a norm of what is summed.

    branch (+ other) -> norm `before` -> * multiplier -> + residual = total -> norm `after`

One program holds whole rows in registers, so that every number is read once and written once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from .launching import DTYPES, check, check_dtype, on_device, padded, rows_of

# What this file can: dtypes, and rows up to a size.
CAPABLE_DTYPES = DTYPES
MAX_SIZE = 32768


@triton.jit
def normed(x, mask, weight_ptr, bias_ptr, columns, eps, offset, SIZE: tl.constexpr, KIND: tl.constexpr):
    """Norms rows `[rows, columns]` of float32 numbers that are 0 outside of the mask. `KIND`: 1 RMS, 2 layer norm."""
    if KIND == 2:
        x = tl.where(mask, x - (tl.sum(x, 1) / SIZE)[:, None], 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    if weight_ptr is not None:
        y *= (tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32) + offset)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    y_ptr, total_ptr, x_ptr, other_ptr, residual_ptr, before_weight_ptr, before_bias_ptr, weight_ptr, bias_ptr, eps,
    offset, before_eps, before_offset, multiplier, num_rows, inner, outer_stride, inner_stride, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, BEFORE_KIND: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of `ROWS` rows). Row r of x is at `r // inner * outer_stride + r % inner * inner_stride`; all other
    rows lie one after the other. A kind of 0 is no norm."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    places = rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
    starts = (rows // inner).to(tl.int64) * outer_stride + (rows % inner).to(tl.int64) * inner_stride
    x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if other_ptr is not None:
        x += tl.load(other_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if BEFORE_KIND:
        x = normed(x, mask, before_weight_ptr, before_bias_ptr, columns, before_eps, before_offset, SIZE, BEFORE_KIND)
        x = tl.where(mask, x.to(x_ptr.dtype.element_ty).to(tl.float32), 0.0)
    if residual_ptr is not None:
        # What is normed is what the next layers see, rounded.
        total = (tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32) + x * multiplier).to(
            total_ptr.dtype.element_ty
        )
        tl.store(total_ptr + places, total, mask=mask)
        x = total.to(tl.float32)
    if KIND:
        y = normed(x, mask, weight_ptr, bias_ptr, columns, eps, offset, SIZE, KIND)
        tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=mask)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm.

    Args:
        kind (`int`):
            1 RMS norm, 2 layer norm.
        weight (`torch.Tensor`, *optional*):
            `[size]`, contiguous, float32, bfloat16 or float16; none is like ones.
        bias (`torch.Tensor`, *optional*):
            `[size]`, contiguous.
        eps (`float`, defaults to 1e-6):
            Added to the mean square.
        offset (`float`, defaults to 0.0):
            Added to the weight.
    """

    kind: int
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0


_NO_NORM = Norm(0)


def normalized(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Norms the last dimension, in float32, rounded once.

    Args:
        x (`torch.Tensor`):
            `[..., size]` float32, bfloat16 or float16; three dimensions may have any strides (the heads of a row of
            queries, keys and values).
        norm (`Norm`):
            Which.

    Returns:
        `torch.Tensor`: A new contiguous tensor of x's shape and dtype.

    Raises:
        NotSupportedError: If a dtype, the size or the norm is not taken.
    """
    check(norm.kind in (1, 2), f"`norm` is of kind {norm.kind}; 1 is an RMS norm, 2 a layer norm.")
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch((y, None), (x, None, None), norm, _NO_NORM)
    return y


def add_normalized(
    branch: torch.Tensor,
    residual: torch.Tensor,
    after: Norm | None,
    *,
    before: Norm | None = None,
    other: torch.Tensor | None = None,
    multiplier: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds what a block computed to the residual, and norms the sum for the next block, in one launch.

    Args:
        branch (`torch.Tensor`):
            `[tokens, size]` float32, bfloat16 or float16, what the block computed.
        residual (`torch.Tensor`):
            Alike.
        after (`Norm`, *optional*):
            The norm of the sum; none where the next block has none.
        before (`Norm`, *optional*):
            The norm of the branch before it is added.
        other (`torch.Tensor`, *optional*):
            Alike, added to the branch first (parallel attention and MLP).
        multiplier (`float`, defaults to 1.0):
            Factor on what is added.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The norm of the sum (the sum itself without one), and the sum, rounded to
        the residual's dtype before it is normed, as modules do it. Both are new and contiguous.

    Raises:
        NotSupportedError: If shapes differ, or a dtype, the size or a norm is not taken.
    """
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    y = total if after is None else torch.empty_like(branch, memory_format=torch.contiguous_format)
    if not branch.shape == residual.shape == (branch if other is None else other).shape:
        shapes = [list(tensor.shape) for tensor in (branch, residual, other) if tensor is not None]
        check(False, f"what is added has the shapes {shapes}; they must be equal.")
    _launch((y, total), (branch, other, residual), after or _NO_NORM, before or _NO_NORM, multiplier)
    return y, total


def launch_config(size: int) -> tuple[int, int, int]:
    """Returns the table's entry for rows of a size: rows of a program, columns, warps.

    Args:
        size (`int`):
            Numbers of a row.
    """
    block = padded(size, 16)
    return max(1, 1024 // block), block, 2 if block <= 1024 else 4 if block <= 2048 else 8 if block <= 4096 else 16


def _launch(outputs: tuple, inputs: tuple, after: Norm, before: Norm, multiplier: float = 1.0) -> None:
    x, other, residual = inputs
    size = x.shape[-1]
    for tensor in inputs:
        if tensor is not None:
            check_dtype("x", tensor, CAPABLE_DTYPES)
    check(0 < size <= MAX_SIZE, f"rows have {size} numbers; the norm kernel takes from 1 to {MAX_SIZE}.")
    weights = [w for norm in (after, before) for w in (norm.weight, norm.bias) if w is not None]
    fit = all(weight.shape == (size,) and weight.is_contiguous() for weight in weights)
    check(fit, f"weights and biases of a norm of rows of {size} must be contiguous and as many.")
    if not x.numel():
        return
    x = x if x.dim() == 3 and x.stride(2) == 1 else rows_of(x)[:, None]
    num_rows, (rows, block, warps) = x.shape[0] * x.shape[1], launch_config(size)
    with on_device(x):
        norm_kernel[(triton.cdiv(num_rows, rows),)](
            outputs[0] if after.kind else None, outputs[1], x,
            None if other is None else other.contiguous(), None if residual is None else residual.contiguous(),
            before.weight, before.bias, after.weight, after.bias,
            after.eps, after.offset, before.eps, before.offset, multiplier,
            num_rows, x.shape[1], x.stride(0), x.stride(1),
            SIZE=size, BLOCK=block, ROWS=rows, KIND=int(after.kind), BEFORE_KIND=int(before.kind), num_warps=warps,
        )  # fmt: skip
