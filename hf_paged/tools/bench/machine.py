"""What a figure was measured on: processor, cores, memory bandwidth, huge pages. `None` where it cannot be known."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch  # loaded only by what needs it: a client of a server can do without

PROBE_BYTES = 512 << 20
_HUGE_PAGE = 2 << 20
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")


@dataclasses.dataclass(frozen=True)
class MachineInfo:
    """The machine as far as it matters for speed.

    Args:
        processor (`str`):
            The processor's name.
        num_cores (`int`):
            Cores that this process may use.
        num_threads (`int`):
            Threads that torch uses.
        instruction_sets (`list[str]`):
            Those that matter for matrix products.
        memory_bytes (`int`, *optional*):
            Main memory.
        accelerator (`str`, *optional*):
            Name of the first GPU.
        system (`str`):
            Operating system.
    """

    processor: str
    num_cores: int
    num_threads: int
    instruction_sets: list[str]
    memory_bytes: int | None
    accelerator: str | None
    system: str

    def describe(self) -> str:
        """Returns one line for people."""
        parts = [f"{self.processor}, {self.num_cores} cores ({self.num_threads} of them used)"]
        if self.instruction_sets:
            parts.append(" ".join(self.instruction_sets))
        if self.memory_bytes:
            parts.append(f"{self.memory_bytes / 2**30:.0f} GiB")
        return ", ".join(parts + ([self.accelerator] if self.accelerator else []))


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that all torch threads together read from main memory.

    Args:
        ordinary_pages (`float`):
            From ordinary pages.
        huge_pages (`float`, *optional*):
            From 2 MiB pages, where the system grants them.
    """

    ordinary_pages: float
    huge_pages: float | None

    @property
    def best(self) -> float:
        """Returns the larger of the two."""
        return max(self.ordinary_pages, self.huge_pages or 0)

    def describe(self) -> str:
        """Returns one line for people."""
        huge = "no huge pages here" if self.huge_pages is None else f"{self.huge_pages / 1e9:.1f} GB/s on huge pages"
        return f"reads {self.ordinary_pages / 1e9:.1f} GB/s, {huge}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return dataclasses.asdict(self)


def machine_info() -> MachineInfo:
    """Returns what can be known about this machine without measuring."""
    import torch

    accelerator = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return MachineInfo(
        **processor_info(),
        num_threads=torch.get_num_threads(),
        memory_bytes=_memory_bytes(),
        accelerator=accelerator,
        system=f"{platform.system()} {platform.release()}",
    )


def processor_info() -> dict[str, Any]:
    """Returns the processor's name, cores and instruction sets, under the names of `MachineInfo`; without torch."""
    return {
        "processor": _processor_name(),
        "num_cores": available_cores(),
        "instruction_sets": _instruction_sets(),
    }


def available_cores() -> int:
    """Returns the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float:
    """Returns how many processes ran or waited for a processor, on average over the last minute."""
    return psutil.getloadavg()[0]


def huge_page_bytes() -> int | None:
    """Returns how much of this process's memory is on transparent huge pages, or `None` outside Linux."""
    return _kilobytes("/proc/self/smaps_rollup", "AnonHugePages:")


def resident_bytes() -> int | None:
    """Returns how much main memory this process occupies, or `None` outside Linux."""
    return _kilobytes("/proc/self/status", "VmRSS:")


def peak_resident_bytes() -> int | None:
    """Returns the most main memory that this process has occupied, or `None` outside Linux."""
    return _kilobytes("/proc/self/status", "VmHWM:")


def touched_bytes(tensor: torch.Tensor) -> int | None:
    """Returns how much of a tensor on the CPU is really in memory, in whole pages, or `None` outside Linux.

    Args:
        tensor (`torch.Tensor`):
            A contiguous tensor.
    """
    if not sys.platform.startswith("linux"):
        return None
    import torch

    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE)
    present = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None)
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_pages * mmap.PAGESIZE), present) != 0:
        return None
    return int(torch.frombuffer(present, dtype=torch.uint8).bitwise_and(1).sum()) * mmap.PAGESIZE


def measure_bandwidth(num_bytes: int = PROBE_BYTES, repeats: int = 5) -> Bandwidth:
    """Reads a large buffer with all torch threads and returns the median speed, for each kind of page.

    Args:
        num_bytes (`int`, defaults to 512 MiB):
            Size of the buffer; far larger than the processor's caches.
        repeats (`int`, defaults to 5):
            Readings of which the median is taken.
    """
    ordinary = _read_speed(_buffer(num_bytes, "MADV_NOHUGEPAGE"), repeats)
    huge = _read_speed(_buffer(num_bytes, "MADV_HUGEPAGE"), repeats) if _grants_huge_pages() else None
    return Bandwidth(ordinary, huge)


def _read_speed(buffer: torch.Tensor, repeats: int) -> float:
    import torch

    numbers = buffer.view(torch.int64)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return buffer.numel() / statistics.median(seconds[1:])


def _buffer(num_bytes: int, advice: str) -> torch.Tensor:
    """A touched buffer of bytes on pages of the advised kind, or of any kind where no advice can be given."""
    import torch

    if not hasattr(mmap, advice):
        return torch.ones(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(getattr(mmap, advice))
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    # A huge page begins at a multiple of its size.
    first = -whole.data_ptr() % _HUGE_PAGE
    return whole[first : first + num_bytes].fill_(1)


def _grants_huge_pages() -> bool:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    setting = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting is not None and "[never]" not in setting


def _processor_name() -> str:
    if sys.platform == "darwin":
        name = _output_of(["sysctl", "-n", "machdep.cpu.brand_string"])
        if name:
            return name
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _instruction_sets() -> list[str]:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("flags", "Features")):
            present = set(line.partition(":")[2].split())
            return [name for name in _INSTRUCTION_SETS if name in present]
    return []


def _memory_bytes() -> int | None:
    if sys.platform == "darwin":
        text = _output_of(["sysctl", "-n", "hw.memsize"])
        return int(text) if text and text.isdigit() else None
    return _kilobytes("/proc/meminfo", "MemTotal:")


def _output_of(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _kilobytes(path: str, name: str) -> int | None:
    for line in (_read(path) or "").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None
