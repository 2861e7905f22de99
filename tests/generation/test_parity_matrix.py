"""Every field of `generate` alone, and random combinations, on the real model: equal to the same model unpaged."""

from __future__ import annotations

import pytest

from hf_paged.generation.coverage import Way, coverage
from tests.parity.cases import CASES
from tests.parity.combinations import combination
from tests.parity.comparison import compare, same
from tests.parity.world import World

# `cache` is the newer name of `past_key_values`; other inputs of a forward have no name of their own.
NO_CASE = {"cache", "kwargs"}
CORE = 12
ALL = 60  # `make parity` tries more


@pytest.fixture(scope="module")
def world(real_model_path):
    return World(real_model_path)


def test_every_field_and_argument_has_a_case():
    assert set(coverage()) - NO_CASE == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_field_alone(world, name):
    found = compare(world, CASES[name])
    assert not found.problems, "\n".join(found.problems)
    if coverage()[name].way is Way.ENGINE:
        assert found.error is None
        assert found.engine_steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.bites])
def test_the_value_of_a_field_changes_what_transformers_returns(world, name):
    case = CASES[name]
    assert not same(world, case.arguments(world, world.stock), case.base(world, world.stock))


@pytest.mark.parametrize("number", [pytest.param(i, marks=[pytest.mark.slow] * (i >= CORE)) for i in range(ALL)])
def test_a_random_combination(world, number):
    name, case = combination(number)
    found = compare(world, case)
    assert not found.problems, "\n".join([name, *found.problems])
