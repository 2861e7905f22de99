from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.kernels.triton.attention_cases import CASES
from tests.kernels.triton.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """What each case came to; they share a process, which takes longer to start than most of them."""
    return {result["name"]: result for result in run_interpreted("-m", "tests.kernels.triton.run_attention_cases")}


@pytest.mark.parametrize("name", CASES)
def test_attention_agrees_with_float64(results, name):
    result = results[name]
    assert result["error"] <= result["allowed"]
    assert result.get("lse_error", 0.0) <= 2e-5
