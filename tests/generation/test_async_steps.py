"""Overlapping steps: nobody can tell them from steps one after the other, except by how busy the device is."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from hf_paged import ConfigurationError, EngineClosedError, PagedConfig, SamplingParams, StepFailedError
from hf_paged.errors import InvalidRequestError
from hf_paged.generation.async_steps import AsyncStepLoop
from tests.conftest import random_prompts
from tests.generation.fake_device import EOS, VOCAB, FakeEngine, answers, assert_usable
from tests.paged_models import assert_idle, broken_forward, paged, paged_engine


@dataclasses.dataclass
class Wish:
    """A request of a random schedule."""

    prompt: list[int]
    params: dict[str, Any]
    arrives_at: int  # the step before which it is added
    abort_after: int | None = None  # it is aborted when it has shown so many tokens
    abort_at: int | None = None  # it is aborted before this step, wherever it is


def random_wishes(source: random.Random) -> list[Wish]:
    """Some requests with everything that a schedule may depend on."""
    stem = [source.randrange(2, VOCAB) for _ in range(20)]  # a beginning that some of them share
    wishes = []
    for _ in range(source.randint(2, 7)):
        length = source.randint(1, 12)
        shared = source.choice([0, 0, 4, 8, length])
        prompt = stem[: min(shared, length)]
        prompt += [source.randrange(2, VOCAB) for _ in range(length - len(prompt))]
        params: dict[str, Any] = {"max_tokens": source.randint(1, 12), "ignore_eos": source.random() < 0.5}
        if source.random() < 0.4:
            params["stop_token_ids"] = source.sample(range(2, VOCAB), 2)
        if source.random() < 0.4:
            params |= {"temperature": 1.0, "seed": source.randrange(100), "n": source.choice([1, 1, 2])}
        if source.random() < 0.15:  # these need the host between two tokens
            params |= source.choice([{"min_tokens": 1}, {"logprobs": 1}, {"repetition_penalty": 1.3}])
        wish = Wish(prompt, params, source.choice([0, 0, 1, 2, 5, 9]))
        if source.random() < 0.15:
            wish.abort_after = source.randint(1, 6)
        elif source.random() < 0.1:
            wish.abort_at = wish.arrives_at + source.randint(0, 6)
        wishes.append(wish)
    return wishes


def random_limits(source: random.Random) -> dict[str, Any]:
    """Pools from tiny to roomy."""
    return {
        "block_size": source.choice([1, 2, 4]),
        "num_blocks": source.choice([8, 12, 16, 24, 200]),
        "max_model_len": source.choice([16, 24, 32]),
        "max_num_seqs": source.randint(2, 6),
        "max_num_batched_tokens": source.choice([4, 8, 16, 32]),
        "enable_prefix_caching": source.random() < 0.75,
        "enable_chunked_prefill": source.random() < 0.75,
        "scheduling_policy": source.choice(["fcfs", "priority"]),
    }


def play(engine: FakeEngine, wishes: list[Wish]) -> list[Any]:
    """Runs a schedule to its end. A request that can never fit is refused, in any engine."""
    states: list[Any] = [None] * len(wishes)
    for step in range(2000):
        for place, wish in enumerate(wishes):
            if wish.arrives_at == step:
                states[place] = add(engine, wish, f"r{place}")
            if wish.abort_at == step:
                engine.abort(f"r{place}")
        if not engine.is_busy and step > 20:
            return states
        engine.step()
    raise AssertionError(f"still unfinished: {list(engine.live.scheduler.requests.values())}")


def add(engine: FakeEngine, wish: Wish, name: str) -> Any:
    def on_update(state: Any) -> None:
        if wish.abort_after is not None and len(state.output().outputs[0].token_ids) >= wish.abort_after:
            engine.abort(name)

    try:
        return engine.add(wish.prompt, name, on_update if wish.abort_after is not None else None, **wish.params)
    except InvalidRequestError:
        return None


def assert_same(wish: Wish, mine: list[tuple], theirs: list[tuple]) -> None:
    """Two engines gave the same answers; where an abort met them at different tokens, as far as both go."""
    timed = wish.abort_at is not None or (wish.abort_after is not None and len(mine) > 1)
    if not timed:
        assert mine == theirs
        return
    for one, other in zip(mine, theirs, strict=True):
        length = min(len(one[0]), len(other[0]))
        assert one[0][:length] == other[0][:length]
        if "abort" not in (one[1], other[1]):
            assert one == other


def compare(seed: int) -> FakeEngine:
    source = random.Random(seed)
    limits, wishes = random_limits(source), random_wishes(source)
    plain, ahead = FakeEngine(ahead=False, **limits), FakeEngine(ahead=True, **limits)
    expected, got = play(plain, wishes), play(ahead, wishes)
    for wish, mine, theirs in zip(wishes, got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_same(wish, answers(mine), answers(theirs))
    for engine in (plain, ahead):
        engine.check_idle()
    if limits["num_blocks"] == 200 and not any(wish.abort_at is not None for wish in wishes):
        assert ahead.cached() == plain.cached()  # nothing was evicted, and nothing that was thrown away can be found
    return ahead


@pytest.mark.parametrize("part", range(10))
def test_random_schedules_end_as_steps_one_after_the_other_do(part):
    engines = [compare(seed) for seed in range(100 * part, 100 * part + 100)]
    assert sum(engine.device.num_ahead for engine in engines) > sum(e.device.num_launched for e in engines) / 2
    assert sum(engine.live.stats().num_preemptions for engine in engines) > 10


def test_steps_are_the_same_ones_if_nobody_stops_early():
    logs = []
    for ahead in (False, True):
        engine = FakeEngine(ahead=ahead, num_blocks=9, max_model_len=32, max_num_seqs=5, max_num_batched_tokens=12)
        launch, log = engine.device.launch, []
        engine.device.launch = lambda output, *rest, launch=launch, log=log: (
            log.append(output),
            launch(output, *rest),
        )[1]
        for place in range(9):
            engine.add([2 + place, 3, 4, 5, 6][: 2 + place % 4], f"r{place}", max_tokens=9 + place, ignore_eos=True)
        engine.run()
        logs.append([[(s.request_id, s.num_computed_tokens, s.num_scheduled_tokens) for s in o.scheduled] for o in log])
        assert engine.live.stats().num_preemptions > 0
    assert logs[0] == logs[1]


# ---------------------------------------------------------------------- the device is never idle


def busy_share(ahead: bool) -> tuple[float, float]:
    """How busy the device is with 64 requests at 5 ms a step, and the host's work per step in ms."""
    engine = FakeEngine(
        ahead=ahead,
        latency=0.005,
        block_size=16,
        num_blocks=640,
        max_model_len=160,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
    )
    for place in range(64):
        prompt = [2 + (place + i) % 13 for i in range(20 + place % 30)]
        engine.add(prompt, f"r{place}", lambda state: None, max_tokens=80, ignore_eos=True)
    engine.step()
    device = engine.device
    start, busy, steps = device.clock.now(), device.busy, device.num_launched
    work = -device.clock.now() + device.clock._skipped
    engine.run()
    work += device.clock.now() - device.clock._skipped
    count = device.num_launched - steps
    assert count > 70 and engine.live.stats().num_generated_tokens == 64 * 80
    return (device.busy - busy) / (device.clock.now() - start), 1000 * work / count


