"""AWQ checkpoints in the GEMM layout, as AutoAWQ writes them.

    qweight   [in, out / 8]       int32     eight numbers of 4 bits, of neighbouring outputs
    qzeros    [groups, out / 8]   int32     zero points likewise
    scales    [groups, out]       float16

    within a word, from the lowest bits:    outputs 0 2 4 6 1 3 5 7
    weight[o, i] = (q[i, o] - zero[i // group_size, o]) * scale[i // group_size, o]

Source: Lin et al., "AWQ", arXiv 2306.00978; the layout of AutoAWQ's `WQLinear_GEMM`.
"""

from __future__ import annotations

import dataclasses
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

BITS = 4
PER_WORD = 32 // BITS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose number lies in each place of a word
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


def unpack_outputs(words: torch.Tensor) -> torch.Tensor:
    """Takes words apart and puts their numbers into the order of the outputs.

    Args:
        words (`torch.Tensor`):
            `[rows, out / 8]` int32.

    Returns:
        `torch.Tensor`: `[rows, out]` uint8.
    """
    numbers = unpack(words, BITS, dim=1).unflatten(1, (-1, PER_WORD))
    places = [ORDER.index(output) for output in range(PER_WORD)]
    return numbers[..., places].flatten(1)


def pack_outputs(numbers: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_outputs`.

    Args:
        numbers (`torch.Tensor`):
            `[rows, out]` uint8.

    Returns:
        `torch.Tensor`: `[rows, out / 8]` int32.
    """
    return pack(numbers.unflatten(1, (-1, PER_WORD))[..., list(ORDER)].flatten(1), BITS, dim=1)


@dataclasses.dataclass(frozen=True)
class AwqLinear(LinearFormat):
    """One linear of an AWQ checkpoint.

    Args:
        group_size (`int`):
            Inputs that share a scale; -1: all of them.
    """

    required = ("qweight", "qzeros", "scales")
    codes_name = "qweight"

    group_size: int

    def __str__(self) -> str:
        return f"AWQ with groups of {self.group_size}"

    def check(self, module: str, tensors: Mapping[str, TensorInfo], out_features: int, in_features: int) -> None:
        if out_features % PER_WORD:
            raise CheckpointError(f"`{module}` has {out_features} outputs, and {self} packs {PER_WORD} in a word.")
        groups = num_groups(in_features, self.group_size)
        packed = out_features // PER_WORD
        self.expect(module, "qweight", tensors["qweight"], (in_features, packed), torch.int32)
        self.expect(module, "qzeros", tensors["qzeros"], (groups, packed), torch.int32)
        self.expect(module, "scales", tensors["scales"], (groups, out_features), *_SCALES)

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        codes, zeros = (unpack_outputs(tensors[name]).T.contiguous() for name in ("qweight", "qzeros"))
        size = None if self.group_size == -1 else self.group_size
        return QuantizedWeight(codes, tensors["scales"].T, zeros, None, size, BITS)

    def write_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return pack_outputs(codes.T.contiguous()).contiguous()


@FORMATS.register("awq")
class AwqFormat(CheckpointFormat):
    """Reads `bits`, `group_size`, `version` and `modules_to_not_convert`.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.
    """

    def __init__(self, config: Mapping[str, Any]):
        field(config, "awq", "bits", (BITS,), config.get("w_bit"))
        field(
            {"version": str(config.get("version") or config.get("format") or "gemm").lower()},
            "awq",
            "version",
            ("gemm",),
        )
        field({"zero_point": config.get("zero_point", True)}, "awq", "zero_point", (True,))
        self._linear = AwqLinear(group_size(config, "awq", config.get("q_group_size", 128)))
        self._dense = tuple(config.get("modules_to_not_convert") or ())

    def linear_format(self, module: str) -> LinearFormat | None:
        return None if any(part in module for part in self._dense) else self._linear
