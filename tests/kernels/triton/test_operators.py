from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.kernels.triton.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """What the cases came to, in one process."""
    return {result["name"]: result for result in run_interpreted("-m", "tests.kernels.triton.run_layer_cases")}


def test_layers_equal_the_same_in_plain_torch(results):
    cases = [result for result in results.values() if "allowed" in result]
    assert len(cases) >= 21
    assert not [result for result in cases if not result["error"] <= result["allowed"]]


def added_by_a_layer(results, kind: str) -> dict[str, Any]:
    """What two layers take more than one."""
    one, two = results[f"1 layers{kind}"], results[f"2 layers{kind}"]
    return {name: two[name] - one[name] for name in ("total", "bytes", "ideal")}


@pytest.mark.parametrize(("context", "launches"), [(90, 9), (300, 10)])
def test_a_layer_takes_at_most_ten_launches(results, context, launches):
    # The tenth merges what is split of a long context.
    assert added_by_a_layer(results, f" joined, context {context}")["total"] == launches
    one = results[f"1 layers joined, context {context}"]["launches"]
    assert sum(count for name, count in one.items() if not name.endswith("_kernel")) == 4  # linears


def test_weights_that_do_not_lie_side_by_side_take_three_launches_more(results):
    assert added_by_a_layer(results, ", context 90")["total"] == 12


@pytest.mark.parametrize("kind", [" joined, context 90", " joined, context 300", ", context 90"])
def test_hardly_more_bytes_are_moved_than_must_be(results, kind):
    layer, two = added_by_a_layer(results, kind), results[f"2 layers{kind}"]
    assert two["bytes"] <= 1.10 * two["ideal"]
    assert layer["bytes"] <= 1.10 * layer["ideal"]
