"""GPTQ checkpoints, as AutoGPTQ, optimum and GPTQModel write them.

    qweight   [in * bits / 32, out]    int32   numbers of a column of the transposed weight, packed along `in`
    qzeros    [groups, out * bits / 32] int32  zero points, packed along `out`; v1 stores them less one
    scales    [groups, out]            float16
    g_idx     [in]                     int32   the group of each input; with act-order these are in any order

    weight[o, i] = (q[i, o] - zero[g_idx[i], o]) * scale[g_idx[i], o]

Source: Frantar et al., "GPTQ", arXiv 2210.17323; the layout of AutoGPTQ's checkpoints.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from .base import (
    FORMATS,
    CheckpointFormat,
    LinearFormat,
    QuantizedWeight,
    TensorInfo,
    field,
    group_size,
    num_groups,
)
from .packing import pack, unpack

BITS = (2, 3, 4, 8)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class GptqLinear(LinearFormat):
    """One linear of a GPTQ checkpoint.

    Args:
        bits (`int`):
            2, 3, 4 or 8.
        group_size (`int`):
            Inputs that share a scale; -1: all of them.
        zeros_less_one (`bool`):
            Whether zero points are stored less one (v1), or as they are (v2).
    """

    required = ("qweight", "qzeros", "scales")
    optional = ("g_idx",)
    codes_name = "qweight"

    bits: int
    group_size: int
    zeros_less_one: bool

    def __str__(self) -> str:
        return f"GPTQ with {self.bits} bits and groups of {self.group_size}"

    def check(self, module: str, tensors: Mapping[str, TensorInfo], out_features: int, in_features: int) -> None:
        if in_features * self.bits % 32 or out_features * self.bits % 32:
            raise CheckpointError(
                f"`{module}` has {out_features} x {in_features} weights, and {self} packs whole 32-bit words only."
            )
        groups = num_groups(in_features, self.group_size)
        words = (in_features * self.bits // 32, out_features)
        self.expect(module, "qweight", tensors["qweight"], words, torch.int32)
        self.expect(module, "qzeros", tensors["qzeros"], (groups, out_features * self.bits // 32), torch.int32)
        self.expect(module, "scales", tensors["scales"], (groups, out_features), *_SCALES)
        if "g_idx" in tensors:
            self.expect(module, "g_idx", tensors["g_idx"], (in_features,), torch.int32, torch.int64)

    def check_values(self, module: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().check_values(module, tensors)
        groups = len(tensors["scales"])
        if (index := tensors.get("g_idx")) is not None and (index.min() < 0 or index.max() >= groups):
            raise CheckpointError(
                f"`{module}.g_idx` names groups {int(index.min())} to {int(index.max())} where there are {groups}: the "
                "checkpoint is damaged, or its config.json belongs to another one."
            )

    def zero_points(self, qzeros: torch.Tensor) -> torch.Tensor:
        """Unpacks zero points.

        Args:
            qzeros (`torch.Tensor`):
                As in the checkpoint.

        Returns:
            `torch.Tensor`: `[groups, out]` uint8.
        """
        zeros = unpack(qzeros, self.bits, dim=1)
        return (zeros + 1) & ((1 << self.bits) - 1) if self.zeros_less_one else zeros

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        codes = unpack(tensors["qweight"], self.bits, dim=0).T.contiguous()
        zeros, size = self.zero_points(tensors["qzeros"]).T, None if self.group_size == -1 else self.group_size
        return QuantizedWeight(codes, tensors["scales"].T, zeros, tensors.get("g_idx"), size, self.bits)

    def write_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return pack(codes.T, self.bits, dim=0).contiguous()


@FORMATS.register("gptq")
class GptqFormat(CheckpointFormat):
    """Reads `bits`, `group_size`, `checkpoint_format`, `dynamic` and `modules_in_block_to_quantize`.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.
    """

    def __init__(self, config: Mapping[str, Any]):
        bits = field(config, "gptq", "bits", BITS)
        version = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        field({"checkpoint_format": version}, "gptq", "checkpoint_format", ("gptq", "gptq_v2"))
        self._default = GptqLinear(bits, group_size(config, "gptq", 128), version == "gptq")
        self._rules = [
            _Rule.of(pattern, dict(change or {})) for pattern, change in (config.get("dynamic") or {}).items()
        ]

    def linear_format(self, module: str) -> LinearFormat | None:
        for rule in self._rules:
            if rule.pattern.match(module):
                return None if rule.skip else self._changed(rule.change)
        return self._default

    def _changed(self, change: dict[str, Any]) -> GptqLinear:
        bits = field({"bits": change.get("bits", self._default.bits)}, "gptq", "bits", BITS)
        size = group_size({"group_size": change.get("group_size", self._default.group_size)}, "gptq")
        return dataclasses.replace(self._default, bits=bits, group_size=size)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """An entry of GPTQModel's `dynamic`: other settings for modules of some names (`+:`), or none at all (`-:`)."""

    pattern: re.Pattern[str]
    skip: bool
    change: dict[str, Any]

    @classmethod
    def of(cls, pattern: str, change: dict[str, Any]) -> _Rule:
        try:
            compiled = re.compile(pattern.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise CheckpointError(
                f"`dynamic` in the `quantization_config` has the bad pattern {pattern!r}: {error}."
            ) from None
        return cls(compiled, pattern.startswith("-:"), change)
