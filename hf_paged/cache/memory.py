"""Memory: huge pages for weights and K/V on a CPU, what an accelerator allocates, and how much is free."""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import math
import mmap
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from ..errors import NotEnoughMemoryError

logger = logging.getLogger(__name__)

_HUGE_PAGE = 2 << 20
_GIB = 1 << 30


def huge_pages_available() -> bool:
    """Returns whether this system gives 2 MiB pages to memory that asks for them (Linux, `madvise` or `always`)."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[never]" not in setting


class HugeRegion:
    """Anonymous memory on 2 MiB pages, from which tensors are carved. Pages become real when first written.

    On machines where reading through 4 KiB pages is slow this is worth a factor of four in bandwidth; elsewhere it
    costs nothing. The memory lives as long as a tensor carved from it.

    Args:
        num_bytes (`int`):
            Size of the region.

    Raises:
        OSError: If the system does not give the address space, or does not know huge pages.
    """

    def __init__(self, num_bytes: int):
        self._map = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        start = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self._offset = -start % _HUGE_PAGE
        self._end = self._offset + num_bytes

    def carve(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor with a storage of its own inside the region.

        Args:
            shape (`tuple[int, ...]`):
                Its shape.
            dtype (`torch.dtype`):
                Its dtype.
        """
        count = math.prod(shape)
        size = count * dtype.itemsize
        assert self._offset + size <= self._end, f"the region has no room left for {size} bytes"
        tensor = torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._offset).view(shape)
        self._offset += -(-size // 64) * 64
        return tensor

    @staticmethod
    def room_for(sizes: list[int]) -> int:
        """Returns how large a region must be to hold tensors of these sizes in bytes.

        Args:
            sizes (`list[int]`):
                Bytes of each tensor.
        """
        return sum(-(-size // 64) * 64 for size in sizes)


def allocate(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Allocates zeroed tensors, on huge pages where the device is a CPU that has them.

    Args:
        shapes (`Sequence[tuple[int, ...]]`):
            One shape per tensor.
        dtype (`torch.dtype`):
            Their dtype.
        device (`torch.device`):
            Where.

    Returns:
        `list[torch.Tensor]`: The tensors; anonymous memory reads as zero without being touched.

    Raises:
        NotEnoughMemoryError: If the device has not that much left.
    """
    if device.type == "cpu" and huge_pages_available():
        try:
            region = HugeRegion(HugeRegion.room_for([math.prod(shape) * dtype.itemsize for shape in shapes]))
            return [region.carve(shape, dtype) for shape in shapes]
        except OSError as error:
            logger.info("K/V blocks are on ordinary pages: no huge pages (%s).", error)
    try:
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    except torch.OutOfMemoryError as error:
        wanted = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
        raise NotEnoughMemoryError(
            f"K/V blocks of {wanted / _GIB:.2f} GiB do not fit: {free_memory(device) / _GIB:.2f} GiB are free on "
            f"{device} now. Free memory, or lower `gpu_memory_utilization` or `num_blocks`."
        ) from error


def move_weights_to_huge_pages(model: torch.nn.Module) -> int:
    """Moves a model's parameters and buffers on a CPU to huge pages, as many at a time as torch has threads.

    Each keeps a storage of its own, so that saving one never sees the others; tied tensors stay tied.

    Args:
        model (`torch.nn.Module`):
            The model, changed in place.

    Returns:
        `int`: Bytes moved; 0 where there are no huge pages.
    """
    tensors = _movable({id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}.values())
    total = HugeRegion.room_for([t.numel() * t.element_size() for t in tensors])
    if total < _HUGE_PAGE or not huge_pages_available():
        return 0
    try:
        region = HugeRegion(total)
    except OSError as error:
        logger.info("Weights stay on ordinary pages: no huge pages (%s).", error)
        return 0
    places = [region.carve(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    # Most of the time goes into pages, of the file and of the region, that the system makes on first touch.
    with concurrent.futures.ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(_move, tensors, places):
            pass
    return total


def _move(tensor: torch.Tensor, place: torch.Tensor) -> None:
    with torch.no_grad():  # which holds for one thread
        place.copy_(tensor)
    tensor.data = place


def _movable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that fill a storage by themselves; what shares one, whole or in part, would be cut off from the rest."""
    plain = [
        tensor
        for tensor in tensors
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
    ]
    users = collections.Counter(tensor.untyped_storage().data_ptr() for tensor in plain)
    return [
        tensor
        for tensor in plain
        if tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and users[tensor.untyped_storage().data_ptr()] == 1
    ]


def accelerator_of(device: torch.device) -> Any:
    """Returns the module of torch that manages a device's memory (`torch.cuda`, ...), or `None` if it is a CPU.

    Args:
        device (`torch.device`):
            The device.
    """
    return None if device.type == "cpu" else torch.get_device_module(device)


def free_memory(device: torch.device) -> int:
    """Returns the bytes that are really free: other users of the device, and a container's limit, are counted.

    Args:
        device (`torch.device`):
            The device.
    """
    accelerator = accelerator_of(device)
    if accelerator is None:
        return min(psutil.virtual_memory().available, _cgroup_room())
    return int(accelerator.mem_get_info(device)[0])


def total_memory(device: torch.device) -> int:
    """Returns the size of an accelerator's memory in bytes.

    Args:
        device (`torch.device`):
            The accelerator.
    """
    return int(accelerator_of(device).mem_get_info(device)[1])


def give_back(device: torch.device) -> None:
    """Returns memory that nothing lives in from torch's allocator to the device, for whoever else uses it.

    Args:
        device (`torch.device`):
            The device; on a CPU there is nothing to do.
    """
    accelerator = accelerator_of(device)
    if accelerator is not None:
        accelerator.empty_cache()


def give_back_pinned() -> None:
    """Returns pinned memory that nothing lives in from torch to the system; torch would keep it for ever."""
    newer, older = getattr(torch.accelerator, "empty_host_cache", None), getattr(torch._C, "_host_emptyCache", None)
    empty = newer or older
    if empty is not None:
        empty()


def host_buffer(num_bytes: int, pinned: bool) -> torch.Tensor:
    """Returns uninitialized bytes of host memory.

    Args:
        num_bytes (`int`):
            How many.
        pinned (`bool`):
            Whether copies between it and a CUDA device shall run at full speed.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def device_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns uninitialized bytes of a device's memory.

    Args:
        num_bytes (`int`):
            How many.
        device (`torch.device`):
            Whose.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _cgroup_room() -> int:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(int(limit) - used, 0)
