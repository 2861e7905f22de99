"""A step that runs out of memory is run again, smaller: nobody notices, and the engine goes on."""

from __future__ import annotations

import random

import pytest
import torch

from hf_paged import SamplingParams, StepMemoryError
from hf_paged.generation.throttle import PATIENCE, Throttle
from tests.conftest import random_prompts
from tests.generation.fake_device import FakeEngine, answers, assert_usable
from tests.paged_models import assert_idle, broken_forward, paged

LIMITS = {"num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 32}


def add_requests(engine: FakeEngine, count: int = 10) -> list:
    source = random.Random(7)
    return [
        engine.add(
            [source.randrange(2, 16) for _ in range(source.randint(1, 20))],
            f"r{place}",
            max_tokens=source.randint(2, 14),
            temperature=place % 2,
            seed=place,
            n=1 + (place == 5),
        )
        for place in range(count)
    ]


@pytest.fixture(scope="module")
def expected():
    engine = FakeEngine(ahead=False, **LIMITS)
    states = add_requests(engine)
    engine.run()
    return [answers(state) for state in states]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("capacity", [1, 2, 5, 13])
def test_requests_run_in_steps_that_fit(expected, ahead, capacity):
    engine = FakeEngine(ahead=ahead, **LIMITS)
    engine.device.capacity = capacity
    states = add_requests(engine)
    engine.run()
    assert [answers(state) for state in states] == expected
    assert engine.live.stats().num_shrunk_steps > 0 and engine.live.stats().num_failed_steps == 0
    engine.check_idle()


@pytest.mark.parametrize("ahead", [False, True])
def test_memory_that_is_missing_now_and_then_changes_nothing(expected, ahead):
    engine = FakeEngine(ahead=ahead, **LIMITS)
    for number in (0, 4, 9, 14, 30, 45, 60):
        engine.device.launch_faults[number] = torch.OutOfMemoryError("another process came")
    states = add_requests(engine)
    engine.run()
    assert [answers(state) for state in states] == expected
    engine.check_idle()


@pytest.mark.parametrize("ahead", [False, True])
def test_half_of_the_running_requests_give_way(ahead):
    engine = FakeEngine(ahead=ahead, **LIMITS)
    for place in range(8):
        engine.add([place + 2, 3], f"r{place}", max_tokens=20, ignore_eos=True)
    for _ in range(4):
        engine.step()
    assert engine.live.scheduler.num_running == 8
    engine.device.capacity = 4
    while not engine.live.stats().num_shrunk_steps:
        engine.step()
    assert engine.live.scheduler.num_running == 4 and engine.live.scheduler.num_waiting == 4
    assert engine.live.stats().num_preemptions == 4
    engine.device.capacity = 100
    engine.run()
    assert engine.live.scheduler.throttle.num_seqs == 8, "it is forgotten after a while"
    engine.check_idle()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_cannot_run_alone_fails_and_the_engine_goes_on(ahead):
    engine = FakeEngine(ahead=ahead, **LIMITS)
    states = [engine.add([place + 2, 3, 4], f"r{place}", max_tokens=9, ignore_eos=True) for place in range(3)]
    for _ in range(2):
        engine.step()
    engine.device.capacity = 0
    engine.run()
    for state in states:
        assert isinstance(state.error, StepMemoryError) and isinstance(state.error, MemoryError)
        assert isinstance(state.error.__cause__, torch.OutOfMemoryError)
        assert "gpu_memory_utilization" in str(state.error)
    engine.device.capacity = 100
    assert_usable(engine)


def test_a_prompt_that_must_not_be_cut_is_cut_rather_than_left_waiting():
    engine = FakeEngine(ahead=False, enable_chunked_prefill=False, **LIMITS)
    whole = FakeEngine(ahead=False, **LIMITS)
    engine.device.capacity = 6
    states = [one.add(list(range(2, 16)) * 2, "long", max_tokens=5) for one in (engine, whole)]
    engine.run()
    whole.run()
    assert answers(states[0]) == answers(states[1])


def test_a_model_that_runs_out_of_memory_says_the_same_in_the_end():
    model = paged(block_size=8, num_blocks=60, max_num_seqs=4, max_num_batched_tokens=40)
    prompts = random_prompts(5, 199, seed=2)
    params = SamplingParams(temperature=0, max_tokens=6)
    expected = [output.outputs[0].token_ids for output in model.engine.generate(prompts, params)]
    model.engine.weights_changed()
    with broken_forward(model, torch.OutOfMemoryError("CUDA out of memory"), at=2, times=2):
        got = [output.outputs[0].token_ids for output in model.engine.generate(prompts, params)]
    assert got == expected and model.engine.stats().num_shrunk_steps == 2
    assert_idle(model.engine)


def test_beams_get_smaller_with_the_steps():
    model = paged(block_size=8, num_blocks=60, max_num_seqs=8, max_num_batched_tokens=40)
    prompt = torch.tensor(random_prompts(1, 199, seed=3))
    kwargs = {"num_beams": 4, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(prompt, **kwargs)
    with broken_forward(model, torch.OutOfMemoryError("CUDA out of memory"), at=3, times=2):
        assert torch.equal(model.generate(prompt, **kwargs), expected)
    assert model.engine.stats().num_shrunk_steps == 2
    assert_idle(model.engine)


def test_the_throttle_opens_again():
    throttle = Throttle(64, 2048)
    assert throttle.shrink(40, 900) and (throttle.num_seqs, throttle.num_tokens) == (20, 450)
    assert throttle.shrink(20, 20) and (throttle.num_seqs, throttle.num_tokens) == (10, 10)
    assert throttle.shrink(64, 64), "a step that does not get smaller is tried once more"
    assert not throttle.shrink(64, 64)
    for _ in range(PATIENCE):
        throttle.relax()
    assert (throttle.num_seqs, throttle.num_tokens) == (20, 20)
    for _ in range(20 * PATIENCE):
        throttle.relax()
    assert (throttle.num_seqs, throttle.num_tokens) == (64, 2048)
