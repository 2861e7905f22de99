"""GPTQ: columns are rounded one after the other, and what rounding one did wrong is put right by those to come.

    H = X^T X + damping        U: upper, U^T U = H^-1 (Cholesky)
    for each column i:         error = (w_i - rounded(w_i)) / U_ii
                               columns j > i:  w_j -= error * U_ij

Columns come in the order of how much their inputs matter; the grid of a group is found before, so that groups stay
neighbours in the checkpoint ("static groups"). Source: Frantar et al., "GPTQ", arXiv 2210.17323. `optimum`'s
GPTQQuantizer is not used: it needs gptqmodel, which is built from source, and for a newer torch than ours (7.7 wants
2.14.1).
"""

from __future__ import annotations

import torch

from ..base import groups_in_order
from ..rounding import Rounding
from .grids import Codes, best_grid
from .inputs import Hessian

BLOCK = 128
DAMPING = 0.01  # of the mean of the diagonal
_MOST_DAMPING = 10.0


def gptq(weight: torch.Tensor, hessian: Hessian, rounding: Rounding, damping: float = DAMPING) -> Codes:
    """Quantizes a weight.

    Args:
        weight (`torch.Tensor`):
            `[out_features, in_features]` float32.
        hessian (`Hessian`):
            Of its inputs. An input that was always 0 says nothing: its weights are rounded to the nearest.
        rounding (`Rounding`):
            Onto what.
        damping (`float`, defaults to 0.01):
            The share of the Hessian's mean diagonal that is added to it; more where it has no inverse otherwise.
    """
    scale, zero = best_grid(weight, hessian, rounding)
    total = hessian.total.clone()
    diagonal = total.diagonal()
    diagonal[diagonal == 0] = 1
    order = diagonal.argsort(descending=True)
    factor = _inverse_factor(total[order][:, order], damping)
    group = groups_in_order(weight.shape[1], rounding.group_size, weight.device)[order]
    highest = (1 << rounding.bits) - 1
    # Columns are rows here, whose numbers are neighbours.
    columns, scales, zeros = weight.T[order].contiguous(), scale.T[group], zero.T[group]
    codes = torch.empty_like(columns)
    for start in range(0, len(columns), BLOCK):
        end = min(start + BLOCK, len(columns))
        block, within = columns[start:end], factor[start:end, start:end]
        errors = torch.empty_like(block)
        for i in range(end - start):
            place = start + i
            code = (block[i] / scales[place]).round_().add_(zeros[place]).clamp_(0, highest)
            codes[place] = code
            errors[i] = (block[i] - (code - zeros[place]) * scales[place]) / within[i, i]
            block[i + 1 :].addr_(within[i, i + 1 :], errors[i], alpha=-1)
        columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    back = order.argsort()
    return Codes(codes[back].T.contiguous().to(torch.uint8), scale, zero, rounding)


def _inverse_factor(total: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper triangular U with U^T U = (H + damping)^-1."""
    mean = total.diagonal().mean()
    while True:
        damped = total.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(torch.isfinite(factor).all()):
                return factor
        assert damping < _MOST_DAMPING, "a matrix whose diagonal outweighs the rest has an inverse"
        damping *= 10
