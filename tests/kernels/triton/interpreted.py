"""Starts programs under Triton's interpreter.

They are processes of their own because the interpreter must be switched on before Triton is imported, and because a
wrong pointer in a kernel ends the process. A program is a module of these tests that begins with

    from tests.kernels.triton import interpreter  # noqa: F401 - mends the interpreter's bfloat16

and prints a line of JSON for each case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def run_interpreted(*command: str | Path, timeout: float = 300) -> list[dict[str, Any]]:
    """Runs a program and returns the JSON objects that it printed.

    Args:
        command (`str` or `Path`):
            A file, or `"-m"` and a module; then its arguments.
        timeout (`float`, defaults to 300):
            Seconds after which it is ended.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert finished.returncode == 0, f"exit code {finished.returncode}: {finished.stderr[-3000:]}"
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
