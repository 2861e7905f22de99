"""Nothing in an engine's steps, nor in what is recognised at load, takes the model's device for the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.foreign_device.building import build, compiler

pytestmark = [pytest.mark.slow, pytest.mark.skipif(compiler() is None, reason="no compiler")]

NATIVE = {
    "llama": "2 of 2 layers in 1 call, 1 norm, 1 linear",
    "qwen3": "2 of 2 layers in 1 call, 1 norm, 1 linear",
    "gemma2": "2 of 2 layers in 1 call, 1 norm, 1 linear",
    "phi3": "2 of 2 layers in 1 call, 1 norm, 1 linear",
    "gpt_neox": "2 of 2 layers in 1 call, 1 norm, 1 linear",
    "opt": "2 of 2 layers in 1 call, 1 norm, 1 linear",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, Any]]:
    library = build(tmp_path_factory.mktemp("foreign_device"))
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.foreign_device.run_engines", str(library), *NATIVE],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return {result["name"]: result for result in found}


@pytest.mark.parametrize("family", NATIVE)
def test_layers_are_recognised_wherever_they_are(results, family):
    assert results[family]["device"].startswith("foreign")
    assert results[family]["native"] == NATIVE[family]


@pytest.mark.parametrize("case", [*NATIVE, "llama ahead"])
def test_an_engine_answers_what_the_model_does(results, case):
    assert results[case]["same"]


@pytest.mark.parametrize("case", [*NATIVE, "llama ahead"])
def test_a_decode_step_is_one_copy_to_the_device_and_waits_for_nothing_but_its_tokens(results, case):
    first, *decode = results[case]["counts"]
    assert len(decode) >= 3 and not any(waits for _, _, waits in [first, *decode])
    for to_device, to_host, _ in decode[:3]:
        assert to_device == 1 and to_host <= 2  # the tokens, and whether there were any to choose
