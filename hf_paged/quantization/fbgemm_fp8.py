"""Checkpoints in float8 with a scale for each row, as fbgemm's are.

    weight         [out, in]    float8_e4m3fn
    weight_scale   [out, 1]     float32

Source: the checkpoints that Transformers' `FbgemmFp8Config` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .base import FORMATS, CheckpointFormat, LinearFormat
from .scaled import ScaledLinear


@FORMATS.register("fbgemm_fp8")
class FbgemmFp8Format(CheckpointFormat):
    """Reads `modules_to_not_convert`.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.
    """

    def __init__(self, config: Mapping[str, Any]):
        self._dense = tuple(config.get("modules_to_not_convert") or ())
        self._linear = ScaledLinear("fbgemm FP8", (torch.float8_e4m3fn,))

    def linear_format(self, module: str) -> LinearFormat | None:
        dense = any(
            module == name or module.endswith(f".{name}") or module.startswith(f"{name}.") for name in self._dense
        )
        return None if dense else self._linear
