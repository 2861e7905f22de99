"""Which modules may be read instead of called: nobody hooks into them, and their weights are ordinary tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from ..native_step import has_own_forward
from ..packed_linear import PackedLinear

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
DEVICE_TYPES = frozenset({"cpu", "cuda"})  # that operators exist for
_CAPTURING = "transformers.utils.output_capturing"  # hooks that return hidden states to a call that asks for them
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NotRecognizedError(Exception):
    """A module is not what a pattern describes; says why. Never leaves the package."""


class NotProvedError(NotRecognizedError):
    """What was recognised computes something else.

    Args:
        error (`float`):
            The relative error.
        allowed (`float`):
            What it may be.
    """

    def __init__(self, error: float, allowed: float):
        super().__init__(f"computed natively it is off by more than {allowed:.2g}")
        self.error = error


def obstacle(module: torch.nn.Module) -> str | None:
    """Returns what somebody has put into a module's forward, or `None`.

    Args:
        module (`torch.nn.Module`):
            Any module.
    """
    if has_own_forward(module):
        return "a forward of its own"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "a compiled forward"
    for name in _HOOKS:
        hooks = module.__dict__.get(name)
        if hooks and any(getattr(hook, "__module__", None) != _CAPTURING for hook in list(hooks.values())):
            return "hooks"
    return None


def any_global_hook() -> bool:
    """Returns whether there are hooks on all modules of this process."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def check_plain(modules: Iterable[torch.nn.Module]) -> None:
    """Checks that modules may be read instead of called.

    Args:
        modules (`Iterable[torch.nn.Module]`):
            The modules.

    Raises:
        NotRecognizedError: If somebody has hooked into one of them.
    """
    for module in modules:
        found = obstacle(module)
        if found is not None:
            raise NotRecognizedError(f"{type(module).__name__} has {found}")


def is_plain_tensor(tensor: Any) -> bool:
    """Returns whether something is an ordinary tensor of a dtype, device and layout that native operators read.

    Args:
        tensor (`Any`):
            What lies where a weight is expected.
    """
    return (
        type(tensor) in (torch.nn.Parameter, torch.Tensor)
        and tensor.dtype in DTYPES
        and tensor.device.type in DEVICE_TYPES
        and tensor.layout == torch.strided
        and tensor.ndim > 0
        and tensor.stride(-1) == 1
    )


def check_one_device(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Checks that tensors are where the one is that they are computed with.

    Args:
        tensors (`Iterable[torch.Tensor]`):
            The weights of a module.
        device (`torch.device`):
            Of its input.

    Raises:
        NotRecognizedError: If one is elsewhere.
    """
    others = {str(tensor.device) for tensor in tensors} - {str(device)}
    if others:
        raise NotRecognizedError(f"its input is on {device}, but weights are on {', '.join(sorted(others))}")


def is_plain_linear(module: torch.nn.Module) -> bool:
    """Returns whether a module is a linear layer, not one of a subclass, with weights that native operators read.

    Args:
        module (`torch.nn.Module`):
            Any module.
    """
    if isinstance(module, PackedLinear):
        is_read = module.is_packed and module.order is None and module.weight.device.type == "cpu"
    else:
        is_read = type(module) is torch.nn.Linear and is_plain_tensor(module.weight)
    return is_read and (module.bias is None or is_plain_tensor(module.bias))
