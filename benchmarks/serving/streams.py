"""A thousand streams at a time on one server: errors, memory, how late the server's event loop is.

python -m benchmarks.serving.streams
python -m benchmarks.serving.streams --ramp 0   # all in the same moment
python -m benchmarks.serving.streams --streams 2000 --waves 5 --flags="--max-num-seqs 1024"
"""

from __future__ import annotations

import argparse
import math
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hf_paged.tools.bench.report import log_console, output_console, write_json
from hf_paged.tools.bench.serve_arrivals import arrival_times
from hf_paged.tools.packaged_model import packaged_model_path

from ..target import Target
from .loads import Texts, bodies_of, send, without_details
from .servers import RunningServer, end_servers_when_terminated, make_parser, our_command, serving

LAG = "hf_paged:event_loop_lag_seconds"
SAMPLE_SECONDS = 0.5
MAX_GROWTH = 0.05
MAX_LAG_MS = 50.0


class MemoryWatch:
    """Looks at a server's memory while it works.

    Args:
        server (`RunningServer`):
            The server.
    """

    def __init__(self, server: RunningServer):
        self.samples: list[int] = []
        self._server = server
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            self.samples.append(self._server.memory())


def main() -> None:
    """Runs what the command line asks for."""
    end_servers_when_terminated()
    arguments = parse()
    console, log = output_console(), log_console()
    model = Path(arguments.model) if arguments.model else packaged_model_path()
    texts = Texts(model)
    lengths = random.Random(0)
    rate = arguments.streams / arguments.ramp if arguments.ramp else math.inf
    times = arrival_times(arguments.streams, rate)
    waves: list[dict[str, Any]] = []
    command = our_command(model, "--dtype", "bfloat16", *arguments.flags.split())
    with serving(command, arguments.results / "streams.log") as server:
        name = server.model()["id"]
        for number in range(arguments.waves):
            prompts = texts.tokenizer.batch_decode([texts.ring.cut(16) for _ in range(arguments.streams)])
            outputs = [lengths.randint(8, 2 * arguments.tokens - 8) for _ in prompts]
            before = lag_buckets(server.metrics())
            with MemoryWatch(server) as watch:
                figures = send(server.url, bodies_of(prompts, outputs, name), times)
            lag = lag_percentile(before, lag_buckets(server.metrics()), 0.99)
            wave = without_details(figures)
            wave |= {"peak_memory": max(watch.samples, default=0), "memory": server.memory(), "p99_lag_ms": lag * 1e3}
            waves.append(wave | {"load_average": os.getloadavg()[0]})
            log.print(f"wave {number + 1}: {describe(waves[-1])}", highlight=False)
    growth = (waves[-1]["peak_memory"] - waves[0]["peak_memory"]) / waves[0]["peak_memory"]
    targets = [
        Target("requests that failed", 0, False, sum(wave["failed"] for wave in waves)),
        Target("memory: growth of the peak from the first wave to the last", MAX_GROWTH, False, growth),
        Target("event loop: p99 lag of the worst wave, ms", MAX_LAG_MS, False, max(w["p99_lag_ms"] for w in waves)),
    ]  # fmt: skip
    print_waves(console, waves, arguments.streams)
    for target in targets:
        console.print(target.describe(), highlight=False, markup=False)
    content = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "streams": arguments.streams, "waves": waves}
    write_json(arguments.results / "streams.json", content | {"targets": [target.to_dict() for target in targets]})


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    parser = make_parser("streams", __doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, on average")
    parser.add_argument("--ramp", type=float, default=10.0, help="seconds in which a wave's requests come; 0: at once")
    # A pool that the first wave fills: a larger one takes memory as its blocks are first used, for several waves.
    pool = "--cpu-kv-cache-gib 0.5"
    parser.add_argument("--flags", default=pool, help="further flags of the server, in one word")
    return parser.parse_args(words)


def lag_buckets(metrics: dict[str, float]) -> dict[float, float]:
    """Returns the cumulative counts of the event loop's lag, by upper bound in seconds.

    Args:
        metrics (`dict[str, float]`):
            From `RunningServer.metrics`.
    """
    found = {}
    for name, value in metrics.items():
        if name.startswith(f"{LAG}_bucket"):
            found[float(name.partition('le="')[2].partition('"')[0])] = value
    return dict(sorted(found.items()))


def lag_percentile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Returns a percentile of what came between two looks, interpolated within its bucket as Prometheus does.

    Args:
        before (`dict[float, float]`):
            The first look.
        after (`dict[float, float]`):
            The second.
        share (`float`):
            Such as 0.99.
    """
    counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    total = max(counts.values(), default=0.0)
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= share * total and count > below:
            return (
                lower if bound == float("inf") else lower + (bound - lower) * (share * total - below) / (count - below)
            )
        lower, below = bound, count
    return 0.0


def describe(wave: dict[str, Any]) -> str:
    """Returns a wave in words.

    Args:
        wave (`dict[str, Any]`):
            The wave.
    """
    return (
        f"{wave['completed']} answered, {wave['failed']} failed, most at a time {wave['max_concurrent_requests']}, "
        f"{wave['output_throughput']:.0f} tok/s, peak {wave['peak_memory'] / 2**20:.0f} MiB, lag p99 "
        f"{wave['p99_lag_ms']:.1f} ms, client {wave['client_cpu_seconds'] / wave['duration']:.1%} of a core, load "
        f"{wave['load_average']:.1f}"
    )


def print_waves(console: Any, waves: Sequence[dict[str, Any]], streams: int) -> None:
    """Prints a table.

    Args:
        console (`Console`):
            Where to.
        waves (`Sequence[dict[str, Any]]`):
            All waves.
        streams (`int`):
            How many at a time.
    """
    table = Table(title=f"{streams} streams at a time", title_justify="left")
    for title in ("wave", "answered", "failed", "tok/s", "TTFT p99 ms", "ITL p99 ms", "lag p99 ms", "peak MiB", "MiB"):
        table.add_column(title, justify="right")
    for number, wave in enumerate(waves, 1):
        cells = [str(number), f"{wave['completed']:,}", str(wave["failed"]), f"{wave['output_throughput']:,.0f}"]
        cells += [f"{wave[name]:,.1f}" for name in ("p99_ttft_ms", "p99_itl_ms", "p99_lag_ms")]
        cells += [f"{wave[name] / 2**20:,.0f}" for name in ("peak_memory", "memory")]
        table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
