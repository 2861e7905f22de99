"""Has the parts run in processes of their own and keeps every row on disk as soon as it is known."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .settings import PLOT_SECONDS, Part, Settings

ROOT = Path(__file__).parents[2]
# A part that did not look at its deadline is ended this long after it.
GRACE_SECONDS = 8.0
SECONDS_BETWEEN_WRITES = 2.0
CHILD = ("-m", "benchmarks.gpu.child")


class Conductor:
    """Runs parts within a total time.

    Args:
        settings (`Settings`):
            Given to every part.
        path (`Path`):
            The results' file.
        seconds (`float`):
            Of the whole run.
        log (`Callable[[str], None]`):
            Told how it goes.
    """

    def __init__(self, settings: Settings, path: Path, seconds: float, log: Callable[[str], None]):
        self.settings, self.path, self.log = settings, path, log
        self._written = 0.0
        self._end = time.monotonic() + seconds - PLOT_SECONDS
        self.results: dict[str, Any] = {"settings": json.loads(settings.to_json()), "parts": {}}

    def run(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Runs all parts and returns the results.

        Args:
            parts (`Sequence[Part]`):
                In this order.
        """
        waiting = list(parts)
        while waiting and self._left() > 1:
            finished = self._run_process(waiting)
            waiting = waiting[finished:]
        for part in waiting:
            self._part(part.name)["error"] = "no time was left"
        self.write()
        return self.results

    def write(self) -> None:
        """Writes the results; whoever reads the file sees all of it or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".writing")
        temporary.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)
        self._written = time.monotonic()

    def _write_now_and_then(self) -> None:
        """Writes within a part: whoever ends the run from outside still finds what was known."""
        if time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
            self.write()

    def _left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _part(self, name: str) -> dict[str, Any]:
        return self.results["parts"].setdefault(name, {"rows": [], "error": None, "seconds": None})

    def _run_process(self, waiting: Sequence[Part]) -> int:
        """Runs as many parts as one process survives; returns how many were begun and have ended."""
        self.write()
        budgets = fit([part.seconds for part in waiting], self._left())
        words = [f"{part.name}:{budget:.1f}" for part, budget in zip(waiting, budgets, strict=True)]
        log_path = self.path.with_suffix(".log")
        with log_path.open("a", encoding="utf-8") as errors:
            process = subprocess.Popen(
                [sys.executable, *CHILD, self.settings.to_json(), str(self.path), *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=variables(self.settings),
                text=True,
                encoding="utf-8",
                start_new_session=True,  # so that what a part starts can be ended with it
            )
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        ended = 0
        try:
            ended = self._follow(process, lines, waiting, budgets)
        finally:
            _end_group(process, patience=5.0 if ended == len(waiting) else 0.0)
        return ended

    def _follow(
        self,
        process: subprocess.Popen[str],
        lines: queue.Queue[str],
        waiting: Sequence[Part],
        budgets: Sequence[float],
    ) -> int:
        started, end = time.monotonic(), 0.0
        for number, (part, budget) in enumerate(zip(waiting, budgets, strict=True)):
            end += budget
            limit = min(started + end + GRACE_SECONDS, self._end)
            begun = number == 0
            while True:
                try:
                    line = lines.get(timeout=max(0.1, limit - time.monotonic()))
                except queue.Empty:
                    self._fail(part.name, f"it was ended after {time.monotonic() - started:.0f} s of its process")
                    return number + 1
                if not line and not begun:  # the part before took the process with it
                    return number
                if not line:
                    self._fail(part.name, f"its process ended with status {process.wait()}")
                    return number + 1
                told = json.loads(line)
                begun = begun or told["part"] == part.name
                if self._take(told) and told["part"] == part.name:
                    break
        return len(waiting)

    def _take(self, told: dict[str, Any]) -> bool:
        """Keeps a line; returns whether it is the end of a part."""
        part = self._part(told["part"])
        if "begun" in told:
            self.log(f"{told['part']} ...")
        elif "row" in told:
            part["rows"].append(told["row"])
            self._write_now_and_then()
            if words := told["row"].get("says"):
                self.log(f"    {words}")
        elif "error" in told:
            self._fail(told["part"], told["error"])
        else:
            part |= {"seconds": told["seconds"], "compiled": told.get("compiled")}
            self.log(f"    {told['part']} took {told['seconds']:.1f} s; kernels compiled meanwhile: {part['compiled']}")
            self.write()
        return "ended" in told

    def _fail(self, name: str, why: str) -> None:
        part = self._part(name)
        part["error"] = f"{part['error']}; {why}" if part["error"] else why
        self.log(f"    {name} FAILED: {why}; see {self.path.with_suffix('.log')}")
        self.write()


def fit(seconds: Sequence[float], left: float) -> list[float]:
    """Returns what each part gets, in proportion if there is too little for all.

    Args:
        seconds (`Sequence[float]`):
            What each part would have.
        left (`float`):
            What there is for all.
    """
    scale = min(1.0, left / sum(seconds))
    return [share * scale for share in seconds]


def variables(settings: Settings) -> dict[str, str]:
    """Returns the environment variables of the processes of a run.

    Args:
        settings (`Settings`):
            What the command line decided.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    given = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if settings.dry_run:
        given |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **given}


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None, "stdout is a pipe"
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def _end_group(process: subprocess.Popen[str], patience: float) -> None:
    try:
        process.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
