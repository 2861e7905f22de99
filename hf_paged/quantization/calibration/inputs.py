"""What the linears of a layer are multiplied with: which of them share an input, and X^T X of each input."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass
class Hessian:
    """The sum of x x^T over all inputs x of a linear: up to a factor, how its error depends on those of its weights.

    Args:
        total (`torch.Tensor`):
            `[in_features, in_features]` float32.
        count (`int`, defaults to 0):
            Inputs that were added.
    """

    total: torch.Tensor
    count: int = 0

    @classmethod
    def of(cls, linear: nn.Linear) -> Hessian:
        """Returns one without inputs.

        Args:
            linear (`torch.nn.Linear`):
                Whose inputs are to come.
        """
        size = linear.in_features
        return cls(torch.zeros(size, size, dtype=torch.float32, device=linear.weight.device))

    def add(self, x: torch.Tensor) -> None:
        """Adds inputs.

        Args:
            x (`torch.Tensor`):
                `[..., in_features]`.
        """
        x = x.detach().reshape(-1, len(self.total)).float()
        self.total.addmm_(x.T, x)
        self.count += len(x)

    def scaled(self, factors: torch.Tensor) -> Hessian:
        """Returns that of inputs that are divided by factors.

        Args:
            factors (`torch.Tensor`):
                `[in_features]`.
        """
        return Hessian(self.total / factors[:, None] / factors[None, :], self.count)

    def row_errors(self, difference: torch.Tensor) -> torch.Tensor:
        """Returns the squared errors that errors of a weight make, summed over the inputs.

        Args:
            difference (`torch.Tensor`):
                `[out_features, in_features]`.

        Returns:
            `torch.Tensor`: `[out_features]`.
        """
        return ((difference @ self.total) * difference).sum(1)

    def magnitude(self) -> torch.Tensor:
        """Returns the root of the mean square of each input, `[in_features]`."""
        return (self.total.diagonal() / max(self.count, 1)).sqrt()


@dataclasses.dataclass(frozen=True)
class Tap:
    """Linears of a layer that are given the same input.

    Args:
        linears (`tuple[str, ...]`):
            Their names within the layer.
        norm (`str`, *optional*):
            The norm whose output the input is.
    """

    linears: tuple[str, ...]
    norm: str | None = None


def find_taps(layer: nn.Module, linears: Mapping[str, nn.Linear], run: Callable[[], Any]) -> list[Tap]:
    """Returns which linears share their input, and where it comes from. Those that were not called stand alone.

    Args:
        layer (`torch.nn.Module`):
            The layer.
        linears (`Mapping[str, torch.nn.Linear]`):
            Some of it, by their names.
        run (`Callable[[], Any]`):
            Calls the layer.
    """
    inputs: dict[str, torch.Tensor] = {}  # tensors are kept alive, so that no two have one address
    outputs: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as hooks:
        for name, linear in linears.items():
            hook = linear.register_forward_pre_hook(lambda module, args, name=name: inputs.update({name: args[0]}))
            hooks.callback(hook.remove)
        for name, module in layer.named_modules():
            if _is_norm(module):
                hook = module.register_forward_hook(lambda m, args, output, name=name: outputs.update({name: output}))
                hooks.callback(hook.remove)
        run()
    norms = {_place(tensor): name for name, tensor in outputs.items() if isinstance(tensor, torch.Tensor)}
    shared: dict[tuple[int, int], list[str]] = {}
    for name, tensor in inputs.items():
        shared.setdefault(_place(tensor), []).append(name)
    taps = [Tap(tuple(names), norms.get(place)) for place, names in shared.items()]
    return taps + [Tap((name,)) for name in linears if name not in inputs]


def _is_norm(module: nn.Module) -> bool:
    """Whether it has a gain for each number, and nothing else than such vectors."""
    parameters = dict(module.named_parameters())
    shapes = {parameter.shape for parameter in parameters.values()}
    return "weight" in parameters and len(shapes) == 1 and parameters["weight"].ndim == 1


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells tensors apart, and not a view from its base."""
    return tensor.data_ptr(), tensor.numel()


def collect(linears: Mapping[str, nn.Linear], taps: list[Tap], run: Callable[[], Any]) -> list[Hessian]:
    """Returns the Hessian of each input.

    Args:
        linears (`Mapping[str, torch.nn.Linear]`):
            Those of a layer, by their names.
        taps (`list[Tap]`):
            From `find_taps`.
        run (`Callable[[], Any]`):
            Calls the layer on all texts.
    """
    hessians = [Hessian.of(linears[tap.linears[0]]) for tap in taps]
    with contextlib.ExitStack() as hooks:
        for tap, hessian in zip(taps, hessians, strict=True):
            linear = linears[tap.linears[0]]
            hook = linear.register_forward_pre_hook(lambda module, args, hessian=hessian: hessian.add(args[0]))
            hooks.callback(hook.remove)
        run()
    return hessians