def test_the_device_never_waits_for_the_host():
    for _ in range(5):  # processes beside this one make its own instructions slower, too
        share, milliseconds = busy_share(ahead=True)
        if share >= 0.98:
            break
    assert share >= 0.98, f"the device is busy {share:.1%} of the time; the host works {milliseconds:.2f} ms a step"
    one_by_one, _ = busy_share(ahead=False)
    assert one_by_one < share - 0.02, "without overlap it would wait, so the measurement can fail"


# ---------------------------------------------------------------------- who needs the host


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"min_tokens": 2},
        {"presence_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3, 4]},
    ],
    ids=str,
)
def test_a_request_that_needs_the_host_is_read_before_the_next_step_is_put_together(fields):
    engine = FakeEngine(ahead=True)
    engine.add([5, 6, 7], "other", max_tokens=12, ignore_eos=True)
    engine.step()
    assert len(engine.loop._flights) == 1 and engine.device.num_ahead == 2
    engine.add([8, 9], "needy", max_tokens=4, ignore_eos=True, **fields)
    for _ in range(5):  # the step that is under way, and four with the new request
        assert "needy" in engine.live.states
        engine.step()
        assert not engine.loop._flights and engine.device.num_ahead == 2
    assert "needy" not in engine.live.states
    engine.step()
    assert len(engine.loop._flights) == 1 and engine.device.num_ahead == 4, "the other one goes ahead again"
    engine.run()
    engine.check_idle()


