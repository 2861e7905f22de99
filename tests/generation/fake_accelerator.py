"""An accelerator's memory without one: what torch's CPU allocator is asked for counts as if it lay on the device.

    total   | other programs | storages that live | kept by torch for later | free |
                             |<- memory_allocated ->|
                             |<------------- memory_reserved ------------->|

Tests put it in the place of `torch.cuda` (`memory.accelerator_of`); then weights, pool, activations and logits of a
model on the CPU are this device's. Arrays of numpy, and what `host_buffer` returns, are the host's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_paged.cache import memory


class FakeAccelerator(TorchDispatchMode):
    """Counts the storages that operators of this thread make; has the functions of `torch.cuda` that are used.

    `total` and `others` (what other programs hold) may be set at any time.
    """

    def __init__(self, total: int, others: int = 0):
        super().__init__()
        self.total, self.others = total, others
        self.num_returns = 0  # of memory to the device
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._reserved = self._peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._forget_the_dead()
        known = dict(self._storages)
        self._note(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        if self.memory_allocated() > self.total - self.others:
            self._storages = known
            del result  # a device would not have made it
            raise torch.OutOfMemoryError("the fake accelerator is full")
        self._update()
        return result

    def count(self, *tensors: torch.Tensor, size: int | None = None) -> None:
        """Counts storages from now on, those that are known already not again."""
        self._note(tensors, size)
        self._update()

    def _note(self, tensors: Iterable[torch.Tensor], size: int | None = None) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = StorageWeakRef(storage)
            self._storages.setdefault(known.cdata, (known, storage.nbytes() if size is None else size))

    def _update(self) -> None:
        self._reserved = max(self._reserved, self.memory_allocated())
        self._peak = max(self._peak, self._reserved)

    def _forget_the_dead(self) -> None:
        for key in [key for key, (storage, _) in self._storages.items() if storage.expired()]:
            del self._storages[key]

    def host_buffer(self, num_bytes: int, pinned: bool) -> torch.Tensor:
        with _disable_current_modes():
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self.count(buffer, size=0)
        return buffer

    # ---- of `torch.cuda`

    def memory_allocated(self, device: Any = None) -> int:
        return sum(size for _, size in self._storages.values())

    def memory_reserved(self, device: Any = None) -> int:
        return self._reserved

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._peak = self._reserved

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return max(self.total - self.others - self._reserved, 0), self.total

    def empty_cache(self) -> None:
        self._forget_the_dead()
        self._reserved = self.memory_allocated()
        self.num_returns += 1

    def synchronize(self, device: Any = None) -> None:
        pass

    @property
    def used(self) -> int:
        """Returns what all programs together take."""
        return self.others + self._reserved


@contextlib.contextmanager
def on_accelerator(monkeypatch: Any, total: int, others: int = 0) -> Iterator[FakeAccelerator]:
    """CPUs are an accelerator meanwhile, whatever torch allocates for them is its memory, and weights are to be told.

    Args:
        monkeypatch (`pytest.MonkeyPatch`):
            Undoes it.
        total (`int`):
            Bytes that it has.
        others (`int`, defaults to 0):
            Bytes that other programs hold.
    """
    accelerator = FakeAccelerator(total, others)
    monkeypatch.setattr(memory, "accelerator_of", lambda device: accelerator)
    monkeypatch.setattr(memory, "huge_pages_available", lambda: False)  # mapped memory is no operator's
    monkeypatch.setattr(memory, "host_buffer", accelerator.host_buffer)
    with accelerator:
        yield accelerator
