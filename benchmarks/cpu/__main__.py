"""`python -m benchmarks.cpu`, or `make bench-cpu`: hf_paged against its peers; see README.md beside this file."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_paged.cache_folder import cache_folder
from hf_paged.tools.bench.plots import plot_where_possible
from hf_paged.tools.bench.report import log_console, output_console
from hf_paged.tools.bench.workloads import TextTokens, Workload, build_workload
from hf_paged.tools.packaged_model import packaged_model_path

from .costs import model_costs
from .driver import ROOT, Place, prepare_all, run_rounds
from .peers import PEERS, Peer
from .store import RunStore, read_json, write_json
from .summary import machine_medians, print_summary, print_targets, summarize
from .targets import STEP_CONTEXT, STEP_REQUESTS, all_targets

W3_REQUESTS = 3
# Of `--quick`: so many requests, and tokens of each.
QUICK = {"W1": 6, "W2": 6, "W3": 1, "W4": 1}
QUICK_TOKENS = 6
# Requests of the step reach the context that is asked for halfway through the measured steps.
STEP_PROMPT = STEP_CONTEXT - 18


def main() -> None:
    """Runs what the command line asks for."""
    arguments = parse()
    # However it is ended, the engine that runs is ended with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.perf_counter()
    console = log_console()
    peers = [PEERS[name] for name in arguments.peers.split(",")]
    model = Path(arguments.model) if arguments.model else packaged_model_path()
    place = Place(
        model=model,
        cache=cache_folder() / "bench-cpu",
        cores=tuple(sorted(os.sched_getaffinity(0))),
        sources=digest(ROOT / "hf_paged"),
        log=lambda words: console.print(
            f"{time.perf_counter() - began:6.0f} s  {words}", highlight=False, markup=False
        ),
    )
    store = RunStore(arguments.results, settings(arguments, model, place), arguments.fresh)
    if store.resumed:
        place.log(f"continuing the run begun at {store.run['begun']} (`--fresh` begins anew)")
    base = store.once("workloads.json", lambda: workloads(model, arguments.quick))
    if arguments.prepare:
        prepare_all(peers, place, store, base)
        return
    unavailable = run_rounds(peers, place, store, arguments.rounds, base)
    report(arguments, peers, place, store, unavailable)
    store.finish()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    default = ",".join(name for name, peer in PEERS.items() if peer.by_default)
    parser.add_argument("--peers", default=default, help=f"with commas between; available: {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="a Transformers folder; the packaged model by default")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "bench-cpu", help="folder of the run")
    parser.add_argument("--plot", type=Path, help="where to; by default docs/ for a whole run, else the run's folder")
    parser.add_argument("--json", type=Path, help="where to; by default in the folder of the run")
    parser.add_argument("--fresh", action="store_true", help="do not continue an interrupted run")
    parser.add_argument("--quick", action="store_true", help="a few short requests, to see that everything runs")
    parser.add_argument("--prepare", action="store_true", help="only make environments and start each peer once")
    arguments = parser.parse_args(words)
    unknown = set(arguments.peers.split(",")) - set(PEERS)
    if unknown:
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; available: {', '.join(PEERS)}")
    if arguments.plot is None:
        # A partial run does not replace the figure that the documentation shows.
        is_whole = arguments.peers == default and arguments.rounds >= 3 and not (arguments.quick or arguments.model)
        arguments.plot = (ROOT / "docs" if is_whole else arguments.results) / "bench_cpu.png"
    return arguments


def settings(arguments: argparse.Namespace, model: Path, place: Place) -> dict[str, Any]:
    """Returns what must be the same for an interrupted run to be continued.

    Args:
        arguments (`argparse.Namespace`):
            The command line's.
        model (`Path`):
            The model.
        place (`Place`):
            Where peers run.
    """
    return {
        "model": str(model),
        "cores": list(place.cores),
        "peers": arguments.peers.split(","),
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "benchmarks": digest(ROOT / "benchmarks" / "cpu"),
    }


def digest(folder: Path) -> str:
    """Returns a hash of the source files below a folder.

    Args:
        folder (`Path`):
            The folder.
    """
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    return hashlib.sha256(b"\0".join(str(file).encode() + file.read_bytes() for file in files)).hexdigest()[:16]


def workloads(model: Path, quick: bool = False) -> dict[str, Any]:
    """Returns the prompts of all workloads, as `workers/measure.py` reads them.

    Args:
        model (`Path`):
            A Transformers folder.
        quick (`bool`, defaults to `False`):
            Only a few short requests.
    """
    from transformers import AutoTokenizer

    text = TextTokens.from_tokenizer(AutoTokenizer.from_pretrained(model))
    counts = QUICK if quick else {"W3": W3_REQUESTS}
    found = {name: build_workload(name, text, counts.get(name)) for name in ("W1", "W2", "W3", "W4")}
    found["step"] = Workload("step", [text.cut(STEP_PROMPT) for _ in range(STEP_REQUESTS)], [1] * STEP_REQUESTS)
    first = Workload("first", [text.cut(32)], [1])
    plain = {name: made.to_dict() for name, made in found.items()}
    if quick:
        for made in plain.values():
            made["output_lengths"] = [QUICK_TOKENS] * len(made["output_lengths"])
    return {"workloads": plain, "first": first.to_dict()}


def reference(place: Place, store: RunStore) -> list[dict[str, Any]] | None:
    """Returns the first tokens of W1 in float32, or `None` if they could not be computed.

    Args:
        place (`Place`):
            Where peers run.
        store (`RunStore`):
            The run.
    """
    path = store.folder / "reference.json"
    if not path.exists():
        place.log("first tokens in float32")
        job = store.folder / "reference.job.json"
        base = read_json(store.folder / "workloads.json") or {}
        write_json(job, base | {"model": str(place.model), "threads": len(place.cores)})
        command = [sys.executable, "-m", "benchmarks.cpu.reference", str(job), str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        job.unlink()
        if done.returncode != 0:
            place.log(f"no reference: {done.stderr.strip()[-300:]}")
            return None
    found: list[dict[str, Any]] = (read_json(path) or {})["W1"]
    return found


def report(
    arguments: argparse.Namespace, peers: Sequence[Peer], place: Place, store: RunStore, unavailable: dict[str, str]
) -> None:
    """Prints tables and targets, writes JSON and the plot.

    Args:
        arguments (`argparse.Namespace`):
            The command line's.
        peers (`Sequence[Peer]`):
            Who was measured.
        place (`Place`):
            Where.
        store (`RunStore`):
            The run.
        unavailable (`dict[str, str]`):
            Why some could not run.
    """
    rows = summarize(peers, store, arguments.rounds, reference(place, store))
    machine = machine_medians(store, arguments.rounds)
    prompts = (read_json(store.folder / "workloads.json") or {})["workloads"]["W4"]["prompts"]
    medians = {name: row["medians"] for name, row in rows.items()}
    targets = all_targets(medians, machine, model_costs(place.model), [len(prompt) for prompt in prompts])
    console = output_console()
    print_summary(console, rows, machine, unavailable)
    print_targets(console, targets)
    path = arguments.json or store.folder / "bench_cpu.json"
    content = {"begun": store.run["begun"], "settings": store.run["settings"], "machine": machine, "rows": rows}
    content |= {"targets": [t.to_dict() for t in targets], "unavailable": unavailable}
    write_json(path, content)
    console.print(f"written: {path}, {plot_where_possible(content, arguments.plot)}", highlight=False, markup=False)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
