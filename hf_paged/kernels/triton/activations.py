"""Activations and gated activations in Triton: elementwise, in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import DTYPES, check, check_dtype, on_device, rows_of

# What this file can: dtypes, any sizes, and the activations of `patterns/recipe.py`, by number.
CAPABLE_DTYPES = DTYPES
NUM_ACTIVATIONS = 9
BLOCK = 2048


@triton.jit
def _tanh(x):
    """By exponentials, which cancel near 0, and there by its series."""
    power = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - power) / (1.0 + power)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -far, far))


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Applies an activation to float32 numbers; for epilogues of other kernels too."""
    if KIND == 1:  # silu
        y = x * tl.sigmoid(x)
    elif KIND == 2:  # gelu
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 3:  # gelu by tanh: (1 + tanh(u)) / 2 = sigmoid(2 u)
        y = x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    elif KIND == 4:  # quick gelu
        y = x * tl.sigmoid(1.702 * x)
    elif KIND == 5:  # relu; NaN stays NaN
        y = tl.where(x < 0, 0.0, x)
    elif KIND == 6:  # relu squared
        y = tl.where(x < 0, 0.0, x * x)
    elif KIND == 7:
        y = tl.sigmoid(x)
    elif KIND == 8:
        y = _tanh(x)
    else:
        y = x
    return y


@triton.jit
def activation_kernel(y_ptr, gate_ptr, up_ptr, gate_stride, up_stride, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows, tiles of `BLOCK` columns). Without `up_ptr` there is nothing to multiply with."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    y = activated(tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32), KIND)
    if up_ptr is not None:
        y *= tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


def activation(x: torch.Tensor, kind: int) -> torch.Tensor:
    """Applies an activation, computed in float32 and rounded once.

    Args:
        x (`torch.Tensor`):
            `[..., size]` float32, bfloat16 or float16; rows may lie apart.
        kind (`int`):
            Which: 0 none, 1 silu, 2 gelu, 3 gelu by tanh, 4 quick gelu, 5 relu, 6 relu squared, 7 sigmoid, 8 tanh.

    Returns:
        `torch.Tensor`: A new contiguous tensor of x's shape and dtype.

    Raises:
        NotSupportedError: If the dtype or the activation is none of these.
    """
    return _launched(x, None, kind)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    """Computes `activation(gate) * up`, in float32 and rounded once.

    Args:
        gate (`torch.Tensor`):
            `[..., size]` float32, bfloat16 or float16; it may be a view into a merged projection.
        up (`torch.Tensor`):
            Like gate.
        kind (`int`):
            Which activation; see `activation`.

    Returns:
        `torch.Tensor`: A new contiguous tensor of gate's shape and dtype.

    Raises:
        NotSupportedError: If shapes or dtypes differ or are not taken, or if there is no such activation.
    """
    check(
        gate.shape == up.shape and gate.dtype == up.dtype,
        f"gate is {list(gate.shape)} of {gate.dtype} and up {list(up.shape)} of {up.dtype}; they must be alike.",
    )
    return _launched(gate, up, kind)


def _launched(gate: torch.Tensor, up: torch.Tensor | None, kind: int) -> torch.Tensor:
    check_dtype("gate", gate, CAPABLE_DTYPES)
    check(0 <= kind < NUM_ACTIVATIONS, f"there is no activation {kind}; they are numbered from 0 to 8.")
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    gate, up = rows_of(gate), None if up is None else rows_of(up)
    num_rows, size = gate.shape
    with on_device(gate):
        activation_kernel[(num_rows, triton.cdiv(size, BLOCK))](
            y, gate, up, gate.stride(0), 0 if up is None else up.stride(0), size, KIND=int(kind), BLOCK=BLOCK
        )
    return y
