"""Correctness: every kernel case on this device, in several processes, which compile all kernels on the way."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ..settings import Run

MAX_PROCESSES = 14


def run(run: Run) -> Iterator[dict[str, Any]]:
    """Yields a row for each case, and how many passed.

    Args:
        run (`Run`):
            What the part is given.
    """
    count = min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
    lines: queue.Queue[tuple[int, str]] = queue.Queue()
    processes = [_start(run, number, count, lines) for number in range(count)]
    waiting: dict[int, list[str]] = {number: [] for number in range(count)}
    passed = failed = 0
    try:
        for row in _follow(run, processes, lines, waiting):
            passed, failed = passed + row["passed"], failed + (not row["passed"])
            yield row
    finally:
        for process in processes:
            process.kill()
            process.wait()
    left = [name for names in waiting.values() for name in names]
    yield {
        "passed_cases": passed,
        "failed_cases": failed,
        "left_out": left,
        "says": f"{passed} kernel cases passed, {failed} failed, {len(left)} were not run for lack of time",
    }


def _start(run: Run, number: int, count: int, lines: queue.Queue[tuple[int, str]]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.case_worker", run.settings.to_json(), str(number), str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")

    def read() -> None:
        assert process.stdout is not None, "stdout is a pipe"
        for line in process.stdout:
            lines.put((number, line))
        lines.put((number, ""))

    threading.Thread(target=read, daemon=True).start()
    return process


def _follow(
    run: Run,
    processes: list[subprocess.Popen[str]],
    lines: queue.Queue[tuple[int, str]],
    waiting: dict[int, list[str]],
) -> Iterator[dict[str, Any]]:
    """Rows as they come, until all processes have ended or the time is over."""
    running = len(processes)
    while running and run.deadline.left():
        try:
            number, line = lines.get(timeout=run.deadline.left())
        except queue.Empty:
            return
        if not line:
            running -= 1
            status = processes[number].wait()
            if waiting[number] or status:
                lost = waiting[number].pop(0) if waiting[number] else f"start of process {number}"
                why = f"its process ended with status {status}"
                yield {"case": lost, "passed": False, "why": why, "says": f"FAILED: {lost}: {why}"}
            continue
        told = json.loads(line)
        if "jobs" in told:
            waiting[number] = told["jobs"]
            continue
        waiting[number].remove(told["case"])
        if not told["passed"]:
            told["says"] = f"FAILED: {told['case']}: {told.get('why', told.get('error'))}"
        yield told
