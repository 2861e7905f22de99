"""The other way round: from codes to the tensors and the configuration of an AWQ checkpoint in the GEMM layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .awq import BITS, pack_outputs
from .rounding import Rounding

Tensors = dict[str, torch.Tensor]


def awq_config(rounding: Rounding, dense: Sequence[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of a checkpoint.

    Args:
        rounding (`Rounding`):
            Of 4 bits.
        dense (`Sequence[str]`):
            Names of linears that stay dense. Readers look for them in other names, not only at their whole.
    """
    return {
        "quant_method": "awq",
        "bits": BITS,
        "group_size": rounding.group_size,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": list(dense) or None,
    }


def awq_tensors(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Tensors:
    """Returns the tensors of one linear.

    Args:
        codes (`torch.Tensor`):
            `[out, in]` uint8.
        scale (`torch.Tensor`):
            `[out, groups]`.
        zero (`torch.Tensor`):
            `[out, groups]`.
    """
    return {
        "qweight": pack_outputs(codes.T).contiguous(),
        "qzeros": pack_outputs(zero.to(torch.uint8).T).contiguous(),
        "scales": scale.T.to(torch.float16).contiguous(),
    }
