"""What the benchmarks share: the models, the texts, the probe of the memory, and the registry."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from ... import __version__
from ...configuration import PagedConfig
from ...errors import ConfigurationError, UnknownNameError
from ...kernels.cpu import library
from ...registry import Registry
from ..packaged_model import packaged_model_path
from .baseline_process import StockTransformers
from .engine_run import load_paged_model, warm_up
from .machine import load_average, machine_info, measure_bandwidth
from .report import Report
from .workloads import TextTokens, Workload, build_workload

PEERS = ("transformers",)


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """What to measure, and how often.

    Args:
        model (`str`, *optional*):
            Path or hub id; the packaged model by default.
        compare (`str`, *optional*):
            `"transformers"` measures stock Transformers beside hf_paged.
        runs (`int`, defaults to 3):
            Measurements of which the median is shown.
        count (`int`, *optional*):
            Requests of the workload, for a smaller or larger one.
        dtype (`str`, defaults to `"bfloat16"`):
            Dtype of the weights.
        config (`PagedConfig`, *optional*):
            Settings of the engine.
        log (`Callable[[str], None]`, *optional*):
            Told what is being done.
        noise (`float`, *optional*):
            Of `quantization`: measures a copy whose weights carry so much relative noise.
        only (`str`, *optional*):
            Of `quantization`: names of rows, separated by commas.

    Raises:
        UnknownNameError: If `compare` names no peer.
        ConfigurationError: If `runs`, `count` or `dtype` are impossible.
    """

    model: str | None = None
    compare: str | None = None
    runs: int = 3
    count: int | None = None
    dtype: str = "bfloat16"
    config: PagedConfig | None = None
    log: Callable[[str], None] | None = None
    noise: float | None = None
    only: str | None = None

    def __post_init__(self):
        if self.compare is not None and self.compare not in PEERS:
            raise UnknownNameError(f"Unknown peer {self.compare!r} for `compare`; available: {', '.join(PEERS)}.")
        for name in ("runs", "count"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"`{name}` must be at least 1, got {value}.")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ConfigurationError(f"`dtype` must name a dtype such as 'bfloat16' or 'float32', got {self.dtype!r}.")


class BenchSession:
    """Models and texts of one benchmark, loaded when first used.

    Args:
        options (`BenchOptions`):
            What to measure.
    """

    def __init__(self, options: BenchOptions):
        self.options = options
        self._open = contextlib.ExitStack()

    @functools.cached_property
    def path(self) -> str:
        """Returns the model's path or hub id."""
        return self.options.model or str(packaged_model_path())

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Returns the model's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path)

    @functools.cached_property
    def text(self) -> TextTokens:
        """Returns the packaged texts as the model's tokens."""
        return TextTokens.from_tokenizer(self.tokenizer)

    @functools.cached_property
    def model(self) -> Any:
        """Returns the model with a paged engine, warmed up."""
        self.log(f"loading {self.path}")
        model = load_paged_model(self.path, getattr(torch, self.options.dtype), self.options.config)
        self._open.callback(model.engine.close)
        warm_up(model, self.text)
        return model

    @functools.cached_property
    def stock(self) -> StockTransformers:
        """Returns the process with the stock model, warmed up."""
        self.log("loading stock Transformers in a process of its own")
        stock = self._open.enter_context(StockTransformers(self.path, self.options.dtype, torch.get_num_threads()))
        stock.measure("static_batch", Workload("warm-up", [self.text.cut(32)], [4]))
        return stock

    def drop_stock(self) -> None:
        """Ends the process with the stock model; the next use of `stock` starts another."""
        self.stock.close()
        del self.stock

    def workload(self, name: str) -> Workload:
        """Returns a workload with texts that were not used before, so that no prefix cache knows them.

        Args:
            name (`str`):
                `"W1"` to `"W4"`.
        """
        return build_workload(name, self.text, self.options.count)

    def bandwidth(self) -> float:
        """Returns the bytes per second that memory gives right now."""
        return measure_bandwidth().best

    def log(self, message: str) -> None:
        """Tells what is being done.

        Args:
            message (`str`):
                A few words.
        """
        if self.options.log is not None:
            self.options.log(message)

    def close(self) -> None:
        """Ends the process and the engine."""
        self._open.close()


BENCHMARKS: Registry[Callable[[BenchSession], Report]] = Registry("benchmark")


@contextlib.contextmanager
def open_session(options: BenchOptions) -> Iterator[BenchSession]:
    """Opens a session and closes it at the end.

    Args:
        options (`BenchOptions`):
            What to measure.
    """
    session = BenchSession(options)
    try:
        yield session
    finally:
        session.close()


def all_benchmarks() -> Registry[Callable[[BenchSession], Report]]:
    """Returns `BENCHMARKS` with all that there are."""
    from . import (  # noqa: F401 - each registers itself
        concurrency,
        kernels,
        latency,
        long_context,
        memory,
        prefix,
        quantization,
        start,
        step,
        throughput,
    )

    return BENCHMARKS


def run_benchmark(name: str, options: BenchOptions) -> Report:
    """Runs a benchmark by its name.

    Args:
        name (`str`):
            A name of `BENCHMARK_HELP`.
        options (`BenchOptions`):
            What to measure.

    Raises:
        UnknownNameError: If there is none of that name.
    """
    benchmark = all_benchmarks().get(name)
    load_before = load_average()
    with open_session(options) as session:
        report = benchmark(session)
    report.details |= {
        "benchmark": name,
        "model": session.path,
        "dtype": options.dtype,
        "runs": options.runs,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"hf_paged": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "isa": None if torch.cuda.is_available() else library.status().isa,
        "load_average": [load_before, load_average()],
        "machine": dataclasses.asdict(machine_info()),
    }
    report.notes.append(machine_info().describe())
    return report
