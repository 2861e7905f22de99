"""Triton's kernels, whose launches are captured with the longest context, replayed on any other."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.kernels.triton.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def check(result: dict[str, Any]) -> None:
    assert result["same"] == [True, True] and not result["notes"]
    assert result["replays"] == 8
    assert {width for _, width in result["shapes"]} == {2, 5}


def test_native_layers_are_replayed():
    (result,) = run_interpreted("-m", "tests.generation.graphs.run_on_triton")
    check(result)
    assert result["native"].startswith("2 of 2 layers in 1 call")
    # The keys are divided as those of the longest context would be, and the parts merged.
    assert result["kernels"] == {
        "norm_kernel": 6,
        "rope_store_kernel": 2,
        "paged_attention_kernel": 2,
        "merge_parts_kernel": 2,
        "activation_kernel": 2,
    }


@pytest.mark.slow
def test_others_are_replayed_and_so_are_steps_that_run_ahead():
    results = run_interpreted("-m", "tests.generation.graphs.run_on_triton", "--all", timeout=900)
    for result in results:
        check(result)
    assert [result["name"] for result in results] == ["llama, native", "qwen3, native", "mistral"]
    assert results[2]["native"] == "off" and results[2]["kernels"]["rope_store_kernel"] == 2
