"""The server beside its own engine: throughput with many requests, time to the first token with one.

The engine offline runs beside a process that is as busy as the server's client was, since both machines' cores are
shared with a client.

    python -m benchmarks.serving.saturation
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_paged.tools.bench.report import log_console, output_console, write_json
from hf_paged.tools.bench.workloads import mixed_lengths, single_stream
from hf_paged.tools.packaged_model import packaged_model_path

from ..cpu.driver import ROOT
from ..target import Target
from .loads import Load, Texts, bodies_of, send, send_load, without_details
from .servers import end_group, end_servers_when_terminated, make_parser, our_command, serving

ALONE = 21
TIMEOUT = 900.0


def main() -> None:
    """Runs what the command line asks for."""
    end_servers_when_terminated()
    arguments = parse()
    console, log = output_console(), log_console()
    model = Path(arguments.model) if arguments.model else packaged_model_path()
    rounds = []
    for number in range(arguments.rounds):
        job = make_job(model, arguments.count, number)
        server = measure_server(model, job, arguments.results / f"saturation-{number + 1}-server.log")
        offline = measure_offline(job, server["client_share"], arguments.results, number)
        rounds.append({"server": server, "offline": offline, "load_average": os.getloadavg()[0]})
        log.print(f"round {number + 1}: {describe(rounds[-1])}", highlight=False)
    ratio = statistics.median(r["server"]["throughput"] / statistics.median(r["offline"]["throughput"]) for r in rounds)
    more = statistics.median(median_ms(r["server"]) - median_ms(r["offline"]) for r in rounds)
    targets = [
        Target(f"throughput of {arguments.count} requests at once against the engine offline", 0.9, True, ratio),
        Target("time to the first token of one request: ms more than offline", 10.0, False, more),
    ]
    for target in targets:
        console.print(target.describe(), highlight=False, markup=False)
    content = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "rounds": rounds}
    write_json(arguments.results / "saturation.json", content | {"targets": [t.to_dict() for t in targets]})


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    parser = make_parser("saturation", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=64, help="requests at once")
    return parser.parse_args(words)


def make_job(model: Path, count: int, seed: int) -> dict[str, Any]:
    """Returns what both are asked.

    Args:
        model (`Path`):
            A Transformers folder.
        count (`int`):
            Requests at once.
        seed (`int`):
            The round.
    """
    texts = Texts(model, seed)
    works = [mixed_lengths(texts.ring, count) for count in (8, count)]
    warm_up, work = ({"prompts": texts.of(found), "lengths": found.output_lengths} for found in works)
    alone = texts.of(single_stream(texts.ring, ALONE))
    return {"model": str(model), "warm_up": warm_up, "workloads": [work], "alone": alone}


def measure_server(model: Path, job: dict[str, Any], log: Path) -> dict[str, Any]:
    """Returns throughput and times to the first token of the server, and how busy its client was.

    Args:
        model (`Path`):
            A Transformers folder.
        job (`dict[str, Any]`):
            What is asked.
        log (`Path`):
            Where its words go.
    """
    with serving(our_command(model, "--dtype", "bfloat16"), log) as server:
        name = server.model()["id"]
        for work in (job["warm_up"], job["workloads"][0]):
            figures = send_load(server.url, Load("", len(work["prompts"])), work["prompts"], work["lengths"], name)
        assert not figures["failed"], f"requests failed: {figures['error_kinds']}"
        bodies = bodies_of(job["alone"], [8] * len(job["alone"]), name)
        alone = [send(server.url, [body], [0.0])["records"][0].ttft for body in bodies]
    return {
        "throughput": figures["output_throughput"],
        "client_share": figures["client_cpu_seconds"] / figures["duration"],
        "first_token": alone,
        "figures": without_details(figures),
    }


def measure_offline(job: dict[str, Any], share: float, folder: Path, number: int) -> dict[str, Any]:
    """Returns what `offline_worker.py` found, beside a process as busy as the client.

    Args:
        job (`dict[str, Any]`):
            What is asked.
        share (`float`):
            How much of a core the client took.
        folder (`Path`):
            Where files go.
        number (`int`):
            The round.
    """
    path = folder / f"saturation-{number + 1}.job.json"
    write_json(path, job)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with busy(share):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.serving.offline_worker", str(path)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip
    path.unlink()
    if done.returncode != 0:
        raise RuntimeError(f"the engine offline failed: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def busy(share: float) -> Iterator[None]:
    """Keeps a share of a core busy.

    Args:
        share (`float`):
            At most 1.
    """
    words = [sys.executable, "-m", "benchmarks.serving.busy_worker", str(min(1.0, share))]
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True)
    try:
        yield
    finally:
        end_group(process)


def median_ms(found: dict[str, Any]) -> float:
    """Returns the median time to the first token in ms.

    Args:
        found (`dict[str, Any]`):
            Of the server or offline.
    """
    return statistics.median(found["first_token"]) * 1e3


def describe(found: dict[str, Any]) -> str:
    """Returns a round in words.

    Args:
        found (`dict[str, Any]`):
            The round.
    """
    server, offline = found["server"], found["offline"]
    return (
        f"server {server['throughput']:.1f}, offline {offline['throughput'][0]:.1f} tok/s; first token "
        f"{median_ms(server):.2f} and {median_ms(offline):.2f} ms; client {server['client_share']:.1%} of a core; "
        f"load {found['load_average']:.1f}"
    )


if __name__ == "__main__":
    main()
