"""The module that stands where a checkpoint's linear was quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..kernels.packed_rows import Codes, Numbers, can_pack, pack_rows, unpack_rows
from ..modeling.packed_linear import PackedLinear
from .base import LinearFormat, QuantizedWeight, TensorInfo


class QuantizedLinear(PackedLinear):
    """`x @ weight.T + bias` with a quantized weight of a checkpoint.

    As loaded, its buffers are the tensors of the checkpoint. `pack` puts the codes, which are nearly all of the bytes,
    into rows that operators read; saving makes them again, byte by byte.

        before    buffers qweight, qzeros, scales, ...
        after     parameter weight (packed rows), buffers qzeros, scales, ..., and for act-order `order`

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
        super().__init__(in_features, out_features, bias=bias)
        self.format = format
        self.tensor_names = tuple(tensors)
        for name, info in tensors.items():
            self.register_buffer(name, torch.empty(info.shape, dtype=info.dtype))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the checkpoint, by name; codes that are packed are made again."""
        held = {name: getattr(self, name) for name in self.tensor_names if not self._is_in_rows(name)}
        if self.is_packed:
            held[self.format.codes_name] = self.format.write_codes(self._codes())
        return {name: held[name] for name in self.tensor_names}

    def pack(self) -> bool:
        """Packs the codes, if they and their groups are such as can be packed.

        Returns:
            `bool`: Whether they are packed now.
        """
        if self.is_packed:
            return True
        weight = self.format.read(self.tensors(), self.out_features, self.in_features)
        packed = _packed(weight)
        if packed is None:
            return False
        delattr(self, self.format.codes_name)
        self.set_rows(*packed)
        self._unsigned = weight.codes.dtype == torch.uint8
        return True

    def dequantize(self) -> torch.Tensor:
        """Returns the weight, `[out_features, in_features]` float32."""
        if not self.is_packed:
            return self.format.read(self.tensors(), self.out_features, self.in_features).dequantize()
        return super().dequantize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies.

        Args:
            x (`torch.Tensor`):
                `[..., in_features]`.

        Returns:
            `torch.Tensor`: `[..., out_features]` in x's dtype.
        """
        if self.is_packed:
            return super().forward(x)
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.dequantize().to(x.dtype), bias)

    def extra_repr(self) -> str:
        """Returns what `print(model)` shows."""
        return f"{super().extra_repr()}, {self.format}"

    def _is_in_rows(self, name: str) -> bool:
        return self.is_packed and name == self.format.codes_name

    def _codes(self) -> torch.Tensor:
        """The codes, as the format reads them."""
        numbers = unpack_rows(self.weight, self.in_features)
        codes = numbers.codes if self.order is None else numbers.codes[:, self.order.argsort()]
        if numbers.kind is Codes.Q8 and self._unsigned:
            return (codes.to(torch.int16) + 128).to(torch.uint8)
        return codes

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_packed:
            destination.pop(prefix + "weight")
            destination[prefix + self.format.codes_name] = self.tensors()[self.format.codes_name]


def _kind_of(weight: QuantizedWeight) -> Codes | None:
    if weight.codes.dtype == torch.uint8:
        return Codes.Q4 if weight.bits <= 4 else Codes.Q8
    if weight.codes.dtype == torch.int8:
        is_plain = weight.zero is None and weight.scale.shape[1] == 1
        return Codes.W8A8 if weight.rounds_inputs and is_plain else Codes.Q8
    return Codes.E4M3 if weight.codes.dtype == torch.float8_e4m3fn else None


def _packed(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Packed rows, and in which order their inputs stand; `None` if that cannot be."""
    kind = _kind_of(weight)
    out_features, in_features = weight.codes.shape
    num_groups = weight.scale.shape[1]
    if kind is None or not can_pack(in_features, num_groups):
        return None
    groups, order = weight.groups(), None
    if num_groups > 1:
        size = in_features // num_groups
        if not bool((groups.bincount(minlength=num_groups) == size).all()):
            return None
        if not bool((groups == torch.arange(in_features, device=groups.device) // size).all()):
            order = groups.argsort(stable=True)
    codes = weight.codes if order is None else weight.codes[:, order]
    scale = weight.scale.float().expand(out_features, num_groups)
    zero = torch.zeros_like(scale) if weight.zero is None else weight.zero.float().expand(out_features, num_groups)
    if kind is Codes.Q8 and codes.dtype == torch.uint8:
        codes, zero = (codes.to(torch.int16) - 128).to(torch.int8), zero - 128
    return pack_rows(Numbers(codes, scale, zero, kind)), order
