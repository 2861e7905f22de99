"""Checkpoints of the compressed-tensors library (llm-compressor's): packed and plain integers, and float8.

    pack-quantized     weight_packed      [out, in * bits / 32] int32   numbers + 2 ** (bits - 1), packed along `in`
                       weight_scale       [out, groups]
                       weight_zero_point  [out * bits / 32, groups] int32   packed along `out`, where it is asymmetric
                       weight_shape       [2] int64
                       weight_g_idx       [in] int32   the group of each input, with act-order
    int-quantized      weight [out, in] int8,           weight_scale [out, 1] or [1], weight_zero_point likewise
    float-quantized    weight [out, in] float8_e4m3fn,  weight_scale as above, or [out / rows, in / columns] of blocks
    naive-quantized    either of the two

Where a checkpoint asks for it, the inputs of int8 linears are rounded to int8 too, each token by its largest number, if
these are symmetric and scaled on the fly. Other activations are kept as they are: that is never less exact. Source: the
format documentation of the compressed-tensors library.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointError, NotSupportedError
from .base import FORMATS, CheckpointFormat, LinearFormat, QuantizedWeight, TensorInfo, num_groups
from .packing import pack, unpack
from .scaled import ScaledLinear

METHOD = "compressed-tensors"
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class PackedLinear(LinearFormat):
    """One linear in the layout "pack-quantized".

    Args:
        bits (`int`):
            4 or 8.
        group_size (`int`):
            Inputs that share a scale; -1: all of a row.
        per_tensor (`bool`):
            Whether there is one scale for the whole weight.
        symmetric (`bool`):
            Whether there are no zero points.
    """

    bits: int
    group_size: int
    per_tensor: bool
    symmetric: bool

    optional = ("weight_shape", "weight_g_idx", "input_scale", "input_zero_point")
    codes_name = "weight_packed"

    @property
    def required(self) -> tuple[str, ...]:  # type: ignore[override]
        """Returns the tensors that must be there."""
        return (
            ("weight_packed", "weight_scale")
            if self.symmetric
            else ("weight_packed", "weight_scale", "weight_zero_point")
        )

    def __str__(self) -> str:
        return f"compressed-tensors, packed, with {self.bits} bits and groups of {self.group_size}"

    def check(self, module: str, tensors: Mapping[str, TensorInfo], out_features: int, in_features: int) -> None:
        per_word = 32 // self.bits
        groups, rows = num_groups(in_features, self.group_size), 1 if self.per_tensor else out_features
        self.expect(
            module, "weight_packed", tensors["weight_packed"], (out_features, -(-in_features // per_word)), torch.int32
        )
        scale = tensors["weight_scale"]
        if not (self.per_tensor and scale.shape in ((), (1,))):
            self.expect(module, "weight_scale", scale, (rows, groups), *_SCALES)
        if not self.symmetric:
            packed = (-(-rows // per_word), groups)
            self.expect(module, "weight_zero_point", tensors["weight_zero_point"], packed, torch.int32)
        if "weight_g_idx" in tensors:
            self.expect(module, "weight_g_idx", tensors["weight_g_idx"], (in_features,), torch.int32, torch.int64)

    def check_values(self, module: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().check_values(module, tensors)
        shape, packed = tensors.get("weight_shape"), tensors["weight_packed"]
        if shape is not None and (int(shape[0]), -(-int(shape[1]) // (32 // self.bits))) != tuple(packed.shape):
            raise CheckpointError(
                f"`{module}.weight_shape` says {shape.tolist()}, and `weight_packed` is {list(packed.shape)}: the "
                "checkpoint is damaged."
            )
        index, groups = tensors.get("weight_g_idx"), tensors["weight_scale"].shape[-1]
        if index is not None and int(index.max()) >= groups:
            raise CheckpointError(
                f"`{module}.weight_g_idx` names group {int(index.max())} where there are {groups}: the checkpoint is "
                "damaged."
            )

    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        codes = unpack(tensors["weight_packed"], self.bits, dim=1)[:, :in_features].contiguous()
        scale = tensors["weight_scale"]
        scale = scale.reshape(1, 1) if self.per_tensor else scale
        zero = torch.full_like(scale, 1 << (self.bits - 1), dtype=torch.float32)
        if not self.symmetric:
            zero = unpack(tensors["weight_zero_point"], self.bits, dim=0)[: scale.shape[0]]
        index = tensors.get("weight_g_idx")
        if index is not None and int(index.min()) < 0:  # never filled in
            index = None
        size = None if self.group_size == -1 else self.group_size
        return QuantizedWeight(codes, scale, zero, index, size, self.bits)

    def write_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return pack(codes, self.bits, dim=1).contiguous()


@dataclasses.dataclass(frozen=True)
class _Group:
    """An entry of `config_groups`: how the modules are stored that its targets name."""

    targets: Sequence[str]
    linear: LinearFormat


@FORMATS.register(METHOD)
class CompressedTensorsFormat(CheckpointFormat):
    """Reads `config_groups`, `format` and `ignore`.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.
    """

    def __init__(self, config: Mapping[str, Any]):
        self._ignored = tuple(config.get("ignore") or ())
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CheckpointError(
                f"The `quantization_config` of method {METHOD!r} has no `config_groups`, which say how weights are "
                "stored."
            )
        for pattern in (
            *self._ignored,
            *(target for group in groups.values() for target in group.get("targets") or ()),
        ):
            _check_pattern(pattern)
        self._groups = [
            _Group(
                tuple(group.get("targets") or ("Linear",)),
                _linear_format(name, group, group.get("format") or config.get("format")),
            )
            for name, group in groups.items()
        ]

    def linear_format(self, module: str) -> LinearFormat | None:
        if any(_names(pattern, module) for pattern in self._ignored):
            return None
        named = [group for group in self._groups if any(_names(target, module) for target in group.targets)]
        by_class = [group for group in self._groups if "Linear" in group.targets]
        return next((group.linear for group in (*named, *by_class)), None)


def _check_pattern(pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise CheckpointError(f"The `quantization_config` has the bad pattern {pattern!r}: {error}.") from None


def _names(pattern: str, module: str) -> bool:
    """Whether a pattern names a module: by `re:` and a regular expression, by its name, or by an end of that."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    pattern = pattern.removesuffix(".linear")  # of a linear wrapped in another module
    return module == pattern or module.endswith(f".{pattern}")


