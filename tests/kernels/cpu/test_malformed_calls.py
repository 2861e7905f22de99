"""What does not fit is refused before anything is read or written, whatever the caller did."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kernels.cpu.malformed_calls import CALLS


def test_malformed_calls_are_refused_and_none_crashes():
    command = [sys.executable, "-m", "tests.kernels.cpu.malformed_calls"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    if lines == ["no native library"]:
        pytest.skip("no native library on this machine")
    assert [line for line in lines if not line.endswith(": refused")] == []
    assert len(lines) == len(CALLS), done.stderr
