"""AWQ: inputs that are large have their columns of weights made larger before they are rounded, and are made smaller.

    s = magnitude ** ratio              of the ratios the one whose rounded weights give the least output error
    output error                        trace(dW H dW^T),  dW = rounded(W s) / s - W,  H = X^T X

What makes the inputs is divided by s, so that the dense layer stays the same (`scalings.py`); then each group's reach
is cut off where that is better (`grids.py`). Source: Lin et al., "AWQ", arXiv 2306.00978.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..rounding import Rounding
from .grids import DTYPE, Codes, best_grid, dequantized, grouped
from .inputs import Hessian
from .scalings import Run, Scaling, is_unchanged, restored

logger = logging.getLogger(__name__)

RATIOS = tuple(step / 10 for step in range(11))
_BETWEEN = 0.05  # the best of them is tried that much lower and higher
_LEAST = 1e-2  # of the mean magnitude: an input that is nearly always 0 must not take the whole range of factors


def scale_layer(
    layer: nn.Module,
    scalings: Sequence[Scaling],
    hessians: Sequence[Hessian],
    rounding: Rounding,
    dtypes: Mapping[str, torch.dtype],
    run: Run,
    states: torch.Tensor,
) -> tuple[list[Hessian], bool]:
    """Scales a layer in place, so that rounding it makes the least errors. It gives the same as before.

    Args:
        layer (`torch.nn.Module`):
            The layer, in float32.
        scalings (`Sequence[Scaling]`):
            What can be scaled in it.
        hessians (`Sequence[Hessian]`):
            Of the inputs of its taps.
        rounding (`Rounding`):
            Onto what weights will be rounded.
        dtypes (`Mapping[str, torch.dtype]`):
            In which its tensors are kept, by their names.
        run (`Callable[[], torch.Tensor]`):
            Calls the layer.
        states (`torch.Tensor`):
            What it is given then.

    Returns:
        `tuple[list[Hessian], bool]`: Those of the inputs from now on, and whether it was scaled: it is left as it was
        if it did not give the same any more.
    """
    expected, scaled = run(), list(hessians)
    touched = [name for scaling in scalings for name in (scaling.producer.module, *scaling.linears)]
    with restored(layer, touched) as keep:
        for scaling in scalings:
            weights = [layer.get_submodule(name).weight.data for name in scaling.linears]
            factors = best_factors(torch.cat(weights), scaling, hessians[scaling.tap], rounding)  # type: ignore[arg-type]
            dtype = dtypes[f"{scaling.producer.module}.weight"]
            scaled[scaling.tap] = hessians[scaling.tap].scaled(scaling.apply(layer, factors, dtype))
        if is_unchanged(run(), expected, states):
            keep()
            return scaled, True
    logger.warning("A layer did not stay the same when its inputs were scaled: they are left as they were.")
    return list(hessians), False


def best_factors(weight: torch.Tensor, scaling: Scaling, hessian: Hessian, rounding: Rounding) -> torch.Tensor:
    """Returns the factors with which rounding makes the least errors.

    Args:
        weight (`torch.Tensor`):
            `[out_features, in_features]`: of all linears that share the input.
        scaling (`Scaling`):
            Which inputs share a factor.
        hessian (`Hessian`):
            Of the input.
        rounding (`Rounding`):
            Onto what.

    Returns:
        `torch.Tensor`: `[width]`.
    """
    magnitude = scaling.gather(hessian.magnitude().square()).sqrt()
    magnitude = magnitude.clamp(min=float(magnitude.mean()) * _LEAST)
    best, least, best_ratio = torch.ones_like(magnitude), float("inf"), 0.0

    def attempt(ratio: float) -> None:
        nonlocal best, least, best_ratio
        factors = magnitude**ratio
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = float(_rounding_errors(weight, scaling.spread(factors), hessian, rounding).sum())
        if error < least:
            best, least, best_ratio = factors, error, ratio

    if float(magnitude.max()) > 0:
        for ratio in RATIOS:
            attempt(ratio)
        for ratio in (best_ratio - _BETWEEN, best_ratio + _BETWEEN):
            attempt(max(ratio, 0.0))
    return best


def awq(weight: torch.Tensor, hessian: Hessian, rounding: Rounding) -> Codes:
    """Quantizes a weight that is scaled already.

    Args:
        weight (`torch.Tensor`):
            `[out_features, in_features]` float32.
        hessian (`Hessian`):
            Of its inputs.
        rounding (`Rounding`):
            Onto what.
    """
    scale, zero = best_grid(weight, hessian, rounding)
    return Codes(rounding.codes(grouped(weight, rounding), scale, zero).flatten(1), scale, zero, rounding)


def _rounding_errors(weight: torch.Tensor, factors: torch.Tensor, hessian: Hessian, rounding: Rounding) -> torch.Tensor:
    """The output error of each row."""
    groups = grouped(weight * factors, rounding)
    scale, zero = rounding.grid(groups, DTYPE)
    rounded = dequantized(rounding.codes(groups, scale, zero).float(), scale, zero)
    return hessian.row_errors(rounded / factors - weight)