# ---------------------------------------------------------------------- failures


def three_requests(**limits: Any) -> tuple[FakeEngine, list[Any]]:
    engine = FakeEngine(ahead=True, max_num_seqs=2, **limits)
    states = [engine.add([place + 4, 5, 6], f"r{place}", max_tokens=6 + place, ignore_eos=True) for place in range(3)]
    return engine, states


def clean_answers() -> list[list[tuple]]:
    engine, states = three_requests()
    engine.run()
    return [answers(state) for state in states]


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_a_step_that_fails_when_it_is_read_fails_its_own_requests_only(number):
    """The next step was launched on what it should have computed, so there is no way back."""
    engine, states = three_requests()
    cause = RuntimeError("the device fell off")
    engine.device.read_faults[number] = cause
    engine.run()
    for state in states[:2]:
        assert isinstance(state.error, StepFailedError) and state.error.__cause__ is cause
    expected = clean_answers()
    # What earlier steps computed was told before the failure.
    shown = [state.group.requests[0].output_token_ids for state in states[:2]]
    assert shown == [answer[0][0][:number] for answer in expected[:2]]
    assert answers(states[2]) == expected[2]
    engine.check_idle()
    assert_usable(engine)


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_a_step_that_fails_when_it_is_launched_is_run_again_in_parts(number):
    engine, states = three_requests()
    engine.device.launch_faults[number] = RuntimeError("the device fell off")
    engine.run()
    assert [answers(state) for state in states] == clean_answers()
    engine.check_idle()
    assert_usable(engine)


@pytest.mark.parametrize("where", ["launch_faults", "read_faults"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_interrupted_step_is_run_again(where, number):
    engine, states = three_requests()
    getattr(engine.device, where)[number] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    assert [answers(state) for state in states] == clean_answers()
    engine.check_idle()


def test_requests_are_aborted_after_an_interrupt_with_steps_under_way():
    engine, states = three_requests()
    engine.device.read_faults[2] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert len(engine.loop._flights) == 1  # the newest did not happen
    for place in range(3):
        engine.abort(f"r{place}")
    engine.loop.drain_inbox()
    assert [state.output().outputs[0].finish_reason for state in states] == ["abort"] * 3
    engine.check_idle()
    assert_usable(engine)


@pytest.mark.parametrize("part", range(2))
def test_random_faults_touch_nobody_else(part):
    for seed in range(100 * part, 100 * part + 100):
        source = random.Random(seed)
        limits, wishes = random_limits(source), random_wishes(source)
        for wish in wishes:
            wish.abort_at = wish.abort_after = None
        clean, engine = FakeEngine(ahead=False, **limits), FakeEngine(ahead=True, **limits)
        expected = play(clean, wishes)
        kind, device = source.choice(["interrupts", "failed launches", "a failed step"]), engine.device
        for _ in range(1 if kind == "a failed step" else 4):
            fault = KeyboardInterrupt() if kind == "interrupts" else RuntimeError("no more")
            at_launch = kind == "failed launches" or (kind == "interrupts" and source.random() < 0.5)
            (device.launch_faults if at_launch else device.read_faults)[source.randint(0, 15)] = fault
        step, run = engine.step, []

        def careful(step=step, run=run) -> bool:
            try:
                return step()
            except KeyboardInterrupt as error:
                run.append(error)
                return True

        engine.step = careful
        for mine, theirs in zip(play(engine, wishes), expected, strict=True):
            for one, other in zip(answers(mine) if mine else [], answers(theirs) if theirs else [], strict=True):
                assert one == other or (one[3] == "StepFailedError" and one[0] == other[0][: len(one[0])])
        engine.check_idle()


# ---------------------------------------------------------------------- the whole engine


PROMPTS = random_prompts(6, 199, seed=1)


@pytest.fixture(scope="module")
def plain():
    return paged(block_size=8, num_blocks=60, max_num_seqs=4, max_num_batched_tokens=40)


@pytest.fixture(scope="module")
def ahead():
    model = paged(block_size=8, num_blocks=60, max_num_seqs=4, max_num_batched_tokens=40, async_scheduling=True)
    assert isinstance(model.engine._loop, AsyncStepLoop) and model.engine.plan.async_scheduling
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3, "top_k": 20, "n": 2},
        {"temperature": 0.8, "seed": 4, "stop_token_ids": list(range(20, 90))},
        {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 2},
    ],
    ids=str,
)
def test_a_model_says_the_same_with_overlapping_steps(plain, ahead, fields):
    params = [SamplingParams(max_tokens=3 + 2 * place, **fields) for place in range(len(PROMPTS))]
    expected, got = (model.engine.generate(PROMPTS, params) for model in (plain, ahead))
    for mine, theirs in zip(got, expected, strict=True):
        assert [a.token_ids for a in mine.outputs] == [a.token_ids for a in theirs.outputs]
        assert [a.finish_reason for a in mine.outputs] == [a.finish_reason for a in theirs.outputs]
    assert_idle(ahead.engine)


