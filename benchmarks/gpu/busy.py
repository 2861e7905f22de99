"""How much of the time the GPU did something, from the profiler's record of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# The beginning and the end, where requests start and end, are left out.
MARGIN = 0.15
Interval = tuple[float, float]


def busy_share(work: Callable[[], Any], device: str) -> float | None:
    """Returns the share of time in which at least one kernel or copy ran; `None` if none was recorded.

    Args:
        work (`Callable[[], Any]`):
            What to watch.
        device (`str`):
            `"cuda"`; on a CPU its operators are taken for kernels, to try this function.
    """
    on_cpu = device == "cpu"
    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    with profile(activities=[activity]) as record:
        work()
        if not on_cpu:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CPU if on_cpu else torch.autograd.DeviceType.CUDA
    return share_of(
        (event.time_range.start, event.time_range.end)
        for event in record.events()
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False)
    )


def prepare_profiler(device: str) -> None:
    """Starts the profiler once, before any graph is captured: of graphs that are older than it, kernels may be missing.

    Args:
        device (`str`):
            `"cuda"` or `"cpu"`.
    """
    busy_share(lambda: torch.zeros(1, device=device), device)


def share_of(intervals: Iterable[Interval]) -> float | None:
    """Returns the share of time that intervals cover, between the first and the last of them, without the margins.

    Args:
        intervals (`Iterable[Interval]`):
            Beginnings and ends.
    """
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, last = ordered[0][0], max(end for _, end in ordered)
    left, right = first + MARGIN * (last - first), last - MARGIN * (last - first)
    covered, reached = 0.0, left
    for start, end in ordered:
        start, end = max(start, reached), min(end, right)
        if end > start:
            covered, reached = covered + end - start, end
    return covered / (right - left) if right > left else None
