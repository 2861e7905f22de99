"""Stopped processes, clients that vanish, failing steps, signals, nonsense: nothing is lost, all blocks are free."""

from __future__ import annotations

import pytest

from benchmarks.serving.chaos_client import LOST
from benchmarks.serving.chaos_scenarios import SCENARIOS, Place
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_in_short(name, tiny_checkpoint, tmp_path):  # noqa: F811
    tally = SCENARIOS[name](Place(tiny_checkpoint, tmp_path, seconds=12.0, scale=0.5))
    told = tally.to_dict()
    assert not tally.problems, told
    assert tally.sent > 8 and tally.kinds[LOST] == 0, told
