"""Memory: huge pages for weights and K/V on a CPU, how much is free, and how many blocks fit."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import math
import mmap
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

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
    """
    if device.type == "cpu" and huge_pages_available():
        try:
            region = HugeRegion(HugeRegion.room_for([math.prod(shape) * dtype.itemsize for shape in shapes]))
            return [region.carve(shape, dtype) for shape in shapes]
        except OSError as error:
            logger.info("K/V blocks are on ordinary pages: no huge pages (%s).", error)
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


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


def free_memory(device: torch.device) -> int:
    """Returns the bytes that are really free: other users of the device, and a container's limit, are counted.

    Args:
        device (`torch.device`):
            The device.
    """
    if device.type == "cpu":
        return min(psutil.virtual_memory().available, _cgroup_room())
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def total_memory(device: torch.device) -> int:
    """Returns the size of an accelerator's memory in bytes.

    Args:
        device (`torch.device`):
            The accelerator.
    """
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def _cgroup_room() -> int:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(int(limit) - used, 0)


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """Bytes that the K/V pool may take, and the numbers that led there, for messages.

    Args:
        pool_bytes (`int`):
            What the pool may take.
        explanation (`str`):
            How it came about.
    """

    pool_bytes: int
    explanation: str


def cpu_budget(cpu_kv_cache_gib: float | None, useful_bytes: int) -> MemoryBudget:
    """Returns the pool's budget on a CPU.

    Args:
        cpu_kv_cache_gib (`float`, *optional*):
            What the user asked for.
        useful_bytes (`int`):
            What the pool could use at most.

    Raises:
        NotEnoughMemoryError: If more was asked for than is free.
    """
    free = free_memory(torch.device("cpu"))
    if cpu_kv_cache_gib is not None:
        if cpu_kv_cache_gib * _GIB > free:
            raise NotEnoughMemoryError(
                f"`cpu_kv_cache_gib` is {cpu_kv_cache_gib}, but only {free / _GIB:.2f} GiB are free. Ask for less."
            )
        return MemoryBudget(int(cpu_kv_cache_gib * _GIB), f"`cpu_kv_cache_gib` is {cpu_kv_cache_gib}")
    return MemoryBudget(
        min(free // 4, useful_bytes), f"a quarter of the {free / _GIB:.2f} GiB that are free; see `cpu_kv_cache_gib`"
    )


def accelerator_budget(
    device: torch.device, gpu_memory_utilization: float, activation_bytes: int, useful_bytes: int
) -> MemoryBudget:
    """Returns the pool's budget on an accelerator: the allowed share less what is used and what a step needs.

    Args:
        device (`torch.device`):
            The accelerator.
        gpu_memory_utilization (`float`):
            Share of its memory that this process may bring it to.
        activation_bytes (`int`):
            Peak of a step at the token budget, beyond weights and pool.
        useful_bytes (`int`):
            What the pool could use at most.
    """
    free, total = free_memory(device), total_memory(device)
    room = int(total * gpu_memory_utilization) - (total - free) - activation_bytes
    return MemoryBudget(
        max(min(room, useful_bytes), 0),
        f"`gpu_memory_utilization` {gpu_memory_utilization} of {total / _GIB:.2f} GiB, less "
        f"{(total - free) / _GIB:.2f} GiB in use (weights and other programs) and "
        f"{activation_bytes / _GIB:.2f} GiB for a step's activations",
    )
