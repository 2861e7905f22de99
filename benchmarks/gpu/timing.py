"""Times calls on a GPU by its own clock, from a CUDA graph where that can be made; on a CPU by the wall's."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MAX_REPLAYS = 200


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long a call takes.

    Args:
        seconds (`float`):
            Median.
        best_seconds (`float`):
            The least.
        how (`str`):
            `"graph"` (launches cost nothing), `"launches"` (one by one; short calls wait for the CPU) or `"cpu"`.
    """

    seconds: float
    best_seconds: float
    how: str

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return dataclasses.asdict(self)


def synchronize(device: str) -> None:
    """Waits until the device has done what it was given.

    Args:
        device (`str`):
            `"cuda"` or `"cpu"`.
    """
    if device != "cpu":
        torch.cuda.synchronize()


def measure(calls: Sequence[Callable[[], Any]], device: str, seconds: float = 0.3) -> Timing:
    """Times calls that do the same with different memory, so that caches do not help more than in a step.

    Args:
        calls (`Sequence[Callable[[], Any]]`):
            Made in turns; each is made once before.
        device (`str`):
            `"cuda"` or `"cpu"`.
        seconds (`float`, defaults to 0.3):
            How long to go on.
    """
    for call in calls:
        call()
    synchronize(device)
    if device == "cpu":
        return _summary(_samples(calls, _wall_sample, seconds), len(calls), "cpu")
    graph = _capture(calls)
    if graph is None:
        return _summary(_samples(calls, _event_sample, seconds), len(calls), "launches")
    graph.replay()
    torch.cuda.synchronize()
    return _summary(_samples([graph.replay], _event_sample, seconds), len(calls), "graph")


def measure_launches(call: Callable[[], Any], device: str, seconds: float = 0.15) -> Timing:
    """Times a call that is no more than a launch, such as a graph's, one after the other.

    Args:
        call (`Callable[[], Any]`):
            The call.
        device (`str`):
            `"cuda"` or `"cpu"`.
        seconds (`float`, defaults to 0.15):
            How long to go on.
    """
    synchronize(device)
    if device == "cpu":
        return _summary(_samples([call], _wall_sample, seconds), 1, "cpu")
    return _summary(_samples([call], _event_sample, seconds), 1, "launches")


def _summary(samples: list[float], count: int, how: str) -> Timing:
    return Timing(statistics.median(samples) / count, min(samples) / count, how)


def _samples(
    calls: Sequence[Callable[[], Any]], sample: Callable[[Sequence[Callable[[], Any]]], float], seconds: float
) -> list[float]:
    end = time.perf_counter() + seconds
    samples: list[float] = []
    while not samples or (time.perf_counter() < end and len(samples) < MAX_REPLAYS):
        samples.append(sample(calls))
    return samples


def _wall_sample(calls: Sequence[Callable[[], Any]]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begin


def _event_sample(calls: Sequence[Callable[[], Any]]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph | None:
    """A graph of all calls, or `None` where one of them cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception:
        torch.cuda.synchronize()
        return None
    return graph
