"""What must be right before all else, each in a process of its own with its own time: one that hangs costs itself."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from ..essential_checks import CHECKS
from ..settings import Run

# Of the part's time, for the processes to be ended in.
MARGIN_SECONDS = 1.5


def run(run: Run) -> Iterator[dict[str, Any]]:
    """Yields a row for each check, and how many failed.

    Args:
        run (`Run`):
            What the part is given.
    """
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(min(len(CHECKS), len(os.sched_getaffinity(0)))) as pool:
        for done in concurrent.futures.as_completed([pool.submit(check, name, run) for name in CHECKS]):
            row = done.result()
            failed += not row["passed"]
            yield row
    yield {
        "failed_checks": failed,
        "says": f"{len(CHECKS) - failed} of {len(CHECKS)} checks passed: {', '.join(CHECKS)}",
    }


def check(name: str, run: Run) -> dict[str, Any]:
    """Returns what became of a check.

    Args:
        name (`str`):
            Which.
        run (`Run`):
            What the part is given.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.essential_checks", run.settings.to_json(), name]
    limit = run.deadline.left() - MARGIN_SECONDS
    row: dict[str, Any] = {"case": name, "passed": False, "why": f"it was ended after {max(limit, 0):.0f} s"}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", timeout=max(limit, 0.1))
    except subprocess.TimeoutExpired:
        pass
    else:
        row["why"] = f"its process ended with status {done.returncode}"
        if done.stdout.strip():
            row = json.loads(done.stdout)
    told = {key: value for key, value in row.items() if key not in ("case", "passed")}
    return row | {"says": f"{'passed' if row['passed'] else 'FAILED'}: {name}: {told}"}
