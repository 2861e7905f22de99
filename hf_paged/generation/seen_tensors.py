"""Notices that tensors are others than before, or that somebody has written to them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_version = operator.attrgetter("_version")
_optimizer_steps: dict[int, int] = {}  # by the address of a parameter


def _count_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Fused optimizers, such as the default one of Transformers' Trainer, write without counting versions up."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            address = _address(parameter)
            _optimizer_steps[address] = _optimizer_steps.get(address, 0) + 1


@functools.cache
def watch_optimizers() -> None:
    """Counts the steps of all optimizers of this process from now on."""
    register_optimizer_step_post_hook(_count_step)


class SeenTensors:
    """What some weights were at one moment. Keeps neither them nor their memory.

    Args:
        tensors (`Sequence[torch.Tensor]`):
            The weights.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()):
        self._signs = _signs(tensors)
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if _has_storage(tensor)]
        self._handles = [storage.cdata for storage in self._storages]

    def are_still(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether weights are these, and nobody has written to them.

        Objects and addresses come back when memory is used again, so the storages have to be there still.

        Args:
            tensors (`Sequence[torch.Tensor]`):
                The weights of now.
        """
        return self._signs == _signs(tensors) and not any(map(torch.UntypedStorage._expired, self._handles))


def _signs(tensors: Sequence[torch.Tensor]) -> list[list]:
    """The objects, addresses and versions of weights, and how often optimizers wrote to them."""
    try:
        objects, addresses, versions = (list(map(sign, tensors)) for sign in (id, torch.Tensor.data_ptr, _version))
    except RuntimeError:  # some quantized weights have no address, inference tensors no version
        objects, addresses, versions = (list(map(sign, tensors)) for sign in (id, _address, _version_of))
    return [objects, addresses, versions, list(map(_optimizer_steps.get, addresses)) if _optimizer_steps else []]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage() is not None
    except (NotImplementedError, RuntimeError):
        return False
