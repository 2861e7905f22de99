"""Runs one worker in a process of its own and hands on what it tells, line by line."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any


class WorkerError(Exception):
    """A worker ended or said nothing for too long; the message says what is known."""


def run_worker(
    command: Sequence[str], variables: Mapping[str, str], log: Path, *, start_timeout: float, step_timeout: float
) -> Generator[dict[str, Any], None, None]:
    """Yields the lines of a worker until it has told its end; ends it and all that it started in any case.

    Args:
        command (`Sequence[str]`):
            What to run.
        variables (`Mapping[str, str]`):
            All environment variables.
        log (`Path`):
            Where its stderr goes.
        start_timeout (`float`):
            Seconds until its first line.
        step_timeout (`float`):
            Seconds between later lines.

    Raises:
        WorkerError: If it ends early, or a line takes too long.
    """
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=dict(variables),
            text=True,
            encoding="utf-8",
            # A group of its own, so that the processes that an engine starts can be ended with it.
            start_new_session=True,
        )
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    timeout = start_timeout
    try:
        while True:
            told = _next_line(process, lines, timeout, log)
            timeout = step_timeout
            yield told
            if "ended" in told:
                return
    finally:
        _end_group(process)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None, "stdout is a pipe"
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def _next_line(process: subprocess.Popen[str], lines: queue.Queue[str], timeout: float, log: Path) -> dict[str, Any]:
    try:
        line = lines.get(timeout=timeout)
    except queue.Empty:
        raise WorkerError(f"it did not answer within {timeout:.0f} s; see {log}") from None
    if not line:
        raise WorkerError(f"it ended with status {process.wait()}: {_last_words(log)}; see {log}")
    told: dict[str, Any] = json.loads(line)
    return told


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    # The rest of the group may outlive its leader.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
