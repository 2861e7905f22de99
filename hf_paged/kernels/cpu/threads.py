"""How many threads torch uses on a CPU, and on which processors: no more than the process may run at a time."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from ...errors import ConfigurationError
from . import library

logger = logging.getLogger(__name__)

PIN_VARIABLE = "HF_PAGED_CPU_PIN"
_CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_pinned = threading.local()


@dataclasses.dataclass(frozen=True)
class ThreadLimits:
    """What bounds the number of threads that run at a time.

    Args:
        num_processors (`int`):
            Processors in the affinity mask.
        quota (`float`, *optional*):
            Processors' worth of time that the container may use; none if it is not limited.
    """

    num_processors: int
    quota: float | None = None

    @property
    def num_threads(self) -> int:
        """Returns how many threads are worth having."""
        return self.num_processors if self.quota is None else max(1, min(self.num_processors, math.ceil(self.quota)))

    def describe(self) -> str:
        """Returns a few words for people."""
        limit = "" if self.quota is None else f", a container's limit of {self.quota:g}"
        return f"{self.num_processors} processors{limit}"


def thread_limits() -> ThreadLimits:
    """Returns what the affinity mask and the container's CPU quota allow."""
    return ThreadLimits(len(usable_processors()), cpu_quota())


def limit_threads() -> int:
    """Lowers torch's number of threads to what may run at a time; returns the number in use.

    A thread more than that makes all others wait at the end of every operator. Torch itself counts the affinity mask
    when it is imported, but no quota. The number is never raised, and left alone where `OMP_NUM_THREADS` or
    `MKL_NUM_THREADS` is set.

    Raises:
        ConfigurationError: If `HF_PAGED_CPU_PIN` is neither 0 nor 1; better now than in the first step.
    """
    pinning_requested()
    limits, current = thread_limits(), torch.get_num_threads()
    if current <= limits.num_threads:
        return current
    chosen = next((name for name in _CHOSEN_BY_USER if os.environ.get(name)), None)
    if chosen is None:
        logger.info("Torch uses %d threads instead of %d: %s.", limits.num_threads, current, limits.describe())
        torch.set_num_threads(limits.num_threads)
        return limits.num_threads
    logger.warning(
        "%s asks for %d threads, but only %d run at a time (%s), and the others wait for them in every operator.",
        chosen,
        current,
        limits.num_threads,
        limits.describe(),
    )
    return current


def pinning_requested() -> bool:
    """Returns whether `HF_PAGED_CPU_PIN` asks for threads that stay on one core each.

    Raises:
        ConfigurationError: If it is neither 0 nor 1.
    """
    value = os.environ.get(PIN_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{PIN_VARIABLE}={value!r} is neither 0 nor 1; set it to 1 to pin threads to cores.")
    return value == "1"


def pin_threads_if_requested() -> int:
    """Keeps torch's worker threads on one core each if `HF_PAGED_CPU_PIN=1`; returns how many were pinned.

    To be called by the thread that runs the steps, since OpenMP has a pool of workers for each thread that calls it.
    That thread itself is not pinned: threads and processes that it starts inherit its mask. The second call of a thread
    does nothing.

    Raises:
        ConfigurationError: If `HF_PAGED_CPU_PIN` is neither 0 nor 1.
    """
    if getattr(_pinned, "is_done", False):
        return 0
    _pinned.is_done = True
    if not pinning_requested():
        return 0
    if not library.load():
        logger.warning("%s=1 pins nothing: %s.", PIN_VARIABLE, library.status().describe())
        return 0
    processors = one_of_each_core(usable_processors())
    count = torch.ops.hf_paged.pin_threads(list(processors))
    logger.info("%d worker threads are pinned to a core each, of processors %s.", count, processors)
    return count


def one_of_each_core(processors: tuple[int, ...], topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """Orders processors so that each core's first comes before any core's second.

    Args:
        processors (`tuple[int, ...]`):
            Which.
        topology (`Path`, defaults to `/sys/devices/system/cpu`):
            Where the system tells which of them share a core.
    """
    seen: dict[str, int] = {}
    ranks = {}
    for processor in processors:
        core = _read(topology / f"cpu{processor}" / "topology" / "thread_siblings_list") or str(processor)
        ranks[processor] = seen[core] = seen.get(core, -1) + 1
    return tuple(sorted(processors, key=lambda processor: (ranks[processor], processor)))


def describe_threads() -> str:
    """Returns how many threads torch uses, of what, and whether they are to be pinned, for people.

    Raises:
        ConfigurationError: If `HF_PAGED_CPU_PIN` is neither 0 nor 1.
    """
    pinned = ", pinned" if pinning_requested() else ""
    return f"{torch.get_num_threads()} ({thread_limits().describe()}{pinned})"


def usable_processors() -> tuple[int, ...]:
    """Returns the processors of the affinity mask, ascending; all where the system has no such mask."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_quota(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Returns how many processors' worth of time this process's control groups may use, or `None` for no limit.

    Of a group and its parents, the tightest counts. Version 2 and version 1 are read, also side by side; what the
    container does not show is skipped.

    Args:
        cgroups (`Path`, defaults to `/sys/fs/cgroup`):
            Where the hierarchies are mounted.
        membership (`Path`, defaults to `/proc/self/cgroup`):
            The process's groups.
    """
    return min((quota for group in _groups(cgroups, membership) if (quota := _quota_of(group))), default=None)


def _groups(cgroups: Path, membership: Path) -> Iterator[Path]:
    """Folders of the groups that may hold a limit, inner ones first."""
    for line in _read(membership).splitlines():
        _, controllers, inner = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = [cgroups / controllers, cgroups / "cpu"] if controllers else [cgroups, cgroups / "unified"]
        parts = [part for part in inner.split("/") if part not in ("", "..")]
        for root in roots:
            yield from (root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _quota_of(group: Path) -> float | None:
    """The limit of one group: `cpu.max` ("150000 100000", "max 100000") or `cpu.cfs_quota_us` (-1 for none)."""
    words = _read(group / "cpu.max").split()
    if not words:
        words = [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]
    try:
        quota, period = map(int, words)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
