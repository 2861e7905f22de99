"""Linears whose weights are packed rows of codes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..kernels.cpu import linear as native
from ..kernels.packed_rows import Codes, dequantized, packed_linear
from ..kernels.triton import device

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@functools.cache
def operator_of(device_type: str) -> Multiply:
    """Returns what multiplies with packed rows on a kind of device: plain torch where there is nothing better.

    Args:
        device_type (`str`):
            `"cpu"`, `"cuda"`, ...
    """
    if device_type == "cpu" and native.load():
        return native.linear
    if device_type == "cuda" and device.unavailable_reason() is None:
        from ..kernels.triton.packed_linear import packed_linear as on_triton  # takes long, and is not needed on a CPU

        return on_triton
    return packed_linear


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with a weight in packed rows (see `kernels/packed_rows.py`).

    The native operators of the CPU and the Triton kernel on GPUs read the rows as they lie; without them, and where
    gradients of x are asked for, the weight is dequantized at every call.

    Args:
        in_features (`int`):
            Length of a row.
        out_features (`int`):
            Rows.
        weight (`torch.Tensor`, *optional*):
            `[out_features, bytes of a row]`; none: it comes later, as `set_rows` says.
        bias (`torch.nn.Parameter`, *optional*):
            `[out_features]`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    order: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight: torch.Tensor | None = None,
        bias: nn.Parameter | None = None,
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.is_packed = False
        self.register_buffer("order", None, persistent=False)
        self.register_parameter("bias", bias)
        if weight is not None:
            self.set_rows(weight)

    def set_rows(self, weight: torch.Tensor, order: torch.Tensor | None = None) -> None:
        """Sets the weight.

        Args:
            weight (`torch.Tensor`):
                `[out_features, bytes of a row]`.
            order (`torch.Tensor`, *optional*):
                `[in_features]` int64: the input that each number of a row belongs to. None: their own order.
        """
        rows = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.register_parameter("weight", rows)
        self.order = order
        self.is_packed = True

    def dequantize(self) -> torch.Tensor:
        """Returns the weight, `[out_features, in_features]` float32."""
        weight = dequantized(self.weight, self.in_features)
        return weight if self.order is None else weight[:, self.order.argsort()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies.

        Args:
            x (`torch.Tensor`):
                `[..., in_features]`.

        Returns:
            `torch.Tensor`: `[..., out_features]` in x's dtype.
        """
        x = x if self.order is None else x[..., self.order]
        has_operator = x.dtype in native.DTYPES and not (torch.is_grad_enabled() and x.requires_grad)
        multiply = operator_of(x.device.type) if has_operator else packed_linear
        return multiply(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Returns what `print(model)` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        """Moves what it holds, and leaves its dtypes alone: rows and scales mean what they are."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        super()._apply(moved, recurse)
        return self


@contextlib.contextmanager
def inputs_not_rounded(model: nn.Module) -> Iterator[None]:
    """Keeps linears from rounding their inputs to int8 while the context lasts.

    Where they do, two right ways to compute a layer differ by as much as rounding costs: a rounding error decides on
    which side of a step an input falls. What a layer consists of is told apart without.

    Args:
        model (`torch.nn.Module`):
            The model.
    """
    rounding = [
        (module, module.weight)
        for module in model.modules()
        if isinstance(module, PackedLinear) and module.is_packed and module.weight.dtype == Codes.W8A8.tensor_dtype
    ]
    try:
        for module, weight in rounding:
            rows = weight.data.view(Codes.Q8.tensor_dtype)  # which are the same, and multiplied with x as it is
            module._parameters["weight"] = nn.Parameter(rows, requires_grad=False)
        yield
    finally:
        for module, weight in rounding:
            module._parameters["weight"] = weight
