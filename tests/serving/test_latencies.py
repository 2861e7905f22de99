"""The latencies of the last five minutes."""

from __future__ import annotations

import numpy as np
import pytest

from hf_paged.serving.latencies import NUM_SLOTS, SECONDS, RecentLatencies


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def latencies(clock):
    return RecentLatencies(clock)


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_an_eighth_of_the_true_ones(latencies, seed):
    values = np.random.default_rng(seed).lognormal(-4, 1.5, 2000)
    for value in values:
        latencies.observe(float(value))
    [(_, median, worst, count)] = latencies.points()
    assert count == 2000
    assert median == pytest.approx(np.quantile(values, 0.5, method="inverted_cdf"), rel=0.125)
    assert worst == pytest.approx(np.quantile(values, 0.99, method="inverted_cdf"), rel=0.125)


def test_values_beyond_all_bounds_are_counted(latencies):
    for value in (0.0, 1e-9, 1e9):
        latencies.observe(value)
    [(_, median, worst, count)] = latencies.points()
    assert count == 3 and 0 < median < 1e-3 and worst >= 999


def test_a_latency_may_be_seen_several_times(latencies):
    latencies.observe(0.01, 99)
    latencies.observe(5.0)
    [(_, median, _, count)] = latencies.points()
    assert count == 100 and median == pytest.approx(0.01, rel=0.13)


def test_what_is_older_than_five_minutes_is_forgotten(latencies, clock):
    first = latencies.slot
    for _ in range(3 * NUM_SLOTS):
        latencies.observe(0.1)
        clock.now += SECONDS
    slots = [slot for slot, *_ in latencies.points()]
    assert slots == list(range(latencies.slot - NUM_SLOTS + 1, latencies.slot))
    assert slots[0] > first
    assert len(latencies._slots) <= NUM_SLOTS + 1 and len(latencies._over) <= NUM_SLOTS
    clock.now += SECONDS * NUM_SLOTS
    assert latencies.points() == [] and not latencies._slots and not latencies._over


def test_a_slot_that_goes_on_is_told_anew_and_one_that_is_over_stays(latencies, clock):
    latencies.observe(0.1)
    [before] = latencies.points()
    latencies.observe(10.0)
    [after] = latencies.points()
    assert before[0] == after[0] and before != after
    clock.now += SECONDS
    assert latencies.points() == [after]
    clock.now += 7 * SECONDS
    latencies.observe(0.2)
    assert [slot for slot, *_ in latencies.points()] == [after[0], after[0] + 8]
