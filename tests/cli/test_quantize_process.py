"""`hf-paged quantize` through real processes: interrupted while it works, it leaves nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from hf_paged.cli import exits
from tests.cli.processes import PATIENCE, Zygote

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, exits.INTERRUPTED), (signal.SIGTERM, exits.TERMINATED)])
def test_a_signal_leaves_nothing(number: int, code: int, hf_paged: Zygote, tmp_path: Path):
    (tmp_path / "text.txt").write_text("Some words that are looked at.\n\n" * 200_000)  # it does not end soon
    folder = tmp_path / "outs"
    process = hf_paged.start(
        *("quantize", "--demo", folder / "out", "--method", "gptq", "--calibration", tmp_path / "text.txt"),
        *("--num-samples", "100000", "--seq-length", "16"),
    )
    deadline = time.monotonic() + PATIENCE
    while not folder.exists() or not any(folder.iterdir()):
        assert not process.has_ended and time.monotonic() < deadline, process.stderr
        time.sleep(0.01)
    process.signal(number)
    assert process.wait() == code
    assert process.stderr == f"hf-paged: {'interrupted' if code == exits.INTERRUPTED else 'terminated'}\n"
    assert not folder.exists()


def test_a_bar_shows_the_layers_on_a_terminal(hf_paged: Zygote, tmp_path: Path):
    process = hf_paged.start(
        *("quantize", "--demo", tmp_path / "out", "--method", "awq", "--num-samples", "2", "--seq-length", "16"),
        columns=100,
    )
    process.wait_for("quantizing: 100%")
    process.wait_for("in the layout of awq")
    assert process.wait() == exits.DONE
    assert (tmp_path / "out" / "README.md").is_file()
