"""Compiles in several processes at once: a compiler that crashes or hangs costs one job, not the run."""

from __future__ import annotations

import collections
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .environments import FOLDER, ROOT, TritonInstall

JOB_TIMEOUT = 240.0
WORKER = ("-m", "benchmarks.gates.worker")


class CompilerProcess:
    """One `worker.py` under one version of Triton; started at its first job, and again after a crash.

    Args:
        triton (`TritonInstall`):
            The version.
    """

    def __init__(self, triton: TritonInstall):
        self.triton = triton
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a job; of one that the process does not survive, an error.

        Args:
            job (`dict[str, Any]`):
                As `worker.py` reads it.
        """
        process = self._process or self._start()
        assert process.stdin is not None, "stdin is a pipe"
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = self._lines.get(timeout=JOB_TIMEOUT)
        except queue.Empty:
            process.kill()
            return {"error": f"took longer than {JOB_TIMEOUT:.0f} s", **self._stop()}
        except OSError:
            line = ""
        if not line:
            return {"error": f"the compiler ended with status {process.wait()}", **self._stop()}
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the process."""
        self._stop()

    def _start(self) -> subprocess.Popen[str]:
        self._lines = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, *WORKER, str(FOLDER / "figures")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What compilers print to it is shown where they fail, as the error.
            stderr=(FOLDER / "worker.log").open("a", encoding="utf-8"),
            env=self.triton.variables(),
            cwd=ROOT,
            text=True,
            encoding="utf-8",
        )
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()
        return self._process

    def _stop(self) -> dict[str, Any]:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None, "stdin is a pipe"
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return {}


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None, "stdout is a pipe"
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def list_variants(triton: TritonInstall) -> list[dict[str, Any]]:
    """Returns the names, kernels and architectures of all variants.

    Args:
        triton (`TritonInstall`):
            The version under which the modules of kernels are imported.

    Raises:
        RuntimeError: If they cannot be imported.
    """
    process = CompilerProcess(triton)
    try:
        found = process.ask({"list": True})
    finally:
        process.close()
    if "error" in found:
        raise RuntimeError(
            f"the lists of kernels cannot be read with Triton {triton.full_version}: {found['error']}; "
            f"see {FOLDER / 'worker.log'}"
        )
    variants: list[dict[str, Any]] = found["variants"]
    return variants


def compile_all(
    jobs: Sequence[dict[str, Any]],
    triton: TritonInstall,
    num_processes: int,
    progress: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Returns a row for each job.

    Args:
        jobs (`Sequence[dict[str, Any]]`):
            `{"variant": name, "target": architecture}` each.
        triton (`TritonInstall`):
            The version that compiles.
        num_processes (`int`):
            Processes at the same time.
        progress (`Callable[[dict[str, Any]], None]`):
            Told each row when it is known.
    """
    waiting = collections.deque(enumerate(jobs))
    rows: dict[int, dict[str, Any]] = {}

    def work() -> None:
        process = CompilerProcess(triton)
        try:
            while True:
                try:
                    index, job = waiting.popleft()
                except IndexError:
                    return
                found = process.ask(job)
                rows[index] = {"name": job["variant"], "target": job["target"], "version": triton.version, **found}
                progress(rows[index])
        finally:
            process.close()

    threads = [threading.Thread(target=work) for _ in range(min(num_processes, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[index] for index in sorted(rows)]
