"""Starts stock Transformers in a process of its own and asks it to measure."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

from ...errors import EngineError
from .baselines import BUDGET_SECONDS, BaselineResult
from .workloads import Workload

LOAD_TIMEOUT_SECONDS = 600.0
# Stock code is only asked to stop between two steps, and a step over long prompts can take a while.
GRACE_SECONDS = 300.0


class NoAnswerError(EngineError):
    """Stock Transformers takes longer for a workload than anybody waits."""


class StockTransformers:
    """A process with a stock model; use it in a `with` statement.

    Args:
        model (`str`):
            Path or hub id.
        dtype (`str`):
            Name of the dtype, such as `"bfloat16"`.
        threads (`int`):
            Threads that torch uses there.

    Raises:
        EngineError: If the model cannot be loaded.
    """

    def __init__(self, model: str, dtype: str, threads: int):
        # Logs of the process are kept back and shown only if it fails; they would tear our progress bar apart.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hf_paged.tools.bench.baselines"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._ask({"name": model, "dtype": dtype, "threads": threads}, LOAD_TIMEOUT_SECONDS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StockTransformers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def measure(
        self, method: str, workload: Workload, *, budget: float = BUDGET_SECONDS, sample: int | None = None
    ) -> BaselineResult:
        """Returns how stock Transformers does on a workload.

        Args:
            method (`str`):
                `"one_by_one"`, `"static_batch"` or `"generate_batch"`.
            workload (`Workload`):
                All requests.
            budget (`float`, defaults to 40.0):
                Seconds after which it stops and is extrapolated.
            sample (`int`, *optional*):
                Requests to run where a sample will do; by default all.

        Raises:
            NoAnswerError: If it does not answer in time; the process is of no further use.
            EngineError: If it fails.
        """
        sample = len(workload) if sample is None else sample
        job = {"method": method, "workload": workload.to_dict(), "budget": budget, "sample": sample}
        return BaselineResult(**self._ask(job, budget + GRACE_SECONDS))

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            # With its input closed it ends on its own, unless it is in the middle of something.
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None, "stdout is a pipe"
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _ask(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert self._process.stdin is not None, "stdin is a pipe"
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise NoAnswerError(f"Stock Transformers did not answer within {timeout:.0f} s; it was stopped.") from None
        except OSError:
            line = ""
        if not line:
            raise EngineError(
                f"The process that runs stock Transformers ended (exit code {self._process.wait()}), "
                "probably for lack of memory; try a smaller model."
            )
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"Stock Transformers failed: {answer['error']}")
        return answer
