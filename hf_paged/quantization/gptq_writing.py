"""The other way round: from codes to the tensors and the configuration of a GPTQ checkpoint, version 1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from .base import groups_in_order
from .packing import pack
from .rounding import Rounding

Tensors = dict[str, torch.Tensor]


def gptq_config(rounding: Rounding, dense: Sequence[str], damping: float) -> dict[str, Any]:
    """Returns the `quantization_config` of a checkpoint whose groups are neighbours.

    Args:
        rounding (`Rounding`):
            Of 2, 3, 4 or 8 bits.
        dense (`Sequence[str]`):
            Names of linears that stay dense.
        damping (`float`):
            That it was made with, as a share.
    """
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": rounding.bits,
        "group_size": rounding.group_size,
        "sym": rounding.symmetric,
        "desc_act": False,
        "static_groups": True,
        "true_sequential": False,
        "damp_percent": damping,
        "checkpoint_format": "gptq",
        "lm_head": False,
    }
    if dense:
        config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in dense}
    return config


def gptq_tensors(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, rounding: Rounding) -> Tensors:
    """Returns the tensors of one linear.

    Args:
        codes (`torch.Tensor`):
            `[out, in]` uint8.
        scale (`torch.Tensor`):
            `[out, groups]`.
        zero (`torch.Tensor`):
            `[out, groups]`, at least 1: they are stored less one, and not every reader takes that modulo the codes.
        rounding (`Rounding`):
            How they were made.
    """
    less_one = zero.to(torch.uint8) - 1
    groups = groups_in_order(codes.shape[1], rounding.group_size, codes.device)
    return {
        "qweight": pack(codes.T, rounding.bits, dim=0).contiguous(),
        "qzeros": pack(less_one.T, rounding.bits, dim=1).contiguous(),
        "scales": scale.T.to(torch.float16).contiguous(),
        "g_idx": groups.to(torch.int32),
    }