def test_beams_run_beside_overlapping_steps(plain, ahead):
    with ahead.engine.requests() as states:
        states.append(ahead.engine.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30)))
        beams = [
            model.generate(torch.tensor([PROMPTS[1]]), num_beams=3, max_new_tokens=8, do_sample=False)
            for model in (plain, ahead)
        ]
        ahead.engine.wait(states[0])
    assert torch.equal(*beams)
    [expected] = plain.engine.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=30))
    assert states[0].output().outputs[0].token_ids == expected.outputs[0].token_ids
    assert_idle(ahead.engine)


def test_a_row_without_a_token_to_choose_fails_alone(ahead):
    def spoil(forward, kwargs):
        result = forward()
        result.logits[0, 0] = float("nan")
        return result

    with ahead.engine.requests() as states, broken_forward(ahead, spoil, at=3):
        for prompt in PROMPTS[:2]:
            states.append(ahead.engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=8)))
        list(ahead.engine.as_settled(states))
    assert sorted(state.error is None for state in states) == [False, True]
    assert_idle(ahead.engine)


@pytest.mark.parametrize("ending", ["abort_all", "close", "sleep", "interrupt"])
def test_an_engine_ends_with_a_step_under_way(ending):
    engine = paged_engine(block_size=8, num_blocks=60, async_scheduling=True)
    states = [engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=20)) for prompt in PROMPTS[:3]]
    for _ in range(3):
        engine.step()
    assert engine._loop._flights
    shown = [state.output().outputs[0].token_ids for state in states]
    if ending == "close":
        engine.close()
        assert all(isinstance(state.error, EngineClosedError) for state in states)
    elif ending == "interrupt":
        with broken_forward(engine.kept_model, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            list(engine.as_settled(states))
        engine.abort_all()
    else:
        engine.abort_all()
        assert [state.output().outputs[0].finish_reason for state in states] == ["abort"] * 3
    assert [state.output().outputs[0].token_ids for state in states] == shown
    assert not engine._loop._flights
    assert_idle(engine)
    if ending == "sleep":
        engine.sleep()
        engine.wake_up()
    if ending != "close":
        assert (
            len(engine.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids) == 3
        )


def test_where_steps_overlap_by_default(plain, ahead):
    assert not plain.engine.plan.async_scheduling  # on a CPU, which has nothing to wait for
    assert "async scheduling" in ahead.engine.plan.describe()
    with pytest.raises(ConfigurationError, match="async_scheduling"):
        PagedConfig(async_scheduling="yes")


def test_batch_invariant_steps_do_not_overlap():
    engine = paged_engine(batch_invariant=True, async_scheduling=True)
    assert not engine.plan.async_scheduling and any("async_scheduling" in note for note in engine.plan.notes)


def test_the_end_of_sequence_token_of_these_tests_can_come():
    engine = FakeEngine(ahead=True)
    states = [engine.add([place % 14 + 2, 3], f"r{place}", max_tokens=30) for place in range(20)]
    engine.run()
    assert any(state.output().outputs[0].token_ids[-1] == EOS for state in states)
