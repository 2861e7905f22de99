"""Each gateway, really: two servers behind it, a spike, clients that leave, mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SWITCH = "HF_PAGED_TEST_GATEWAYS"
# How many of six clients that leave reach the engine: those of a stream, and those that wait for an answer.
NOTICED = {"litellm": (6, 6), "vllm_router": (6, 6), "omniroute": (6, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTICED)
def test_nothing_is_lost_and_no_blackout_follows_a_spike(name, tmp_path, real_model_path):
    if os.environ.get(SWITCH) != "1":
        pytest.skip(f"it takes minutes, and up to 2 GB where {name} is not installed; {SWITCH}=1 runs it")
    script, figures = ROOT / "examples" / "gateways" / name / "run.py", tmp_path / "figures.json"
    words = [sys.executable, str(script), "--quick", "--model", real_model_path, "--json", str(figures)]
    done = subprocess.run(
        [*words, "--keep", str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout
    told = json.loads(figures.read_text())
    assert told["problems"] == [] and told["left_streams"] == [6, NOTICED[name][0]]
    assert told["left_answers"][1] >= NOTICED[name][1]
    spike = next(row for row in told["rows"] if row["system"] == "spike")
    assert spike["sent"] == 160 and spike["answered"] > 0 and spike["lost"] == 0
    assert spike["answered"] + spike["refused"] == spike["sent"]
