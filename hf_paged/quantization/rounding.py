"""Weights to codes by rounding to the nearest, and codes to the tensors of a format."""

from __future__ import annotations

import dataclasses

import torch

FLOAT8_MAX = 448.0  # of e4m3
GROUP_SIZES = (128, 64, 32)  # the first that divides all rows, unless one is named


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Onto which numbers weights are rounded.

    Args:
        bits (`int`):
            2 to 8.
        group_size (`int`):
            Neighbouring inputs that share a scale; -1: all of a row.
        symmetric (`bool`):
            Whether zero stays in the middle of the codes, or each group has a zero point of its own.
        lowest_zero (`int`, defaults to 0):
            The least zero point; 1 where a layout stores them less one.
    """

    bits: int
    group_size: int
    symmetric: bool
    lowest_zero: int = 0

    @property
    def zero(self) -> int:
        """Returns the code of zero where rounding is symmetric."""
        return 1 << (self.bits - 1)

    def grid(self, groups: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scales and zero points with which the codes just reach the ends of groups.

        Args:
            groups (`torch.Tensor`):
                `[..., numbers]` float32.
            dtype (`torch.dtype`):
                In which scales are kept.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: `[...]` scales and zero points, float32; scales exact in that dtype.
        """
        highest = (1 << self.bits) - 1
        if self.symmetric:
            reach = groups.abs().amax(-1)
            scale = _kept(reach / (highest - self.zero if self.bits == 8 else highest / 2), dtype)
            return scale, torch.full_like(scale, self.zero)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = _kept((high - low) / highest, dtype)
        zero = (-low / scale).round()
        if self.lowest_zero:  # the codes above a zero that is raised reach less far
            reaching = _kept(high / (highest - self.lowest_zero), dtype)
            scale = torch.where(zero < self.lowest_zero, torch.maximum(scale, reaching), scale)
        return scale, zero.clamp(self.lowest_zero, highest)

    def codes(self, groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Returns the nearest codes.

        Args:
            groups (`torch.Tensor`):
                `[..., numbers]` float32.
            scale (`torch.Tensor`):
                `[...]`.
            zero (`torch.Tensor`):
                `[...]`.

        Returns:
            `torch.Tensor`: `[..., numbers]` uint8.
        """
        codes = (groups / scale[..., None]).round_() + zero[..., None]
        return codes.clamp_(0, (1 << self.bits) - 1).to(torch.uint8)


def _kept(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is left of scales in a dtype, none of them 0: a group of zeros has any."""
    kept = scale.to(dtype).float()
    return torch.where(kept > 0, kept, torch.ones_like(kept))


def round_to_nearest(
    weight: torch.Tensor, rounding: Rounding, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes a weight without looking at what it is multiplied with.

    Args:
        weight (`torch.Tensor`):
            `[out_features, in_features]`; the group size must divide `in_features`.
        rounding (`Rounding`):
            Onto what.
        dtype (`torch.dtype`):
            In which scales are kept.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: Codes `[out, in]` uint8, scales `[out, groups]` and zero
        points `[out, groups]` float32.
    """
    size = weight.shape[1] if rounding.group_size == -1 else rounding.group_size
    groups = weight.float().unflatten(1, (-1, size))
    scale, zero = rounding.grid(groups, dtype)
    return rounding.codes(groups, scale, zero).flatten(1), scale, zero


def round_to_float8(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes the rows of a weight to float8 e4m3.

    Args:
        weight (`torch.Tensor`):
            `[out_features, in_features]`.
        dtype (`torch.dtype`):
            In which scales are kept.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Codes `[out, in]` float8_e4m3fn and scales `[out, 1]` float32.
    """
    weight = weight.float()
    scale = _kept(weight.abs().amax(1, keepdim=True) / FLOAT8_MAX, dtype)
    return (weight / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn), scale
