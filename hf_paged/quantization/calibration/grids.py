"""Scales and zero points that suit what a weight is multiplied with."""

from __future__ import annotations

import dataclasses

import torch

from ..rounding import Rounding
from .inputs import Hessian

DTYPE = torch.float16  # of scales, in GPTQ's and AWQ's layouts
SHRINKS = tuple(1 - step / 20 for step in range(11))  # of a group's reach: what lies outside is cut off


@dataclasses.dataclass(frozen=True)
class Codes:
    """A quantized weight.

    Args:
        codes (`torch.Tensor`):
            `[out_features, in_features]` uint8.
        scale (`torch.Tensor`):
            `[out_features, groups]` float32, exact in float16.
        zero (`torch.Tensor`):
            `[out_features, groups]` float32.
        rounding (`Rounding`):
            Of groups that are neighbours.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    rounding: Rounding

    def dequantize(self) -> torch.Tensor:
        """Returns the weight, `[out_features, in_features]` float32."""
        return dequantized(grouped(self.codes.float(), self.rounding), self.scale, self.zero)

    def rows(self, start: int, end: int) -> Codes:
        """Returns some rows.

        Args:
            start (`int`):
                The first.
            end (`int`):
                The one after the last.
        """
        return Codes(self.codes[start:end], self.scale[start:end], self.zero[start:end], self.rounding)


def grouped(weight: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Returns a weight as `[out_features, groups, numbers]`.

    Args:
        weight (`torch.Tensor`):
            `[out_features, in_features]`.
        rounding (`Rounding`):
            Says how many are in a group.
    """
    size = weight.shape[1] if rounding.group_size == -1 else rounding.group_size
    return weight.unflatten(1, (-1, size))


def dequantized(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Returns the weight that codes stand for, `[out_features, in_features]`.

    Args:
        codes (`torch.Tensor`):
            `[out_features, groups, numbers]` of floating point.
        scale (`torch.Tensor`):
            `[out_features, groups]`.
        zero (`torch.Tensor`):
            `[out_features, groups]`.
    """
    return ((codes - zero[..., None]) * scale[..., None]).flatten(1)


def best_grid(weight: torch.Tensor, hessian: Hessian, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and zero points of groups that reach as far as is best, by each group's part of the output.

    A row keeps those with which all of its groups reach to their ends if that is better for its whole output.

    Args:
        weight (`torch.Tensor`):
            `[out_features, in_features]` float32.
        hessian (`Hessian`):
            Of its inputs.
        rounding (`Rounding`):
            Onto what.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[out_features, groups]` each, float32; scales exact in float16.
    """
    groups = grouped(weight, rounding)
    count, size = groups.shape[1:]
    blocks = torch.stack([hessian.total[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])
    plain = best = rounding.grid(groups, DTYPE)
    least = None
    for shrink in SHRINKS:
        scale, zero = rounding.grid(groups * shrink, DTYPE)
        difference = (rounding.codes(groups, scale, zero) - zero[..., None]) * scale[..., None] - groups
        by_group = difference.transpose(0, 1)
        errors = ((by_group @ blocks) * by_group).sum(-1).T
        if least is None:
            least = errors
            continue
        better = errors < least
        least = torch.where(better, errors, least)
        best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
    plain_errors, best_errors = (_row_errors(weight, groups, hessian, rounding, grid) for grid in (plain, best))
    keep = (plain_errors <= best_errors)[:, None]
    return torch.where(keep, plain[0], best[0]), torch.where(keep, plain[1], best[1])


def _row_errors(
    weight: torch.Tensor,
    groups: torch.Tensor,
    hessian: Hessian,
    rounding: Rounding,
    grid: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    codes = rounding.codes(groups, *grid).float()
    return hessian.row_errors(dequantized(codes, *grid) - weight)
