"""What of a model can be computed natively: modules, how they are called, and how they are computed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..modeling.patterns.norm import Norm
from ..modeling.patterns.recipe import LayerRecipe
from .native_operators import Operators


@dataclasses.dataclass(frozen=True)
class Argument:
    """Where an argument stands in the calls of a module.

    Args:
        place (`int` or `str`):
            Its position, or its name.
    """

    place: int | str

    def of(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the argument of a call, or `None` if it is not there.

        Args:
            args (`tuple`):
                Positional arguments.
            kwargs (`dict[str, Any]`):
                Keyword arguments.
        """
        if isinstance(self.place, int):
            return args[self.place] if self.place < len(args) else None
        return kwargs.get(self.place)


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """A module that can be computed natively.

    Args:
        kind (`str`):
            `"layer"`, `"attention"`, `"mlp"`, `"norm"` or `"linear"`.
        module (`torch.nn.Module`):
            The module.
        returned (`Callable[[torch.Tensor], Any]`):
            Brings what is computed into the form in which it returns: a tensor, or a tuple of one and `None`.
        hidden (`Argument`):
            Where its input is.
        recipe (`LayerRecipe`, *optional*):
            How a layer or a part of one is computed.
        norm (`Norm`, *optional*):
            How a norm is.
        layer_idx (`int`, *optional*):
            The layer of the cache that it attends over.
        cache (`Argument`, *optional*):
            Where the cache is.
        angles (`Argument`, *optional*):
            Where cosines and sines are.
        follows (`bool`, defaults to `False`):
            Whether it was given what the unit before it returned, and the same angles.
    """

    kind: str
    module: torch.nn.Module
    returned: Callable[[torch.Tensor], Any]
    hidden: Argument
    recipe: LayerRecipe | None = None
    norm: Norm | None = None
    layer_idx: int | None = None
    cache: Argument | None = None
    angles: Argument | None = None
    follows: bool = False


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What was found in a model.

    Args:
        units (`tuple[Unit, ...]`):
            The modules that can be computed natively, none within another, in the order in which they are called.
        num_layers (`int`):
            How many decoder layers the model has.
        reasons (`dict[str, int]`):
            Why others were not recognised or not proved, and how many.
    """

    units: tuple[Unit, ...]
    num_layers: int
    reasons: dict[str, int]

    def describe(self) -> str:
        """Returns what was found, in a few words."""
        counts = collections.Counter(unit.kind for unit in self.units)
        num_whole, is_linear = counts.pop("layer", 0), counts.pop("linear", 0)
        num_calls = sum(1 for unit in self.units if unit.kind == "layer" and not unit.follows)
        parts = []
        if num_whole:
            parts.append(f"{num_whole} of {self.num_layers} layers in {num_calls} call{'s' * (num_calls > 1)}")
        parts += [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items()]
        if is_linear:
            parts.append(f"{is_linear} linear{'s' * (is_linear > 1)}")
        return ", ".join(parts) or "off"


def run_small(unit: Unit, operators: Operators, x: torch.Tensor) -> torch.Tensor:
    """Runs a norm or a linear.

    Args:
        unit (`Unit`):
            Which.
        operators (`Operators`):
            What it is run on.
        x (`torch.Tensor`):
            `[..., size]`.
    """
    parameters = unit.module._parameters
    weight, bias = parameters["weight"], parameters.get("bias")
    assert weight is not None, "a norm or linear has a weight"
    if unit.norm is not None:
        assert operators.norm is not None, "there are norms only if there is an operator for them"
        return operators.norm(x, unit.norm.kind, weight, bias, unit.norm.eps, unit.norm.offset)
    assert operators.linear is not None, "there are linears only if there is an operator for them"
    return operators.linear(x, weight, bias)
