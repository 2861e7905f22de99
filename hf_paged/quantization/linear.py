"""The module that stands where a checkpoint's linear was quantized."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .base import LinearFormat, TensorInfo


class QuantizedLinear(nn.Module):
    """`x @ weight.T + bias` with a weight that is kept as its checkpoint stores it.

    Its buffers have the names, shapes and dtypes of the checkpoint's tensors, so that saving writes the same bytes.

    Args:
        in_features (`int`):
            Length of a row.
        out_features (`int`):
            Rows.
        format (`LinearFormat`):
            What the tensors mean.
        tensors (`Mapping[str, TensorInfo]`):
            Those of the checkpoint, without the bias.
        bias (`torch.nn.Parameter`, *optional*):
            `[out_features]`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: LinearFormat,
        tensors: Mapping[str, TensorInfo],
        bias: nn.Parameter | None = None,
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.format = format
        self.tensor_names = tuple(tensors)
        for name, info in tensors.items():
            self.register_buffer(name, torch.empty(info.shape, dtype=info.dtype))
        self.bias = bias

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the checkpoint, by name."""
        return {name: getattr(self, name) for name in self.tensor_names}

    def dequantize(self) -> torch.Tensor:
        """Returns the weight, `[out_features, in_features]` float32."""
        return self.format.dequantize(self.tensors(), self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies.

        Args:
            x (`torch.Tensor`):
                `[..., in_features]`.

        Returns:
            `torch.Tensor`: `[..., out_features]` in x's dtype.
        """
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.dequantize().to(x.dtype), bias)

    def extra_repr(self) -> str:
        """Returns what `print(model)` shows."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {self.format}"
