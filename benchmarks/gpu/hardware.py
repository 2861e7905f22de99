"""Launches on tensors of the CPU, done on the GPU: the tests' kernel cases run on hardware without a change.

Triton's interpreter copies tensors of a GPU to the CPU for a launch and back after it. This is the reverse:

    launch(cpu tensors)  ->  memory copied to the GPU  ->  the compiled kernel  ->  memory copied back

Whole storages are copied, once each, so that two views of one memory still share it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_TRAITS = "hf_paged.kernels.triton.attention.device_traits"


class Copies:
    """The storages of one launch on another device.

    Args:
        device (`str`):
            Where they go.
    """

    def __init__(self, device: str):
        self._device = device
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def moved(self, value: Any) -> Any:
        """Returns an argument with its memory on the other device; anything but a tensor of the CPU as it is.

        Args:
            value (`Any`):
                An argument of a launch.
        """
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._storages:
            there = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self._device).untyped_storage()
            there.copy_(storage)
            self._storages[storage.data_ptr()] = (storage, there)
        _, there = self._storages[storage.data_ptr()]
        empty = torch.empty(0, dtype=value.dtype, device=self._device)
        return empty.set_(there, value.storage_offset(), value.size(), value.stride())

    def take_back(self) -> None:
        """Copies the memory back."""
        for here, there in self._storages.values():
            here.copy_(there)


@contextlib.contextmanager
def launches_on(device: str) -> Iterator[None]:
    """Has every launch of a Triton kernel on tensors of the CPU done on a GPU, and backends accept such tensors.

    Args:
        device (`str`):
            The GPU.
    """
    from triton.runtime.jit import JITFunction

    from hf_paged.kernels.triton.backend import TritonBackend
    from hf_paged.kernels.triton.device import device_traits

    original = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        copies = Copies(device)
        moved = {name: copies.moved(value) for name, value in kwargs.items()}
        result = original(self, *map(copies.moved, args), **moved)
        copies.take_back()
        return result

    both = dataclasses.replace(TritonBackend.capabilities, device_types=frozenset({"cpu", "cuda"}))
    # Configurations are those of the GPU, and not of the one that stands for a CPU.
    traits = device_traits(torch.device(device, 0)) if device != "cpu" else device_traits(torch.device("cpu"))
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(TritonBackend, "capabilities", both),
        mock.patch(_TRAITS, return_value=traits),
    ):
        yield
