"""Runs parts one after the other in one process, and tells each row as a line of JSON on stdout.

A part that raises is noted and the next one begins; after an error of the device, or a part that had to be ended from
outside, `conductor.py` starts a new process for what is left.

    python -m benchmarks.gpu.child SETTINGS RESULTS_FILE PART:SECONDS...
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .settings import Deadline, Run, Settings, results_json


def run_part(name: str, run: Run, tell: Callable[[dict[str, Any]], None]) -> bool:
    """Runs a part and returns whether the device can still be used.

    Args:
        name (`str`):
            File under `parts/`.
        run (`Run`):
            What it is given.
        tell (`Callable[[dict[str, Any]], None]`):
            Told what it does.
    """
    begin, compiled = time.monotonic(), num_compiled()
    rows = run.rows.setdefault(name, [])
    try:
        for row in importlib.import_module(f"benchmarks.gpu.parts.{name}").run(run):
            rows.append(row)
            tell({"part": name, "row": row})
    except Exception as error:
        words = "".join(traceback.format_exception_only(error)).strip()
        where = traceback.extract_tb(error.__traceback__)[-1]
        tell({"part": name, "error": f"{words[-600:]} ({Path(where.filename).name}:{where.lineno})"})
        traceback.print_exc()
    seconds = time.monotonic() - begin
    tell({"part": name, "ended": True, "seconds": seconds, "compiled": num_compiled() - compiled})
    return device_works(run)


def num_compiled() -> int:
    """Returns how many kernels Triton keeps compiled: what a part adds to them, it had to wait for."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def device_works(run: Run) -> bool:
    """Returns whether the device answers, and gives back what is not needed any more.

    Args:
        run (`Run`):
            Names the device.
    """
    if run.device == "cpu":
        return True
    import gc

    import torch

    try:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def main() -> None:
    """Runs what the command line asks for."""
    # Whatever libraries print must not get between our lines: file descriptor 1 becomes stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    settings = Settings.from_json(sys.argv[1])
    rows = {name: part["rows"] for name, part in results_json(Path(sys.argv[2]))["parts"].items()}
    end = 0.0
    # Deadlines add up from the start of the process: what one part does not need, the next may use.
    started = time.monotonic()
    for word in sys.argv[3:]:
        name, _, seconds = word.partition(":")
        end += float(seconds)
        tell({"part": name, "begun": True})
        deadline = Deadline(started + end - time.monotonic())
        if not run_part(name, Run(settings, deadline, rows), tell):
            tell({"part": name, "error": "the device does not answer any more; a new process goes on"})
            # Without the usual farewell, which would touch the device.
            os._exit(3)


if __name__ == "__main__":
    main()
