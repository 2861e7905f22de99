"""Runs the code blocks of a page as a reader would: in order, Python in one process, servers beside what follows."""

from __future__ import annotations

import json
import os
import re
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

from tests.documentation.pages import ROOT, Block, Page, shell_lines

PATIENCE = 240.0  # seconds for a block, on a busy machine
_SERVER = re.compile(r"^\s*(?:\w+=\S+\s+)*(?:hf-paged (?:serve|transformers-serve)|python -m hf_paged\.serving)\b")
_DEFAULT_PORT = 8000


class BlockFailedError(AssertionError):
    """A block of a page does not do what a reader expects."""


class PageRun:
    """One reading of a page, with a folder of its own for what blocks write.

    Args:
        folder (`Path`):
            An empty folder, in which everything runs.
        environment (`Mapping[str, str]`):
            Variables beside this process's own.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]):
        self.folder = folder
        self.port = _free_port()
        tools = folder / "bin"
        tools.mkdir()
        for name, words in {"hf-paged": "-m hf_paged.cli", "python": ""}.items():
            script = tools / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            script.chmod(0o755)
        # A status of HTTP that means failure fails a block, as it disappoints a reader.
        (folder / ".curlrc").write_text(f"fail-with-body\nsilent\nshow-error\nmax-time = {PATIENCE:.0f}\n")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_PAGED_PORT")},
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CURL_HOME": str(folder),
            "HF_PAGED_PORT": str(self.port),
            "NO_PROXY": "*",
            **environment,
        }
        self._python: subprocess.Popen[str] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._logs: dict[str, IO[bytes]] = {}

    def __enter__(self) -> PageRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_server()
        if self._python is not None:
            assert self._python.stdin is not None
            self._python.stdin.close()
            _end(self._python)
        for log in self._logs.values():
            log.close()

    def run_page(self, page: Page) -> int:
        """Runs the blocks of a page that are to be run; returns how many there were."""
        wanted = [block for block in page.blocks if block.treatment == "run"]
        for block in wanted:
            started = time.monotonic()
            self.run(block)
            print(f"{time.monotonic() - started:6.1f} s  {block.place} {block.language}")
        return len(wanted)

    def run(self, block: Block) -> None:
        """Runs one block, after those before it."""
        text = re.sub(rf"((?:127\.0\.0\.1|localhost):|--port[ =]){_DEFAULT_PORT}\b", rf"\g<1>{self.port}", block.text)
        if block.language == "python":
            self._run_python(block, text)
        else:
            self._run_bash(block, text)

    # ------------------------------------------------------------------ Python

    def _run_python(self, block: Block, text: str) -> None:
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("python_child.py"))],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log("python"),
                text=True,
                start_new_session=True,
            )
        child = self._python
        assert child.stdin is not None and child.stdout is not None
        watchdog = threading.Timer(PATIENCE, child.kill)
        watchdog.start()
        try:
            child.stdin.write(json.dumps({"page": str(block.page), "line": block.line, "text": text}) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watchdog.cancel()
        if not answer:
            raise BlockFailedError(
                f"{block.place}: the Python process ended in this block, or it took more than {PATIENCE:.0f} s:\n"
                f"{self._tail('python')}"
            )
        error = json.loads(answer)["error"]
        if error is not None:
            raise BlockFailedError(f"{block.place}: the block raised\n{error}\n{self._tail('python')}")

    # ------------------------------------------------------------------ bash and servers

    def _run_bash(self, block: Block, text: str) -> None:
        lines, rest = shell_lines(text), []
        for line in lines:
            if _SERVER.match(line) and "--help" not in line and "--stock-help" not in line:
                self._run_script(block, "\n".join(rest))
                rest = []
                self._start_server(block, line)
            else:
                rest.append(line)
        self._run_script(block, text if len(rest) == len(lines) else "\n".join(rest))

    def _run_script(self, block: Block, script: str) -> None:
        if not script.strip():
            return
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment,
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
            server = f"\nthe server's log:\n{self._tail('server')}" if self._server is not None else ""
            raise BlockFailedError(f"{block.place}: exit code {process.returncode}\n{output[-4000:]}{server}")

    def _start_server(self, block: Block, line: str) -> None:
        self._end_server()
        self._server = subprocess.Popen(
            ["bash", "-c", f"exec {line.strip().rstrip('&')}"] if "=" not in line.split()[0] else ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log("server"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + PATIENCE
        while not _is_healthy(self.port):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise BlockFailedError(f"{block.place}: the server does not start:\n{self._tail('server')}")
            time.sleep(0.05)

    def _end_server(self) -> None:
        if self._server is not None:
            _end(self._server)
            self._server = None

    # ------------------------------------------------------------------ what they say

    def _log(self, name: str) -> IO[bytes]:
        if name not in self._logs:
            self._logs[name] = tempfile.TemporaryFile(dir=self.folder)
        return self._logs[name]

    def _tail(self, name: str) -> str:
        if name not in self._logs:
            return ""
        log = self._logs[name]
        size = os.fstat(log.fileno()).st_size
        return os.pread(log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")


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
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
