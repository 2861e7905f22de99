"""Activation functions and gated activations by native code."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from ...errors import UnknownNameError
from . import library

# Transformers' names (`ACT2FN`); the numbers are those of csrc/activation.h.
ACTIVATIONS = {
    "linear": 0,
    "silu": 1,
    "swish": 1,
    "gelu": 2,
    "gelu_python": 2,
    "gelu_tanh": 3,
    "gelu_new": 3,
    "gelu_fast": 3,
    "gelu_accurate": 3,
    "gelu_pytorch_tanh": 3,
    "gelu_python_tanh": 3,
    "quick_gelu": 4,
    "relu": 5,
    "relu2": 6,
    "sigmoid": 7,
    "tanh": 8,
}


@functools.cache
def load() -> bool:
    """Makes the operators of this file available, and returns whether they are."""
    if not library.load():
        return False
    _register_fakes()
    return True


def activation_number(name: str) -> int:
    """Returns the number by which operators know an activation.

    Args:
        name (`str`):
            A name of `ACTIVATIONS`.

    Raises:
        UnknownNameError: If the native code has no such activation.
    """
    if name not in ACTIVATIONS:
        raise UnknownNameError(f"The native operators have no activation {name!r}; they have {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def recognize_activation(function: Callable[[torch.Tensor], torch.Tensor]) -> int | None:
    """Finds the activation that gives what a module or function gives, by trying it; `None` if there is none.

    Args:
        function (`Callable`):
            Takes and returns a float32 tensor `[1, n]`.
    """
    x = torch.cat([torch.linspace(-12, 12, 97), torch.linspace(-0.1, 0.1, 20)])[None]
    with torch.no_grad():
        wanted = function(x.clone())
    if not isinstance(wanted, torch.Tensor) or wanted.shape != x.shape:
        return None
    for number in sorted(set(ACTIVATIONS.values())):
        if torch.allclose(torch.ops.hf_paged.activation(x, number), wanted.float(), rtol=1e-5, atol=2e-6):
            return number
    return None


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """Applies an activation function, computed in float32 and rounded once.

    Args:
        x (`torch.Tensor`):
            Any shape, float32, bfloat16 or float16 on the CPU.
        name (`str`):
            A name of `ACTIVATIONS`.

    Returns:
        `torch.Tensor`: A new contiguous tensor of x's shape and dtype.

    Raises:
        UnknownNameError: If the native code has no such activation.
    """
    return torch.ops.hf_paged.activation(_rows(x), activation_number(name)).view(x.shape)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """Computes `activation(gate) * up`, in float32 and rounded once.

    Args:
        gate (`torch.Tensor`):
            `[..., size]` float32, bfloat16 or float16 on the CPU; it may be a view into a merged projection.
        up (`torch.Tensor`):
            Like gate.
        name (`str`):
            A name of `ACTIVATIONS`.

    Returns:
        `torch.Tensor`: A new contiguous tensor of gate's shape and dtype.

    Raises:
        UnknownNameError: If the native code has no such activation.
        RuntimeError: If shapes or dtypes differ.
    """
    if gate.shape != up.shape:
        raise RuntimeError(f"gate has the shape {list(gate.shape)} and up {list(up.shape)}; they must be equal.")
    return torch.ops.hf_paged.gated_activation(_rows(gate), _rows(up), activation_number(name)).view(gate.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x as `[rows, size]`, copied only if its strides need it."""
    if x.dim() == 0:
        return x.reshape(1, 1)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.shape[-1] <= 1 or rows.stride(-1) == 1 else rows.contiguous()


def _register_fakes() -> None:
    """Tells torch.compile the shapes and dtypes of the results."""

    def like(x: torch.Tensor, *_: object) -> torch.Tensor:
        return x.new_empty(x.shape)

    torch.library.register_fake("hf_paged::activation", like)
    torch.library.register_fake("hf_paged::gated_activation", like)
