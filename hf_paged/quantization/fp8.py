"""Checkpoints in float8: fine-grained ones with blocks (DeepSeek's), and those of fbgemm with a scale for each row.

    fp8          weight  [out, in] float8_e4m3fn     weight_scale_inv  [out / 128, in / 128] float32, or one number
    fbgemm_fp8   weight  [out, in] float8_e4m3fn     weight_scale      [out, 1] float32

Despite its name, `weight_scale_inv` is what weights are multiplied with. Source: DeepSeek-AI, "DeepSeek-V3",
arXiv 2412.19437, and the checkpoints that Transformers' `FineGrainedFP8Config` and `FbgemmFp8Config` describe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from .base import FORMATS, CheckpointFormat, LinearFormat
from .scaled import ScaledLinear

_DTYPES = (torch.float8_e4m3fn,)


class _Float8Format(CheckpointFormat):
    """All linears in one way, but for those that `modules_to_not_convert` names."""

    def __init__(self, config: Mapping[str, Any], linear: ScaledLinear):
        self._dense = tuple(config.get("modules_to_not_convert") or config.get("ignored_layers") or ())
        self._linear = linear

    def linear_format(self, module: str) -> LinearFormat | None:
        dense = any(
            module == name or module.endswith(f".{name}") or module.startswith(f"{name}.") for name in self._dense
        )
        return None if dense else self._linear


@FORMATS.register("fp8")
class Fp8Format(_Float8Format):
    """Reads `weight_block_size` and `modules_to_not_convert`.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.
    """

    def __init__(self, config: Mapping[str, Any]):
        block = config.get("weight_block_size", (128, 128))
        if block is not None and (
            not isinstance(block, (list, tuple))
            or len(block) != 2
            or any(type(size) is not int or size < 1 for size in block)
        ):
            raise CheckpointError(
                f"`weight_block_size` in the `quantization_config` of method 'fp8' must be two whole numbers such as "
                f"[128, 128], or null, got {block!r}."
            )
        size = None if block is None else (block[0], block[1])
        super().__init__(config, ScaledLinear("FP8", _DTYPES, "weight_scale_inv", size))


@FORMATS.register("fbgemm_fp8")
class FbgemmFp8Format(_Float8Format):
    """Reads `modules_to_not_convert`.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config, ScaledLinear("fbgemm FP8", _DTYPES))
