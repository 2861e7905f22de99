"""The command line of each gateway's `run.py`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cpu.environments import PeerUnavailableError
from benchmarks.serving.servers import RunningServer, end_servers_when_terminated
from hf_paged.errors import HfPagedError
from hf_paged.tools.bench.report import log_console, output_console, write_json
from hf_paged.tools.packaged_model import packaged_model_path

from .checks import QUICK, Findings, Size, check
from .load import Client
from .report import make_report
from .servers import MAX_NUM_SEQS, MODEL_NAME, NUM_SERVERS, QUEUE_LIMIT, Engines, our_servers

DEMO = "default"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a gateway is started with.

    Args:
        environment (`Path`):
            Where it is installed.
        servers (`Sequence[RunningServer]`):
            Ours, which answer already.
        folder (`Path`):
            Empty, for its files and logs; removed at the end unless `--keep` names it.
        recommended (`bool`):
            Whether it runs with the settings that we recommend, or with its own defaults.
    """

    environment: Path
    servers: Sequence[RunningServer]
    folder: Path
    recommended: bool


@dataclasses.dataclass(frozen=True)
class Front:
    """A gateway that answers.

    Args:
        url (`str`):
            Without `/v1`.
        model (`str`):
            What our model is called there.
        headers (`dict[str, str]`):
            For each request.
    """

    url: str
    model: str = MODEL_NAME
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Gateway:
    """What is particular to a gateway.

    Args:
        title (`str`):
            Name and version.
        prepare (`Callable`):
            Makes its environment at the first call and returns its folder; gets a function for words to a person.
        start (`Callable`):
            A context in which it runs.
        known (`tuple[str, ...]`):
            What it does that a reader of the table should know.
    """

    title: str
    prepare: Callable[[Callable[[str], None]], Path]
    start: Callable[[Setup], AbstractContextManager[Front]]
    known: tuple[str, ...] = ()


def main(gateway: Gateway, words: Sequence[str] | None = None) -> int:
    """Runs everything and returns the exit code: 0 if nothing was lost and no blackout followed, else 1.

    Args:
        gateway (`Gateway`):
            Which one.
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    end_servers_when_terminated()
    arguments = _parse(gateway, words)
    log = _logger()
    try:
        with _folder(arguments.keep) as folder:
            found = _run(gateway, arguments, folder, log)
        report = make_report(_title(gateway, arguments), found, _setting(arguments))
        report.notes += gateway.known
        report.print(output_console())
        if arguments.json:
            write_json(arguments.json, report.to_dict())
    except KeyboardInterrupt:
        log("stopped; all that was started has been ended")
        return 130
    except (PeerUnavailableError, HfPagedError, OSError, RuntimeError, httpx.HTTPError) as error:
        log(f"{gateway.title}: {error or type(error).__name__}")
        return 1
    return 1 if found.problems() else 0


def _parse(gateway: Gateway, words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"{gateway.title} in front of two of our servers, and a spike of load."
    )
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--model", metavar="PATH", type=Path, help="a Transformers folder")
    models.add_argument("--demo", choices=(DEMO,), default=DEMO, help="the packaged model (this is the default)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there, too")
    parser.add_argument("--quick", action="store_true", help="less steady load")
    parser.add_argument("--gateway-defaults", action="store_true", help="without the settings that we recommend")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep configuration and logs there")
    arguments = parser.parse_args(words)
    if arguments.model is not None and not (arguments.model / "config.json").exists():
        parser.error(f"--model: {str(arguments.model)!r} is no Transformers folder: it has no config.json")
    return arguments


def _logger() -> Callable[[str], None]:
    console = log_console()

    def log(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    return log


def _folder(keep: Path | None) -> AbstractContextManager[Path]:
    if keep is None:
        return _TemporaryFolder()
    keep.mkdir(parents=True, exist_ok=True)
    return contextlib.nullcontext(keep.absolute())


class _TemporaryFolder(tempfile.TemporaryDirectory):
    def __enter__(self) -> Any:
        return Path(super().__enter__())


def _run(gateway: Gateway, arguments: argparse.Namespace, folder: Path, log: Callable[[str], None]) -> Findings:
    environment = gateway.prepare(log)
    model = arguments.model or packaged_model_path()
    log(f"starting {NUM_SERVERS} servers, then {gateway.title}")
    with our_servers(model, folder) as servers:
        setup = Setup(environment, servers, folder, not arguments.gateway_defaults)
        with gateway.start(setup) as front:
            return asyncio.run(_check(front, servers, QUICK if arguments.quick else Size(), log))


async def _check(front: Front, servers: Sequence[RunningServer], size: Size, log: Callable[[str], None]) -> Findings:
    async with Client(front.url, front.model, front.headers) as client:
        return await check(client, Engines(servers), size, log)


def _title(gateway: Gateway, arguments: argparse.Namespace) -> str:
    settings = "its own defaults" if arguments.gateway_defaults else "our settings"
    return f"{gateway.title} with {settings}, in front of {NUM_SERVERS} hf_paged servers"


def _setting(arguments: argparse.Namespace) -> str:
    model = arguments.model.name if arguments.model else "SmolLM2-135M-Instruct"
    cores, busy = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return (
        f"{model}, {MAX_NUM_SEQS} running and {QUEUE_LIMIT} queued requests at most in each server; "
        f"{cores} cores, load average {busy:.1f}"
    )


def end(gateway: Gateway) -> None:
    """Runs a gateway's example and ends the process with its exit code.

    Args:
        gateway (`Gateway`):
            Which one.
    """
    sys.exit(main(gateway))