def _rounds_inputs(group: Mapping[str, Any]) -> bool:
    inputs = group.get("input_activations")
    return (
        isinstance(inputs, Mapping)
        and (inputs.get("type", "int"), inputs.get("num_bits")) == ("int", 8)
        and inputs.get("strategy") == "token"
        and bool(inputs.get("dynamic"))
        and bool(inputs.get("symmetric", True))
    )


def _linear_format(name: str, group: Mapping[str, Any], layout: str | None) -> LinearFormat:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"`config_groups.{name}.weights` is missing: only activations would be quantized.")
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("strategy")
    size = weights.get("group_size")
    strategy = strategy or ("tensor" if size is None else "channel" if size == -1 else "group")
    symmetric = bool(weights.get("symmetric", True))
    if kind == "int" and layout == "pack-quantized" and bits in (4, 8) and strategy in ("tensor", "channel", "group"):
        if strategy == "group" and (not isinstance(size, int) or size < 1):
            raise CheckpointError(
                f"`config_groups.{name}.weights.group_size` must be a whole number from 1, got {size!r}."
            )
        return PackedLinear(bits, size if size and strategy == "group" else -1, strategy == "tensor", symmetric)
    plain = layout in ("int-quantized", "float-quantized", "naive-quantized")
    if kind == "int" and plain and bits == 8 and strategy in ("tensor", "channel"):
        return ScaledLinear("compressed-tensors, int8", (torch.int8,), rounds_inputs=_rounds_inputs(group))
    if kind == "float" and plain and bits == 8 and strategy in ("tensor", "channel", "block"):
        block = weights.get("block_structure") if strategy == "block" else None
        if strategy == "block" and (not isinstance(block, (list, tuple)) or len(block) != 2):
            raise CheckpointError(f"`config_groups.{name}.weights.block_structure` must be two numbers, got {block!r}.")
        blocks = None if block is None else (int(block[0]), int(block[1]))
        return ScaledLinear("compressed-tensors, FP8", (torch.float8_e4m3fn,), block=blocks)
    raise NotSupportedError(
        f"`config_groups.{name}` of method {METHOD!r} (format {layout!r}, type {kind!r}, {bits} bits, strategy "
        f"{strategy!r}) is not built. Built are pack-quantized int4 and int8, int-quantized int8 and float-quantized "
        "FP8 by tensor, channel, group (packed) or block (FP8)."
    )
