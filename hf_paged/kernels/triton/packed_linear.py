"""Products with packed rows (see `kernels/packed_rows.py`) in Triton: codes are widened in registers.

A tile of codes is multiplied as it is, which is exact in bfloat16 and float16, and each group's sum is scaled once:

    y += scale * (x . codes - zero * sum of x)          over the inputs of a group

Two 4-bit codes lie in a byte, 16 numbers apart: their halves are two products, each with its own part of x.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from ..packed_rows import Codes, format_of
from .launching import DTYPES, check, check_dtype, on_device, padded, register_limit, rows_of

CAPABLE_DTYPES = DTYPES
BLOCK_COLUMNS = 64
MAX_BLOCK_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class LinearTile:
    """How a product is cut up.

    Args:
        block_tokens (`int`):
            Rows of x in a program.
        block_inputs (`int`):
            Inputs that are multiplied at a time.
        num_warps (`int`):
            Warps of a program.
    """

    block_tokens: int
    block_inputs: int
    num_warps: int


def tile_of(num_tokens: int, group_size: int, kind: Codes) -> LinearTile:
    """Returns how a product is cut up.

    Args:
        num_tokens (`int`):
            Rows of x.
        group_size (`int`):
            Inputs that share a scale; 0: all.
        kind (`Codes`):
            What the codes are; widening float8 takes more registers.
    """
    block_tokens = min(MAX_BLOCK_TOKENS, padded(num_tokens, 16))
    sizes = (64, 32) if kind is Codes.E4M3 else (128, 64, 32)
    block_inputs = next((size for size in sizes if group_size % size == 0), 32) if group_size else 64
    return LinearTile(block_tokens, block_inputs, 4)


@triton.jit
def _widened(codes, KIND: tl.constexpr, to):
    """Codes of a byte each as numbers: Q8 signed, E4M3 as float16 of the same bits, which is 1/256 of the number."""
    if KIND == 8:
        numbers = codes.to(tl.int8, bitcast=True).to(to)
    else:
        bits = codes.to(tl.int16)
        half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        numbers = (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(to)
    return numbers


@triton.jit
def packed_linear_kernel(  # noqa: PLR0913 - a kernel takes its tensors and constants one by one
    y_ptr,
    x_ptr,
    codes_ptr,
    heads_ptr,
    bias_ptr,
    num_tokens,
    num_columns,
    x_stride,
    row_bytes,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (tiles of columns, tiles of tokens). `heads_ptr`: the same rows as `codes_ptr`, as float32.

    GROUP: inputs of a group, which `BLOCK_K` divides, or 0 for one group of any size. KIND: a value of `Codes`.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_column, is_token = columns < num_columns, tokens < num_tokens
    rows = tl.where(is_column, columns, 0).to(tl.int64) * row_bytes
    x_rows = x_ptr + tl.where(is_token, tokens, 0).to(tl.int64)[:, None] * x_stride
    to = x_ptr.dtype.element_ty
    BYTES: tl.constexpr = BLOCK_K // 2 if KIND == 4 else BLOCK_K
    GROUP_BYTES: tl.constexpr = 8 + (GROUP // 2 if KIND == 4 else GROUP)
    place = tl.arange(0, BYTES)
    inputs = place // 16 * 32 + place % 16 if KIND == 4 else place
    y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        group = start // GROUP if GROUP else 0
        begin = start - group * GROUP
        head = rows + group * GROUP_BYTES if GROUP else rows
        scale = tl.load(heads_ptr + head // 4)
        zero = tl.load(heads_ptr + head // 4 + 1)
        at = head + 8 + (begin // 2 if KIND == 4 else begin)
        k = start + inputs
        if GROUP:
            codes = tl.load(codes_ptr + at[:, None] + place[None, :])
            x = tl.load(x_rows + k[None, :])
        else:  # a row ends with the last 32 numbers, and x before that
            codes = tl.load(
                codes_ptr + at[:, None] + place[None, :], mask=(k < (SIZE + 31) // 32 * 32)[None, :], other=0
            )
            x = tl.load(x_rows + k[None, :], mask=(k < SIZE)[None, :], other=0.0)
        sums = tl.sum(x.to(tl.float32), 1)
        if KIND == 4:
            if GROUP:
                x_high = tl.load(x_rows + k[None, :] + 16)
            else:
                x_high = tl.load(x_rows + k[None, :] + 16, mask=(k + 16 < SIZE)[None, :], other=0.0)
            product = tl.dot(x, tl.trans((codes & 15).to(to)), input_precision="ieee")
            product = tl.dot(x_high, tl.trans((codes >> 4).to(to)), product, input_precision="ieee")
            sums += tl.sum(x_high.to(tl.float32), 1)
        else:
            product = tl.dot(x, tl.trans(_widened(codes, KIND, to)), input_precision="ieee")
        y += scale[None, :] * (product - zero[None, :] * sums[:, None])
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out = y_ptr + tokens.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=is_token[:, None] & is_column[None, :])


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies rows with packed rows, in float32, rounded once. Rows for int8 inputs leave these as they are.

    Args:
        x (`torch.Tensor`):
            `[..., in_features]` float32, bfloat16 or float16.
        weight (`torch.Tensor`):
            `[out_features, bytes of a row]`, contiguous.
        bias (`torch.Tensor`, *optional*):
            `[out_features]`.

    Returns:
        `torch.Tensor`: `[..., out_features]` in x's dtype.

    Raises:
        NotSupportedError: If a dtype or the rows do not fit.
    """
    check_dtype("x", x, CAPABLE_DTYPES)
    check(weight.dim() == 2 and weight.is_contiguous(), "packed rows must be [out_features, bytes], contiguous.")
    rows, size, columns = rows_of(x), x.shape[-1], weight.shape[0]
    try:
        kind, num_groups = format_of(weight, size)
    except ValueError as error:
        check(False, str(error))
        raise
    y = torch.empty(len(rows), columns, dtype=x.dtype, device=x.device)
    if y.numel():
        group = size // num_groups if num_groups > 1 else 0
        tile = tile_of(len(rows), group, kind)
        codes = weight.view(torch.uint8)
        with on_device(x):
            packed_linear_kernel[(triton.cdiv(columns, BLOCK_COLUMNS), triton.cdiv(len(rows), tile.block_tokens))](
                *(y, rows, codes, codes.view(torch.float32), bias),
                *(len(rows), columns, rows.stride(0), codes.shape[1]),
                SIZE=size,
                GROUP=group,
                KIND=kernel_kind(kind),
                BLOCK_M=tile.block_tokens,
                BLOCK_N=BLOCK_COLUMNS,
                BLOCK_K=tile.block_inputs,
                num_warps=tile.num_warps,
                **register_limit(x),
            )
    return y.view(*x.shape[:-1], columns)


def kernel_kind(kind: Codes) -> int:
    """Returns what the kernel calls a kind of codes.

    Args:
        kind (`Codes`):
            The kind.
    """
    return Codes.Q8.value if kind is Codes.W8A8 else kind.value
