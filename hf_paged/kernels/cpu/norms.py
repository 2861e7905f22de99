"""RMS norm and layer norm by native code, with or without the residual sum before them."""

from __future__ import annotations

import functools
import math

import torch

from . import library


@functools.cache
def load() -> bool:
    """Makes the operators of this file available, and returns whether they are."""
    if not library.load():
        return False
    _register_fakes()
    return True


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides each row by its root mean square: `sum / sqrt(mean(sum ** 2) + eps) * (offset + weight)`.

    Computed in float32 and rounded once; `sum` is rounded to the residual's dtype first, as modules do it. Rows may
    have strides (the heads of a fused query/key/value row), numbers of a row may not.

    Args:
        x (`torch.Tensor`):
            `[..., size]` float32, bfloat16 or float16 on the CPU.
        weight (`torch.Tensor`, *optional*):
            `[size]`, contiguous, of any of these dtypes; none is like ones.
        eps (`float`, defaults to `1e-6`):
            Added to the mean square.
        offset (`float`, defaults to `0.0`):
            Added to the weight; 1 for Gemma.
        residual (`torch.Tensor`, *optional*):
            Of x's shape, added to x before.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The norm, contiguous and of x's dtype, and `x + residual` in the residual's
        dtype (x itself without one).

    Raises:
        RuntimeError: If a shape or dtype does not fit.
    """
    if residual is None:
        return torch.ops.hf_paged.rms_norm(_rows(x), weight, eps, offset).view(x.shape), x
    rows, residual_rows = _flat_rows(x), _flat_rows(residual)
    y, total = torch.ops.hf_paged.add_rms_norm(rows, residual_rows, weight, eps, offset)
    return y.view(x.shape), total.view(residual.shape)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives each row mean 0 and variance 1: `(sum - mean) / sqrt(variance + eps) * (offset + weight) + bias`.

    Computed in float32 in two passes with a correction (Chan, Golub, LeVeque, "Algorithms for computing the sample
    variance", 1983), so that a large mean costs no digits.

    Args:
        x (`torch.Tensor`):
            `[..., size]` float32, bfloat16 or float16 on the CPU.
        weight (`torch.Tensor`, *optional*):
            `[size]`, contiguous; none is like ones.
        bias (`torch.Tensor`, *optional*):
            `[size]`, contiguous, of the weight's dtype.
        eps (`float`, defaults to `1e-5`):
            Added to the variance.
        offset (`float`, defaults to `0.0`):
            Added to the weight; 1 for Nemotron.
        residual (`torch.Tensor`, *optional*):
            Of x's shape, added to x before.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The norm, contiguous and of x's dtype, and `x + residual` in the residual's
        dtype (x itself without one).

    Raises:
        RuntimeError: If a shape or dtype does not fit.
    """
    if residual is None:
        return torch.ops.hf_paged.layer_norm(_rows(x), weight, bias, eps, offset).view(x.shape), x
    rows, residual_rows = _flat_rows(x), _flat_rows(residual)
    y, total = torch.ops.hf_paged.add_layer_norm(rows, residual_rows, weight, bias, eps, offset)
    return y.view(x.shape), total.view(residual.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x as `[rows, size]` or `[outer, inner, size]`, copied only if its strides need more levels."""
    if x.dim() == 2 and _contiguous_rows(x):
        return x
    if x.dim() < 2:
        return x.reshape(1, x.shape[-1]).contiguous()
    rows = x.reshape(math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1])
    return rows if _contiguous_rows(rows) else rows.contiguous()


def _flat_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if _contiguous_rows(rows) else rows.contiguous()


def _contiguous_rows(x: torch.Tensor) -> bool:
    return x.shape[-1] <= 1 or x.stride(-1) == 1


def _register_fakes() -> None:
    """Tells torch.compile the shapes and dtypes of the results."""

    def normed(x: torch.Tensor, *_: object) -> torch.Tensor:
        return x.new_empty(x.shape)

    def summed(x: torch.Tensor, residual: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty(x.shape), residual.new_empty(residual.shape)

    for name in ("rms_norm", "layer_norm"):
        torch.library.register_fake(f"hf_paged::{name}", normed)
        torch.library.register_fake(f"hf_paged::add_{name}", summed)
