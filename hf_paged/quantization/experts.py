"""Quantized experts of mixtures: each projection of each expert is a `QuantizedLinear`, as checkpoints store them.

    Transformers    experts.gate_up_proj [experts, 2 * intermediate, hidden],   experts.down_proj [experts, hidden, ...]
    files, here     experts.0.gate_proj.qweight, experts.0.up_proj.qweight, experts.0.down_proj.qweight, ...

The loop over experts stays the one that the model's own class has: what it finds in the place of its two large tensors
gives it one expert's weight, and `torch.nn.functional.linear` with that is a product with packed rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import NotSupportedError
from .base import TensorInfo
from .linear import QuantizedLinear

# What the projections are called: gate, up, down.
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_STACKS = ("gate_up_proj", "down_proj")

MakeLinear = Callable[[str, int, int], QuantizedLinear]


class ExpertWeight:
    """The weight of one expert, where a model's code multiplies with a tensor.

    Args:
        linears (`Sequence[QuantizedLinear]`):
            Those of which it consists, one below the other.
    """

    def __init__(self, linears: Sequence[QuantizedLinear]):
        self._linears = linears

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Multiplies, or computes with the dequantized weight whatever else is asked for.

        Args:
            function (`Any`):
                Torch's function.
            types (`Sequence[type]`):
                Of arguments that have such a method.
            args (`tuple`):
                Its arguments.
            kwargs (`dict[str, Any]`, *optional*):
                The same.
        """
        if function is nn.functional.linear and len(args) == 2 and not kwargs and isinstance(args[1], cls):
            x, weight = args
            return torch.cat([linear(x) for linear in weight._linears], dim=-1)
        dense = [arg.dequantize() if isinstance(arg, cls) else arg for arg in args]
        named = {name: arg.dequantize() if isinstance(arg, cls) else arg for name, arg in (kwargs or {}).items()}
        return function(*dense, **named)

    def dequantize(self) -> torch.Tensor:
        """Returns the weight, `[out_features, in_features]` float32."""
        return torch.cat([linear.dequantize() for linear in self._linears])


class _Stack:
    """Stands for a tensor of all experts' weights."""

    def __init__(self, experts: nn.Module, names: Sequence[str]):
        self._experts = experts
        self._names = names

    def __getitem__(self, index: Any) -> ExpertWeight:
        expert = self._experts._modules[str(int(index))]
        assert expert is not None, "there is a module for each expert"
        return ExpertWeight([expert.get_submodule(name) for name in self._names])  # type: ignore[misc]


class QuantizedExperts:
    """What experts are besides their own class, once `replace_experts` has been there."""

    _projections: tuple[str, str, str]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs the loop over experts of the model's own class.

        Args:
            args (`Any`):
                What the model gives to experts.
            kwargs (`Any`):
                The same.

        Returns:
            `torch.Tensor`: What the class returns.
        """
        own = type(self).__mro__[2]
        return own.forward.__wrapped__(self, *args, **kwargs)  # type: ignore[attr-defined]

    @property
    def gate_up_proj(self) -> _Stack:
        """Returns what stands for the gates and ups of all experts."""
        return _Stack(self, self._projections[:2])  # type: ignore[arg-type]

    @property
    def down_proj(self) -> _Stack:
        """Returns what stands for the downs of all experts."""
        return _Stack(self, self._projections[2:])  # type: ignore[arg-type]


def replace_experts(model: nn.Module, headers: Mapping[str, TensorInfo], make_linear: MakeLinear) -> list[str]:
    """Puts `QuantizedLinear`s in the place of the stacked weights of experts that a checkpoint stores one by one.

    Args:
        model (`torch.nn.Module`):
            Built from its configuration, without weights.
        headers (`Mapping[str, TensorInfo]`):
            What its files hold, under the names of the model.
        make_linear (`Callable[[str, int, int], QuantizedLinear]`):
            Makes the linear of a name, of so many rows and columns.

    Returns:
        `list[str]`: The names of the experts' modules.

    Raises:
        NotSupportedError: If experts compute otherwise than by rows of a gate and of an up projection.
    """
    replaced = []
    for name, module in list(model.named_modules()):
        stacks = [module._parameters.get(stack) for stack in _STACKS]
        names = None if None in stacks else _names_of(name, headers)
        if names is None:
            continue
        if not getattr(module, "is_concatenated", False) or module.is_transposed or module.has_bias:
            raise NotSupportedError(
                f"`{name}` ({type(module).__name__}) holds its experts' weights in an order of its own, of which no "
                "quantized checkpoint can be loaded yet."
            )
        gate_up, down = stacks
        assert gate_up is not None and down is not None, "looked at above"
        num_experts, hidden, intermediate = down.shape
        for stack in _STACKS:
            del module._parameters[stack]
        for expert in range(num_experts):
            holder = nn.Module()
            for place, projection in enumerate(names):
                rows, columns = (hidden, intermediate) if place == 2 else (intermediate, hidden)
                holder.add_module(projection, make_linear(f"{name}.{expert}.{projection}", rows, columns))
            module.add_module(str(expert), holder)
        kind = type(module)
        module._projections = names
        module._is_hf_initialized = True  # its class would draw its two tensors
        module.__class__ = type(f"Quantized{kind.__name__}", (QuantizedExperts, kind), {})
        replaced.append(name)
    return replaced


def _names_of(name: str, headers: Mapping[str, TensorInfo]) -> tuple[str, str, str] | None:
    """What the files call the projections, if they hold packed ones of the first expert."""
    tensors = re.compile(
        rf"(?:^|\.){re.escape(name)}\.0\.(\w+)\.(?:qweight|weight_packed|weight_scale|weight_scale_inv)$"
    )
    found = {match[1] for match in map(tensors.search, headers) if match}
    return next((names for names in _NAMES if found and found <= set(names)), None)
