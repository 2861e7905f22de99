"""Checkpoints in float8 with a scale for each block of 128 x 128 weights, as DeepSeek-V3's are, or one for all.

    weight            [out, in]                                      float8_e4m3fn
    weight_scale_inv  [out / block rows, in / block columns] | one   float32, and what weights are multiplied with

The inputs, which a GPU would round to float8 too, are kept as they are: that is never less exact. Source: the
checkpoints that Transformers' `FineGrainedFP8Config` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError, NotSupportedError
from .base import FORMATS, CheckpointFormat, LinearFormat
from .scaled import ScaledLinear

METHOD = "fp8"


@FORMATS.register(METHOD)
class FineGrainedFp8Format(CheckpointFormat):
    """Reads `weight_block_size`, `modules_to_not_convert` (or `ignored_layers`), `scale_fmt` and `expert_dtype`.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.
    """

    def __init__(self, config: Mapping[str, Any]):
        block = config.get("weight_block_size", (128, 128))
        if block is not None and (
            not isinstance(block, (list, tuple))
            or len(block) != 2
            or not all(isinstance(n, int) and n > 0 for n in block)
        ):
            raise CheckpointError(
                f"`weight_block_size` in the `quantization_config` of method {METHOD!r} must be two whole numbers from "
                f"1, or null, got {block!r}."
            )
        for name, built in (("scale_fmt", "float"), ("expert_dtype", "fp8")):
            if config.get(name, built) != built:
                raise NotSupportedError(
                    f"`{name}` {config[name]!r} in the `quantization_config` of method {METHOD!r} is not built; built "
                    f"is {built!r}."
                )
        self._dense = tuple(config.get("modules_to_not_convert") or config.get("ignored_layers") or ())
        blocks = None if block is None else (block[0], block[1])
        self._linear = ScaledLinear("FP8", (torch.float8_e4m3fn,), "weight_scale_inv", blocks)

    def linear_format(self, module: str) -> LinearFormat | None:
        parts = module.split(".")
        dense = any(name in parts or module == name or module.endswith(f".{name}") for name in self._dense)
        return None if dense or any(module.startswith(f"{name}.") for name in self._dense) else self._linear


def is_built_for(config: Mapping[str, Any]) -> bool:
    """Returns whether checkpoints are to be loaded here: GPUs have Transformers' own kernels, which round inputs too.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.
    """
    plain = config.get("scale_fmt", "float") == "float" and config.get("expert_dtype", "fp8") == "fp8"
    return plain and not config.get("dequantize") and not torch.cuda.is_available()
