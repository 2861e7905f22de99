"""The rounds: every peer in turn, one process at a time, everything kept on disk as soon as it is known."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .environments import PeerUnavailableError, make_environment
from .models import WORKERS, convert_model
from .peers import OURS, Peer
from .process import WorkerError, run_worker
from .store import RunStore, write_json

ROOT = Path(__file__).parents[2]
# The first start of an engine may compile its kernels.
FIRST_START_TIMEOUT = 900.0
START_TIMEOUT = 400.0
STEP_TIMEOUT = 300.0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where peers run and with what.

    Args:
        model (`Path`):
            A Transformers folder.
        cache (`Path`):
            Environments, converted models and compiled programs.
        cores (`tuple[int, ...]`):
            The cores of the affinity mask; every peer gets as many threads.
        sources (`str`):
            Hash of the project's sources: what other ones did is not kept when a run is continued.
        log (`Callable[[str], None]`):
            Told what is being done.
    """

    model: Path
    cache: Path
    cores: tuple[int, ...]
    sources: str
    log: Callable[[str], None]

    def environment(self, name: str) -> Path:
        """Returns the folder of an environment.

        Args:
            name (`str`):
                Key of `environments.ENVIRONMENTS`.
        """
        return make_environment(name, self.cache, self.log)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A peer that can be started.

    Args:
        peer (`Peer`):
            The peer.
        python (`str`):
            Its interpreter.
        options (`dict[str, Any]`):
            For its engine.
        variables (`dict[str, str]`):
            All environment variables.
    """

    peer: Peer
    python: str
    options: dict[str, Any]
    variables: dict[str, str]


def prepare(peer: Peer, place: Place) -> Prepared:
    """Makes what a peer needs: its environment, the model in its format, its variables.

    Args:
        peer (`Peer`):
            The peer.
        place (`Place`):
            Where it runs.

    Raises:
        PeerUnavailableError: If it cannot run here.
    """
    python, options = sys.executable, dict(peer.options)
    environment = place.environment(peer.environment) if peer.environment else None
    if environment:
        python = str(environment / "bin" / "python")
    if peer.model_format:
        options["model"] = str(convert_model(peer.model_format, place.model, place.cache, place.environment, place.log))
    words = {"environment": environment, "cache": place.cache, "cores": ",".join(map(str, place.cores))}
    threads = str(len(place.cores))
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
        **{name: value.format(**words) for name, value in peer.variables.items()},
    }
    if not peer.environment:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    preload = [str(environment / name) for name in peer.preload if environment and (environment / name).exists()]
    if preload:
        variables["LD_PRELOAD"] = ":".join(filter(None, [*preload, os.environ.get("LD_PRELOAD")]))
    return Prepared(peer, python, options, variables)


def measure_peer(prepared: Prepared, place: Place, store: RunStore, number: int, base: dict[str, Any]) -> None:
    """Runs one peer's part of a round and keeps what it did.

    Args:
        prepared (`Prepared`):
            The peer.
        place (`Place`):
            Where it runs.
        store (`RunStore`):
            The run.
        number (`int`):
            The round, from 1; 0 only starts the peer once, so that what it compiles is there.
        base (`dict[str, Any]`):
            Workloads, as `workers/measure.py` reads them.
    """
    peer = prepared.peer
    steps = [step for step in peer.steps if number and step.only_round in (None, number)]
    folder = store.folder / f"round-{number}"
    job = base | {
        "model": str(place.model),
        "threads": len(place.cores),
        "options": prepared.options,
        "steps": [{"workload": step.workload, "options": step.options} for step in steps],
    }
    job_file = folder / f"{peer.name}.job.json"
    write_json(job_file, job)
    result: dict[str, Any] = {"workloads": {}, "errors": {}, "sources": _sources(peer, place)}
    begin = time.perf_counter()
    lines = run_worker(
        [prepared.python, str(WORKERS / peer.worker), str(job_file)],
        prepared.variables,
        folder / f"{peer.name}.log",
        start_timeout=START_TIMEOUT if number else FIRST_START_TIMEOUT,
        step_timeout=STEP_TIMEOUT,
    )
    try:
        for told in lines:
            take(result, told)
    except WorkerError as error:
        result["errors"]["process"] = str(error)
    finally:
        lines.close()
        job_file.unlink(missing_ok=True)
    result["wall_seconds"] = time.perf_counter() - begin
    store.put_result(number, peer.name, result)


def take(result: dict[str, Any], told: dict[str, Any]) -> None:
    """Puts a line of a worker where it belongs.

    Args:
        result (`dict[str, Any]`):
            What is known of the peer in this round.
        told (`dict[str, Any]`):
            The line.
    """
    if "error" in told:
        result["errors"][told["workload"]] = told["error"]
    elif "workload" in told:
        result["workloads"][told["workload"]] = told["result"]
    else:
        result |= told


def run_rounds(
    peers: Sequence[Peer], place: Place, store: RunStore, rounds: int, base: dict[str, Any]
) -> dict[str, str]:
    """Measures all peers in alternating rounds and returns why some could not run, by name.

    Args:
        peers (`Sequence[Peer]`):
            Who is measured, in this order.
        place (`Place`):
            Where they run.
        store (`RunStore`):
            The run; what it has already is not measured again.
        rounds (`int`):
            How many.
        base (`dict[str, Any]`):
            Workloads, as `workers/measure.py` reads them.
    """
    ready, unavailable = prepare_all(peers, place, store, base)
    for number in range(1, rounds + 1):
        store.once(f"round-{number}/machine.json", lambda: probe_machine(place))
        for prepared in ready:
            if not _is_known(store, number, prepared.peer, place):
                place.log(f"round {number} of {rounds}: {prepared.peer.title}")
                measure_peer(prepared, place, store, number, base)
                tell_result(place, store.result(number, prepared.peer.name) or {})
    return unavailable


def prepare_all(
    peers: Sequence[Peer], place: Place, store: RunStore, base: dict[str, Any]
) -> tuple[list[Prepared], dict[str, str]]:
    """Prepares all peers and starts each once; returns those that answered, and why the others did not.

    Args:
        peers (`Sequence[Peer]`):
            Who is measured.
        place (`Place`):
            Where they run.
        store (`RunStore`):
            The run.
        base (`dict[str, Any]`):
            Workloads, as `workers/measure.py` reads them.
    """
    ready: list[Prepared] = []
    unavailable: dict[str, str] = {}
    for peer in peers:
        try:
            prepared = prepare(peer, place)
        except (PeerUnavailableError, OSError, subprocess.SubprocessError) as error:
            unavailable[peer.name] = str(error)
        else:
            # Rows of one worker differ in little: one start shows whether it runs, and compiles what it compiles.
            first = next(p for p in peers if (p.worker, p.environment) == (peer.worker, peer.environment))
            if peer == first and not _is_known(store, 0, peer, place):
                place.log(f"first start of {peer.title}")
                measure_peer(prepared, place, store, 0, base)
            trial = store.result(0, first.name) or {"errors": {}}
            if "started" in trial:
                ready.append(prepared)
            else:
                unavailable[peer.name] = trial["errors"].get("process", f"{first.title} cannot run")
        if peer.name in unavailable:
            place.log(f"{peer.title} cannot run: {unavailable[peer.name]}")
    return ready, unavailable


def _is_known(store: RunStore, number: int, peer: Peer, place: Place) -> bool:
    result = store.result(number, peer.name)
    return result is not None and result["sources"] == _sources(peer, place)


def _sources(peer: Peer, place: Place) -> str | None:
    return place.sources if peer.name == OURS else None


def probe_machine(place: Place) -> dict[str, Any]:
    """Returns what the machine can do right now, measured in a process of its own.

    Args:
        place (`Place`):
            Where the compiled program is kept.
    """
    command = [sys.executable, "-m", "benchmarks.cpu.probe", str(place.cache)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"the probe of the machine failed: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    place.log(
        f"reads {found['read_bandwidth'] / 1e9:.1f} GB/s, FMA {(found['fma_peak'] or 0) / 1e9:.0f} GFLOP/s, "
        f"bf16 {(found['bf16_peak'] or 0) / 1e9:.0f} GFLOP/s, load {found['load_average']:.1f}"
    )
    return found


def tell_result(place: Place, result: dict[str, Any]) -> None:
    """Logs what a peer did.

    Args:
        place (`Place`):
            Where to.
        result (`dict[str, Any]`):
            What it did.
    """
    parts = []
    for name, values in result.get("workloads", {}).items():
        if "output_tokens_per_s" in values and name in ("W1", "W2"):
            parts.append(f"{name} {values['output_tokens_per_s']:.1f} tok/s")
        elif "seconds_per_token" in values:
            parts.append(f"{name} {values['seconds_per_token'] * 1e3:.1f} ms/token")
        elif name == "W4":
            parts.append(f"W4 {values['all_first_tokens_seconds']:.1f} s")
        else:
            parts.append(f"{name} {values['seconds'] * 1e3:.1f} ms")
    parts += [f"{name} failed: {error}" for name, error in result.get("errors", {}).items()]
    place.log(f"    {', '.join(parts)} ({result.get('wall_seconds', 0):.0f} s)")
