"""Processes of `hf-paged` for tests: with files, pipes or a terminal of their own; see `zygote.py`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds; a machine may be busy
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


class Zygote:
    """Starts processes that share what it has imported.

    Args:
        folder (`Path`):
            For the files of its processes.
        environment (`Mapping[str, str]`):
            Of all of them, beside this process's own.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]):
        self.folder = folder
        self._count = 0
        self._started: list[CliProcess] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.zygote"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def start(self, *arguments: Any, **how: Any) -> CliProcess:
        """Starts `hf-paged` with arguments; `how` is that of `CliProcess`."""
        self._count += 1
        folder = self.folder / f"process{self._count}"
        folder.mkdir()
        process = CliProcess(self._hand_over, folder, [str(argument) for argument in arguments], **how)
        self._started.append(process)
        return process

    def run(self, *arguments: Any, **how: Any) -> CliProcess:
        """Starts `hf-paged` and waits for its end."""
        process = self.start(*arguments, **how)
        process.wait()
        return process

    def _hand_over(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> None:
        """Takes no more jobs, and kills what tests that failed have left running."""
        for process in self._started:
            if not process.has_ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the leader of a session of its own
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)


class CliProcess:
    """One process.

    Args:
        hand_over (`Callable`):
            Takes a job and returns the process's id.
        folder (`Path`):
            For its files, and where it runs.
        arguments (`list[str]`):
            Behind `hf-paged`.
        stdin (`str` or `Path`):
            What it reads: a text, or the path of a file or a pipe.
        stdout (`Path`, *optional*):
            Where it writes to, in place of a file.
        columns (`int`, *optional*):
            Gives it a terminal of so many.
        environment (`Mapping[str, str]`, *optional*):
            Variables of its own.
        within (`Path`, *optional*):
            The folder that it runs in.
    """

    def __init__(
        self,
        hand_over: Any,
        folder: Path,
        arguments: list[str],
        *,
        stdin: str | Path = "",
        stdout: Path | None = None,
        columns: int | None = None,
        environment: Mapping[str, str] | None = None,
        within: Path | None = None,
    ):
        self.folder = folder
        self._screen = b""
        self._master = -1
        variables = dict(environment or {})
        files = {name: str(folder / name) for name in ("stdout", "stderr", "exit_code")}
        if stdout is not None:
            files["stdout"] = str(stdout)
        (folder / "stdin").write_text(stdin if isinstance(stdin, str) else "")
        files["stdin"] = str(folder / "stdin" if isinstance(stdin, str) else stdin)
        terminal = None
        if columns is not None:
            self._master, slave = pty.openpty()
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
            terminal = os.ttyname(slave)
            variables |= {"COLUMNS": str(columns), "TERM": variables.get("TERM", "xterm")}
        job = {
            "arguments": arguments,
            "environment": variables,
            "folder": str(within or folder),
            "terminal": terminal,
            **files,
        }
        self._files = files
        self.pid = hand_over(job)
        if columns is not None:
            threading.Thread(target=self._read, daemon=True).start()
            self._slave = slave

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while piece := os.read(self._master, 4096):
                self._screen += piece

    # ------------------------------------------------------------------ what it says

    @property
    def stdout(self) -> str:
        """What it has written to its standard output."""
        return self._written("stdout")

    @property
    def stderr(self) -> str:
        """What it has written to its standard error."""
        return self._written("stderr")

    def _written(self, name: str) -> str:
        file = Path(self._files[name])
        return file.read_text(encoding="utf-8") if file.exists() else ""  # its process may not have begun yet

    @property
    def raw(self) -> bytes:
        """What its terminal has got."""
        return self._screen

    @property
    def screen(self) -> str:
        """What its terminal has got, without colours and cursor movements."""
        return _ESCAPES.sub("", self._screen.decode(errors="replace")).replace("\r\n", "\n")

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Waits until its terminal shows a text behind a position; returns the position behind it."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.screen[after:]:
            assert time.monotonic() < deadline and not self.has_ended, f"no {text!r} in {self.screen!r}"
            time.sleep(0.01)
        return self.screen.index(text, after) + len(text)

    # ------------------------------------------------------------------ what it is told

    def type(self, text: str) -> None:
        """Types into its terminal."""
        os.write(self._master, text.encode())

    def say(self, line: str, *, then: str) -> str:
        """Types a line, waits for a text, and returns the screen from the line on."""
        before = len(self.screen)
        self.type(line + "\n")
        end = self.wait_for(then, after=before)
        return self.screen[before:end]

    def signal(self, number: int = signal.SIGINT) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    # ------------------------------------------------------------------ its end

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return Path(self._files["exit_code"]).exists()

    def wait(self) -> int:
        """Waits for its end and returns its exit code; nothing that it started may be left."""
        deadline = time.monotonic() + PATIENCE
        while not self.has_ended:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"it does not end: {self._tail()}")
            time.sleep(0.01)
        assert not self.left_behind(), "processes are left"
        return self.exit_code

    def left_behind(self) -> list[int]:
        """The processes of its session."""
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if os.getsid(pid) == self.pid:
                    found.append(pid)
        return found

    @property
    def exit_code(self) -> int:
        """Its exit code."""
        return int(Path(self._files["exit_code"]).read_text())

    def _tail(self) -> str:
        return self.screen[-2000:] if self._master >= 0 else self.stderr[-2000:]
