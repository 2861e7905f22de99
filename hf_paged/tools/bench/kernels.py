"""`hf-paged bench kernels`: each native operator's time, its rate, and the share of what the machine allows."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import NotSupportedError
from ...kernels.cpu import library, peaks
from ...kernels.layers import LayerArguments
from .kernel_cases import Case, KernelCases, Sizes
from .report import Column, Report, gigabytes_per_second, percent, times
from .session import BENCHMARKS, BenchSession

SIZES = Sizes()
SAMPLES_PER_RUN = 7
LEAST_SAMPLES = 3
SECONDS_PER_CASE = 0.8
SECONDS_PER_SAMPLE = 3e-4  # shorter calls are timed several at a time


def fine_milliseconds(seconds: float) -> str:
    """Returns seconds as milliseconds with three decimals.

    Args:
        seconds (`float`):
            The time.
    """
    return f"{seconds * 1e3:,.3f}"


def gigaflops(rate: float) -> str:
    """Returns operations per second as GFLOP/s.

    Args:
        rate (`float`):
            Operations per second.
    """
    return f"{rate / 1e9:,.0f}"


COLUMNS = (
    Column("system", "operator"),
    Column("seconds", "ms", fine_milliseconds),
    Column("best_seconds", "best", fine_milliseconds),
    Column("bytes_per_second", "memory", gigabytes_per_second),
    Column("flops", "GFLOP/s", gigaflops),
    Column("bound", "bound by"),
    Column("floor_seconds", "floor, ms", fine_milliseconds),
    Column("floor_share", "of that reached", percent),
    Column("torch_seconds", "torch, ms", fine_milliseconds),
    Column("speedup", "faster by", times),
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the machine allows.

    Args:
        read_bandwidth (`float`):
            Bytes per second.
        peak_flops (`float`):
            Operations per second of the instruction that the operators use.
    """

    read_bandwidth: float
    peak_flops: float


@BENCHMARKS.register("kernels")
def kernels(session: BenchSession) -> Report:
    """Measures native operators at a model's own shapes, and torch's beside them where it has something alike.

    Args:
        session (`BenchSession`):
            Models and texts.

    Raises:
        NotSupportedError: If there are no native operators here, or none of the model's layers is computed by them.
    """
    cases = make_cases(session)
    instruction = peaks.used_instruction(cases.dtype)
    peak = {name: peaks.peak_flops(name) for name in peaks.peak_instructions()}
    bandwidth = session.bandwidth()
    measured = []
    with torch.inference_mode():
        for case in cases:
            session.log(case.name)
            measured.append((case, measure(case, session.options.runs * SAMPLES_PER_RUN)))
    # Somebody else's load can only make it look smaller.
    limits = Limits(max(bandwidth, session.bandwidth()), peak[instruction])
    peaks_text = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in peak.items())
    return Report(
        f"Native operators, {cases.dtype} (medians)",
        COLUMNS,
        [make_row(case, samples, limits) for case, samples in measured],
        [
            library.status().describe(),
            f"floors: reads {limits.read_bandwidth / 1e9:.1f} GB/s; {peaks_text}, of which {instruction} is used; "
            f"{torch.get_num_threads()} threads",
            "Norms, rope, activations and sampling find their input in the caches, as in a step, and may pass the "
            "floor, which is that of main memory.",
        ],
        {"peak_flops": peak, "instruction": instruction, "native": library.status().to_dict()},
    )


def make_cases(session: BenchSession) -> KernelCases:
    """Returns the calls to measure, on the weights of the session's model.

    Args:
        session (`BenchSession`):
            Models and texts.

    Raises:
        NotSupportedError: If there are no native operators here, or none of the model's layers is computed by them.
    """
    if not library.load():
        raise NotSupportedError(f"There is nothing to measure: {library.status().describe()}.")
    model = session.model
    layers = _layers_of(model.engine)
    if not layers:
        raise NotSupportedError(
            f"No whole layer of {type(model).__name__} is computed natively (plan: {model.engine.plan.native}); "
            "measure another model, or leave out `model` for the packaged one."
        )
    same = [layer for layer in layers if layer.shape == layers[0].shape]
    head = model.get_output_embeddings().weight
    return KernelCases(same, head, model.engine.plan.block_size, SIZES)


def _layers_of(engine: Any) -> list[LayerArguments]:
    native = engine._native
    units = () if native is None else native.inspection.units
    return [unit.recipe.arguments() for unit in units if unit.kind == "layer"]


def measure(case: Case, num_samples: int) -> list[list[float]]:
    """Times a case, and torch's calls in turns with it.

    Args:
        case (`Case`):
            What to time.
        num_samples (`int`):
            How often at most.

    Returns:
        `list[list[float]]`: Seconds of a call of ours and, where torch has something alike, of torch.
    """
    timers = [_Timer(calls) for calls in (case.calls, case.torch_calls) if calls]
    end = time.perf_counter() + SECONDS_PER_CASE
    for count in range(num_samples):
        if count >= LEAST_SAMPLES and time.perf_counter() > end:
            break
        for timer in timers:
            timer.take_sample()
    return [timer.samples for timer in timers]


def make_row(case: Case, samples: list[list[float]], limits: Limits) -> dict[str, Any]:
    """Returns the figures of a case.

    Args:
        case (`Case`):
            What was timed.
        samples (`list[list[float]]`):
            From `measure`.
        limits (`Limits`):
            What the machine allows.
    """
    seconds, best = statistics.median(samples[0]), min(samples[0])
    by_memory, by_operations = case.num_bytes / limits.read_bandwidth, case.operations / limits.peak_flops
    is_memory, floor = by_memory >= by_operations, max(by_memory, by_operations)
    torch_seconds = statistics.median(samples[1]) if len(samples) > 1 else None
    return {
        "system": case.name,
        "seconds": seconds,
        "best_seconds": best,
        "num_samples": len(samples[0]),
        "bytes_per_second": case.num_bytes / seconds if is_memory else None,
        "flops": None if is_memory else case.operations / seconds,
        "bound": "memory" if is_memory else "arithmetic",
        "floor_seconds": floor,
        "floor_share": floor / seconds,
        "best_floor_share": floor / best,
        "num_bytes": case.num_bytes,
        "operations": case.operations,
        "read_bandwidth": limits.read_bandwidth,
        "torch_seconds": torch_seconds,
        "torch_best_seconds": None if torch_seconds is None else min(samples[1]),
        "speedup": None if torch_seconds is None else torch_seconds / seconds,
    }


class _Timer:
    """Makes calls in turns and keeps how long one took.

    Args:
        calls (`Sequence[Callable[[], Any]]`):
            Calls that touch different memory.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]]):
        self._calls = itertools.cycle(calls)
        self.samples: list[float] = []
        self._repeats = 1
        next(self._calls)()  # whatever happens only once
        self.take_sample()
        self._repeats = min(max(math.ceil(SECONDS_PER_SAMPLE / self.samples.pop()), 1), 100)

    def take_sample(self) -> None:
        """Times a few calls."""
        start = time.perf_counter()
        for _ in range(self._repeats):
            next(self._calls)()
        self.samples.append((time.perf_counter() - start) / self._repeats)
