"""What a checkpoint is to be quantized to: the method, the numbers, and the layout that goes with them.

rtn     rounded to the nearest          compressed-tensors, packed      4 or 8 bits
fp8     rounded to float8 e4m3          compressed-tensors, float       8 bits, a scale a row
gptq    columns put each other right    GPTQ, version 1                 2, 3, 4 or 8 bits
awq     inputs scaled                   AWQ, GEMM layout                4 bits
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ConfigurationError, NotSupportedError
from .awq import PER_WORD
from .awq_writing import awq_config, awq_tensors
from .base import FORMATS, CheckpointFormat
from .calibration.gptq import DAMPING
from .calibration.grids import Codes
from .compressed_writing import Tensors, float8_tensors, packed_config, packed_tensors, plain_config
from .gptq_writing import gptq_config, gptq_tensors
from .rounding import GROUP_SIZES, Rounding, round_to_nearest

BITS = {"rtn": (4, 8), "fp8": (8,), "gptq": (2, 3, 4, 8), "awq": (4,)}
METHODS = tuple(BITS)
CALIBRATED = ("gptq", "awq")
WHOLE_ROW = -1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How weights are quantized.

    Args:
        method (`str`):
            One of `METHODS`.
        bits (`int`, defaults to 4):
            Of a number.
        group_size (`int`, *optional*):
            Neighbouring inputs that share a scale; -1 for a whole row. None: the first of 128, 64 and 32 that divides
            all rows (8 bits of `rtn`: whole rows).
        symmetric (`bool`, *optional*):
            Whether zero is in the middle of the codes: less exact, and what some kernels and loaders of others want.
            None: for `rtn` and `fp8` only (Transformers' loader of packed weights knows no zero points).

    Raises:
        ConfigurationError: If the method has no such bits, or the group size makes no sense.
    """

    method: str
    bits: int = 4
    group_size: int | None = None
    symmetric: bool | None = None

    def __post_init__(self):
        if self.method not in BITS:
            raise ConfigurationError(f"`method` must be one of {', '.join(METHODS)}, got {self.method!r}.")
        if self.bits not in BITS[self.method]:
            raise ConfigurationError(
                f"`bits` {self.bits} is not built for `{self.method}`, which has {' or '.join(map(str, self._bits))}."
            )
        size = self.group_size
        if size is not None and size != WHOLE_ROW and (size < 8 or size % 8):
            raise ConfigurationError(f"`group_size` must be a multiple of 8, or -1 for whole rows, got {size}.")
        if self.method == "fp8" and size not in (None, WHOLE_ROW):
            raise ConfigurationError(f"`group_size` {size}: float8 weights have one scale a row; leave it out.")
        if self.method == "fp8" and self.symmetric is False:
            raise ConfigurationError("`symmetric` False: float8 weights have no zero points; leave it out.")

    @property
    def _bits(self) -> tuple[int, ...]:
        return BITS[self.method]

    @property
    def is_symmetric(self) -> bool:
        """Returns whether zero is in the middle of the codes."""
        return self.method in ("rtn", "fp8") if self.symmetric is None else self.symmetric

    @property
    def is_calibrated(self) -> bool:
        """Returns whether it needs text."""
        return self.method in CALIBRATED

    def for_rows(self, widths: Sequence[int]) -> Recipe:
        """Returns the recipe with a group size that divides rows of all lengths.

        Args:
            widths (`Sequence[int]`):
                Their lengths.

        Raises:
            ConfigurationError: If the group size that was asked for does not divide one.
        """
        fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
        if self.method == "fp8" or (self.method == "rtn" and self.bits == 8 and self.group_size is None):
            return dataclasses.replace(self, group_size=WHOLE_ROW)
        if self.group_size is None:
            return dataclasses.replace(self, group_size=[*fitting, WHOLE_ROW][0])
        wrong = sorted({width for width in widths if self.group_size > 0 and width % self.group_size})
        if wrong:
            raise ConfigurationError(
                f"`group_size` {self.group_size} does not divide the {wrong[0]} inputs of a linear of this model; "
                f"what divides all of them is {', '.join(map(str, [*fitting, WHOLE_ROW]))} (-1 is a whole row)."
            )
        return self

    @property
    def rounding(self) -> Rounding:
        """Returns onto which numbers weights are rounded; the group size must be known."""
        assert self.group_size is not None, "chosen by `for_rows`"
        return Rounding(self.bits, self.group_size, self.is_symmetric, lowest_zero=int(self.method == "gptq"))

    def can_pack(self, out_features: int, in_features: int) -> bool:
        """Returns whether the layout has a place for a linear.

        Args:
            out_features (`int`):
                Its outputs.
            in_features (`int`):
                Its inputs.
        """
        if self.method == "gptq":
            return in_features * self.bits % 32 == 0 and out_features * self.bits % 32 == 0
        return self.method != "awq" or out_features % PER_WORD == 0

    def config(self, dense: Sequence[str], quantized: Sequence[str]) -> dict[str, Any]:
        """Returns the `quantization_config` of the checkpoint.

        Args:
            dense (`Sequence[str]`):
                Names of the linears that stay dense.
            quantized (`Sequence[str]`):
                Names of those that do not.

        Raises:
            NotSupportedError: If the layout cannot say which are which.
        """
        if self.method == "fp8":
            return plain_config("float", dense)
        if self.method == "rtn":
            return packed_config(self.rounding, dense)
        if self.method == "gptq":
            return gptq_config(self.rounding, dense, DAMPING)
        for name in dense:
            if any(name in other for other in quantized):
                raise NotSupportedError(
                    f"`{name}` stays dense, and AWQ's layout cannot say so, since other names contain it; use `gptq`."
                )
        return awq_config(self.rounding, dense)

    def format(self, config: dict[str, Any]) -> CheckpointFormat:
        """Returns what reads the checkpoint.

        Args:
            config (`dict[str, Any]`):
                Its `quantization_config`.
        """
        return FORMATS.get(config["quant_method"])(config)

    def round(self, weight: torch.Tensor) -> Tensors:
        """Returns the tensors of a weight that is rounded to the nearest.

        Args:
            weight (`torch.Tensor`):
                `[out_features, in_features]`.
        """
        if self.method == "fp8":
            return float8_tensors(weight)
        codes, scale, zero = round_to_nearest(weight, self.rounding, weight.dtype)
        return packed_tensors(codes, scale.to(weight.dtype), zero, self.rounding)

    def tensors(self, codes: Codes) -> Tensors:
        """Returns the tensors of a weight that was quantized with calibration.

        Args:
            codes (`Codes`):
                The quantized weight.
        """
        if self.method == "awq":
            return awq_tensors(codes.codes, codes.scale, codes.zero)
        return gptq_tensors(codes.codes, codes.scale, codes.zero, self.rounding)
