"""Runs the code blocks of a page as a reader would: in order, Python in one process, servers beside what follows."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import psutil

from tests.documentation.pages import ROOT, Block, Page, shell_lines

PATIENCE = 240.0  # seconds for a block, on a busy machine
_SERVER = re.compile(r"^\s*(?:\w+=\S+\s+)*(?:hf-paged (?:serve|transformers-serve)|python -m hf_paged\.serving)\b")
_DEFAULT_PORT = 8000


class BlockFailedError(AssertionError):
    """A block of a page does not do what a reader expects."""


class Python:
    """A process that runs Python blocks. Pages share it, as importing torch takes seconds, and nothing else.

    Args:
        environment (`Mapping[str, str]`):
            Variables beside this process's own.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._environment = _with_tools(environment)
        self._process: subprocess.Popen[str] | None = None
        self._log = Log()

    def run(self, block: Block, text: str, folder: Path) -> None:
        """Runs a block, with the names that blocks before it in this folder have left."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("python_child.py"))],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log.file,
                text=True,
                start_new_session=True,
            )
        child = self._process
        assert child.stdin is not None and child.stdout is not None
        watchdog = threading.Timer(PATIENCE, child.kill)
        watchdog.start()
        command = {"page": str(block.page), "line": block.line, "text": text, "folder": str(folder.resolve())}
        try:
            child.stdin.write(json.dumps(command) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watchdog.cancel()
        if not answer:
            self.end()
            raise BlockFailedError(
                f"{block.place}: the Python process ended in this block, or it took more than {PATIENCE:.0f} s:\n"
                f"{self._log.tail()}"
            )
        error = json.loads(answer)["error"]
        if error is not None:
            raise BlockFailedError(f"{block.place}: the block raised\n{error}\n{self._log.tail()}")

    def end(self) -> None:
        """Ends the process; the next block starts another."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            _end(self._process)
            self._process = None


class Server:
    """A server that a page starts. One that another page starts by the same words goes on, as starting takes seconds.

    Args:
        environment (`Mapping[str, str]`):
            Variables beside this process's own.
    """

    def __init__(self, environment: Mapping[str, str]):
        self.port = _free_port()
        self._environment = {**_with_tools(environment), "HF_PAGED_PORT": str(self.port)}
        self._process: subprocess.Popen[bytes] | None = None
        self._words: list[str] = []
        self._log = Log()

    def start(self, block: Block, line: str, folder: Path) -> None:
        """Runs a line that starts a server, and waits until it is ready."""
        line = re.sub(r"\s*&?\s*(#.*)?$", "", line)
        words = shlex.split(line)
        if self._process is not None and self._process.poll() is None and words == self._words:
            return
        self.end()
        self._words, self._log = words, Log()
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec env {line}"],
            cwd=folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log.file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + PATIENCE
        while not _is_healthy(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BlockFailedError(f"{block.place}: the server does not start:\n{self.tail()}")
            time.sleep(0.05)

    def tail(self) -> str:
        """The end of what it has logged."""
        return self._log.tail()

    def end(self) -> None:
        """Ends it."""
        if self._process is not None:
            _end(self._process)
            self._process = None


class Machine:
    """What pages have in common: a process for Python, a server, and a place for commands.

    Args:
        environment (`Mapping[str, str]`):
            Variables beside this process's own.
    """

    def __init__(self, environment: Mapping[str, str]):
        self.environment = environment
        self.python = Python(environment)
        self.server = Server(environment)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.end()
        self.python.end()

    def run_page(self, page: Page, folder: Path) -> int:
        """Runs the blocks of a page that are to be run, in an empty folder; returns how many there were."""
        wanted = [block for block in page.blocks if block.treatment == "run"]
        for block in wanted:
            started, used = time.monotonic(), _processor_seconds()
            self._run(block, folder)
            spent = _processor_seconds() - used
            print(f"{time.monotonic() - started:6.1f} s, {spent:5.1f} s of processors  {block.place} {block.language}")
        return len(wanted)

    def _run(self, block: Block, folder: Path) -> None:
        port = rf"\g<1>{self.server.port}"
        text = re.sub(rf"((?:127\.0\.0\.1|localhost):|--port[ =]){_DEFAULT_PORT}\b", port, block.text)
        if block.language == "python":
            self.python.run(block, text, folder)
            return
        lines = shell_lines(text)
        if not any(map(_starts_server, lines)):
            self._run_script(block, text, folder)
            return
        rest: list[str] = []
        for line in lines:
            if _starts_server(line):
                self._run_script(block, "\n".join(rest), folder)
                rest = []
                self.server.start(block, line, folder)
            else:
                rest.append(line)
        self._run_script(block, "\n".join(rest), folder)

    def _run_script(self, block: Block, script: str, folder: Path) -> None:
        if not script:
            return
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env={**_with_tools(self.environment), "HF_PAGED_PORT": str(self.server.port)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            _end(process)
            raise BlockFailedError(f"{block.place}: the block took more than {PATIENCE:.0f} s") from None
        if process.returncode != 0:
            raise BlockFailedError(
                f"{block.place}: exit code {process.returncode}\n{output[-4000:]}\n"
                f"the last server:\n{self.server.tail()}"
            )


def _starts_server(line: str) -> bool:
    return _SERVER.match(line) is not None and not {"-h", "--help", "--stock-help"} & set(line.split())


@functools.cache
def _tools() -> Path:
    """A folder with the commands that pages use, and with what curl reads."""
    folder = Path(tempfile.mkdtemp(prefix="hf_paged_pages_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, words in {"hf-paged": "-m hf_paged.cli", "python": ""}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)
    # A status of HTTP that means failure fails a block, as it disappoints a reader.
    (folder / ".curlrc").write_text(f"fail-with-body\nsilent\nshow-error\nmax-time = {PATIENCE:.0f}\n")
    return folder


def _with_tools(environment: Mapping[str, str]) -> dict[str, str]:
    path = f"{_tools()}{os.pathsep}{os.environ['PATH']}"
    ours = {"PATH": path, "PYTHONPATH": str(ROOT), "CURL_HOME": str(_tools()), "NO_PROXY": "*"}
    return {**_without_port(os.environ), **ours, **environment}


class Log:
    """What a process says, in a file without a name."""

    def __init__(self) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the last process

    def tail(self) -> str:
        """The end of it."""
        descriptor = self.file.fileno()
        return os.pread(descriptor, 4000, max(0, os.fstat(descriptor).st_size - 4000)).decode(errors="replace")


def _without_port(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != "HF_PAGED_PORT"}


def _processor_seconds() -> float:
    """Of all processes that this one has started: on a busy machine, what a block costs."""
    total = sum(os.times()[2:4])
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def _is_healthy(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def _end(process: subprocess.Popen) -> None:
    """Ends a process and all that it started, which are in a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
