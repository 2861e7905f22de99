"""The other way round: from codes to the tensors and the configuration of a compressed-tensors checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .compressed_tensors import METHOD
from .packing import pack
from .rounding import Rounding, round_to_float8

Tensors = dict[str, torch.Tensor]


def packed_config(rounding: Rounding, ignore: Sequence[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of a checkpoint of packed integers.

    Args:
        rounding (`Rounding`):
            Of 4 or 8 bits.
        ignore (`Sequence[str]`):
            Names of linears that stay dense.
    """
    grouped = rounding.group_size != -1
    weights: dict[str, Any] = {
        "num_bits": rounding.bits,
        "type": "int",
        "strategy": "group" if grouped else "channel",
        "group_size": rounding.group_size if grouped else None,
        "symmetric": rounding.symmetric,
        "dynamic": False,
    }
    return _config("pack-quantized", weights, ignore)


def packed_tensors(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, rounding: Rounding) -> Tensors:
    """Returns the tensors of one linear of packed integers.

    Args:
        codes (`torch.Tensor`):
            `[out, in]` uint8.
        scale (`torch.Tensor`):
            `[out, groups]` in the dtype that the checkpoint is to have.
        zero (`torch.Tensor`):
            `[out, groups]`.
        rounding (`Rounding`):
            Of 4 or 8 bits.
    """
    tensors = {
        "weight_packed": pack(codes, rounding.bits, dim=1).contiguous(),
        "weight_scale": scale.contiguous(),
        "weight_shape": torch.tensor(codes.shape),
    }
    if not rounding.symmetric:
        tensors["weight_zero_point"] = pack(zero.to(torch.uint8), rounding.bits, dim=0).contiguous()
    return tensors


def float8_tensors(weight: torch.Tensor) -> Tensors:
    """Returns the tensors of one linear that is rounded to float8, with scales in its own dtype.

    Args:
        weight (`torch.Tensor`):
            `[out, in]`.
    """
    codes, scale = round_to_float8(weight, weight.dtype)
    return {"weight": codes, "weight_scale": scale.to(weight.dtype)}


def plain_config(kind: str, ignore: Sequence[str], *, activations: bool = False) -> dict[str, Any]:
    """Returns the `quantization_config` of a checkpoint of int8 or float8 numbers with a scale a row.

    Args:
        kind (`str`):
            `"int"` or `"float"`.
        ignore (`Sequence[str]`):
            Names of linears that stay dense.
        activations (`bool`, defaults to `False`):
            Whether activations are quantized too, token by token.
    """
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
    return _config(f"{kind}-quantized", weights, ignore, inputs if activations else None)


def _config(
    layout: str, weights: dict[str, Any], ignore: Sequence[str], inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }
