"""Measurements that need a process of their own: how long a start takes, and what a served model adds to memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ...errors import HfPagedError

_ERROR_CHARACTERS = 2000


class MeasurementError(HfPagedError, RuntimeError):
    """A process that measures ended with an error."""


def measure_in_fresh_process(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs a module of this folder as a process and returns what it measured.

    Args:
        name (`str`):
            The module, which reads its settings with `settings_of_parent` and ends with `answer_parent`.
        settings (`dict[str, Any]`):
            Plain values.

    Raises:
        MeasurementError: If the process fails; with the end of what it wrote.
    """
    command = [sys.executable, "-m", f"{__package__}.{name}"]
    done = subprocess.run(command, input=json.dumps(settings), capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasurementError(f"{name} ended with {done.returncode}: {done.stderr[-_ERROR_CHARACTERS:]}")
    return json.loads(done.stdout.splitlines()[-1])


def settings_of_parent() -> dict[str, Any]:
    """Returns the settings, in the process that measures."""
    return json.loads(sys.stdin.read())


def answer_parent(values: dict[str, Any]) -> None:
    """Hands what was measured to the process that asked.

    Args:
        values (`dict[str, Any]`):
            Plain values.
    """
    print(json.dumps(values), flush=True)
