"""Products with the weights of `nn.Linear` as they lie in memory: nothing is repacked, nothing can be out of date."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from . import library
from .activations import activation_number

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of x, and of weights that are not packed rows


@functools.cache
def load() -> bool:
    """Makes the operator of this file available, and returns whether it is."""
    if not library.load():
        return False

    def fake(
        x: torch.Tensor, weights: Sequence[torch.Tensor], biases: object, activation: int, gated: bool, *_: object
    ) -> torch.Tensor:
        columns = sum(weight.shape[:-1].numel() for weight in weights)
        return x.new_empty(x.shape[0], columns // 2 if gated else columns)

    torch.library.register_fake("hf_paged::linear", fake)
    return True


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies rows with one weight, as `torch.nn.functional.linear` does; see `linears`.

    Args:
        x (`torch.Tensor`):
            `[..., in]`.
        weight (`torch.Tensor`):
            `[out, in]`.
        bias (`torch.Tensor`, *optional*):
            `[out]`.

    Returns:
        `torch.Tensor`: `[..., out]` in x's dtype.

    Raises:
        RuntimeError: If a shape or dtype does not fit.
    """
    return _call(x, (weight,), (bias,), "linear", False, None)


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    activation: str = "linear",
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies rows with one to three weights: `residual + activation(x @ cat(weights).T + cat(biases))`.

    Up to 8 rows are bound by reading the weights, more by arithmetic. Sums are float32. bfloat16 weights are multiplied
    with x rounded to bfloat16 where the processor's bfloat16 instructions are the faster ones and all weights of the
    call are bfloat16, else in float32.

    Args:
        x (`torch.Tensor`):
            `[..., in]` float32, bfloat16 or float16 on the CPU.
        weights (`Sequence[torch.Tensor]`):
            Each `[out, in]` with contiguous rows, or `[blocks, rows, in]` where the rows of a fused, interleaved
            projection come in blocks. Packed rows (`kernels/packed_rows.py`) have their bytes instead of `in`.
        biases (`Sequence[torch.Tensor | None]`, *optional*):
            One for each weight, of its dtype, or of any beside packed rows, and of its shape without `in`.
        activation (`str`, defaults to `"linear"`):
            A name of `ACTIVATIONS`.
        residual (`torch.Tensor`, *optional*):
            Of the result's shape.

    Returns:
        `torch.Tensor`: `[..., all out]` in x's dtype.

    Raises:
        RuntimeError: If a shape or dtype does not fit.
        UnknownNameError: If there is no such activation.
    """
    return _call(x, weights, biases, activation, False, residual)


def gated_linear(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    biases: Sequence[torch.Tensor | None] | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first half of a gated MLP: `residual + activation(x @ gate.T) * (x @ up.T)`.

    Args:
        x (`torch.Tensor`):
            `[..., in]`, as in `linears`.
        gate (`torch.Tensor`):
            `[out, in]`; gate and up may be halves of one weight.
        up (`torch.Tensor`):
            `[out, in]`.
        activation (`str`):
            A name of `ACTIVATIONS`.
        biases (`Sequence[torch.Tensor | None]`, *optional*):
            Those of gate and up.
        residual (`torch.Tensor`, *optional*):
            Of the result's shape.

    Returns:
        `torch.Tensor`: `[..., out]` in x's dtype.

    Raises:
        RuntimeError: If a shape or dtype does not fit.
        UnknownNameError: If there is no such activation.
    """
    return _call(x, (gate, up), biases, activation, True, residual)


def _call(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None,
    activation: str,
    gated: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    rows = _rows(x)
    residual_rows = None if residual is None else _rows(residual)
    biases = [None] * len(weights) if biases is None else list(biases)
    y = torch.ops.hf_paged.linear(rows, list(weights), biases, activation_number(activation), gated, residual_rows)
    return y.view(*x.shape[:-1], y.shape[-1])


def _rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if x.shape[-1] <= 1 or rows.stride(-1) == 1 else rows.contiguous()
