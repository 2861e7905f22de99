"""The norm: one weight, perhaps a bias, and what it computes found out on numbers of our own."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import torch

from .plain import is_plain_tensor
from .recipe import NormKind, TensorSource
from .reference import normalized

_EXACT = 1e-4  # of a copy in float32, so that an offset, a mean or an epsilon cannot hide in rounding
_LARGEST_EPS = 0.1
_USUAL_EPS = [1e-5, 1e-6]


@dataclasses.dataclass(frozen=True)
class Norm:
    """What a norm computes.

    Args:
        module (`torch.nn.Module`):
            The module.
        kind (`NormKind`):
            Which norm.
        eps (`float`):
            Its epsilon.
        offset (`float`):
            What is added to its weight.
    """

    module: torch.nn.Module
    kind: NormKind
    eps: float
    offset: float

    @property
    def is_bare(self) -> bool:
        """Returns whether it has no weight."""
        return not self.module._parameters

    def sources(self, name: str) -> dict[str, TensorSource]:
        """Returns where its tensors are.

        Args:
            name (`str`):
                Its role, such as `"norm1"`.
        """
        parameters = self.module._parameters
        return {f"{name}_{part}": TensorSource(parameters, part) for part in parameters if parameters[part] is not None}


def could_be_norm(module: torch.nn.Module) -> bool:
    """Returns whether a module contains what a norm does: a weight, perhaps a bias of its size, nothing else.

    Args:
        module (`torch.nn.Module`):
            Any module.
    """
    parameters = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    if "weight" not in parameters or not parameters.keys() <= {"weight", "bias"} or module._modules or module._buffers:
        return False
    sizes = {tensor.shape for tensor in parameters.values()}
    return len(sizes) == 1 and all(tensor.ndim == 1 and is_plain_tensor(tensor) for tensor in parameters.values())


def _is_bare(module: torch.nn.Module) -> bool:
    return not any((module._parameters, module._buffers, module._modules))


def find_norm(module: torch.nn.Module, size: int) -> Norm | None:
    """Finds out what a norm computes, or returns `None` if it is none that is known.

    Args:
        module (`torch.nn.Module`):
            Any module; a norm has a weight, or no parameters at all.
        size (`int`):
            How many numbers it was seen to be given in a row.
    """
    if not could_be_norm(module) and not _is_bare(module):
        return None
    own = module._parameters.get("weight")
    if own is not None and len(own) != size:
        return None
    x = _numbers(size)
    try:
        probe = copy.deepcopy(module).to("cpu", torch.float32)
        weight, bias = _refilled(probe)
        expected = probe(x)
    except Exception:
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape:
        return None
    for kind, offset, eps in itertools.product((NormKind.RMS, NormKind.LAYER), (0.0, 1.0), _candidates(module)):
        result = normalized(x, kind, weight, bias, eps, offset)
        errors = (result - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
        if bool((errors <= _EXACT).all()):
            return Norm(module, kind, eps, offset)
    return None


def _numbers(size: int) -> torch.Tensor:
    """Rows of several sizes, some so small that the epsilon matters, none of mean zero; no random state is touched."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(5, size, generator=generator, dtype=torch.float32, device="cpu") + 0.5
    return x * torch.tensor([1.0, 30.0, 1e-1, 1e-2, 1e-3], dtype=torch.float32, device="cpu")[:, None]


def _refilled(probe: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gives a norm other weights, since some tell nothing (all norms are one where weights are 0); returns them."""
    for parameter in probe._parameters.values():
        if parameter is not None:
            parameter.data = torch.linspace(-1.5, 2.0, len(parameter), dtype=torch.float32, device="cpu")
    weight, bias = (probe._parameters.get(name) for name in ("weight", "bias"))
    return None if weight is None else weight.detach(), None if bias is None else bias.detach()


def _candidates(module: Any) -> list[float]:
    own = [v for v in vars(module).values() if type(v) is float and 0 < v < _LARGEST_EPS]
    return list(dict.fromkeys(own + _USUAL_EPS))
