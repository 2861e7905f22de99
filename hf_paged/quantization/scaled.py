"""Weights of one number each (int8 or float8) beside scales: of the whole weight, of its rows, or of blocks of it.

weight         [out, in]                           int8, float8_e4m3fn or float8_e5m2
weight_scale   one | [out] or [out, 1] | [out / block rows, in / block columns]

weight[o, i] * scale[o / block rows, i / block columns]      the last block of a row or column may be cut off
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ..errors import CheckpointError
from .base import LinearFormat, QuantizedWeight, TensorInfo

_SCALES = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class ScaledLinear(LinearFormat):
    """One linear of which each weight is a number of its own.

    Args:
        method (`str`):
            What messages call the format.
        dtypes (`tuple[torch.dtype, ...]`):
            That the weight may have.
        scale_name (`str`, defaults to `"weight_scale"`):
            The tensor with the scales.
        block (`tuple[int, int]`, *optional*):
            Rows and columns that share a scale, if neither all nor rows do.
        rounds_inputs (`bool`, defaults to `False`):
            Whether inputs are rounded to int8, token by token.
    """

    codes_name = "weight"
    optional = ("weight_zero_point", "input_scale", "activation_scale", "input_zero_point", "weight_shape")

    method: str
    dtypes: tuple[torch.dtype, ...]
    scale_name: str = "weight_scale"
    block: tuple[int, int] | None = None
    rounds_inputs: bool = False

    @property
    def required(self) -> tuple[str, ...]:  # type: ignore[override]
        """Returns the tensors that must be there."""
        return ("weight", self.scale_name)

    def __str__(self) -> str:
        return self.method if self.block is None else f"{self.method} with blocks of {self.block[0]} x {self.block[1]}"

    def check(self, module: str, tensors: Mapping[str, TensorInfo], out_features: int, in_features: int) -> None:
        self.expect(module, "weight", tensors["weight"], (out_features, in_features), *self.dtypes)
        scale = tensors[self.scale_name]
        fitting = [(), (1,), (1, 1), (out_features,), (out_features, 1)]
        if self.block is not None:
            fitting = [(), (1,), (1, 1), (-(-out_features // self.block[0]), -(-in_features // self.block[1]))]
        if scale.shape not in fitting:
            raise CheckpointError(
                f"`{module}.{self.scale_name}` has shape {list(scale.shape)} where {self} and a weight of "
                f"{out_features} x {in_features} ask for one of {[list(shape) for shape in fitting]}."
            )
        self.expect(module, self.scale_name, scale, scale.shape, *_SCALES)

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        scale, size = tensors[self.scale_name], None
        if self.block is None or scale.numel() == 1:
            scale = scale.reshape(-1, 1)
        else:
            scale, size = scale.repeat_interleave(self.block[0], 0)[:out_features], self.block[1]
        zero = tensors.get("weight_zero_point")
        zero = None if zero is None else zero.reshape(-1, 1)
        return QuantizedWeight(tensors["weight"], scale, zero, group_size=size, rounds_inputs=self.rounds_inputs)

    def write_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return codes
