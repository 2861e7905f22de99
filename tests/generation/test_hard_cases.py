"""What a hostile user found: requests that meet in one step, interrupts at the worst moment, ids that are none."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
import torch

from hf_paged import (
    AutoPagedModelForCausalLM,
    EngineError,
    InvalidRequestError,
    PagedConfig,
    SamplingParams,
    StepFailedError,
)
from hf_paged.cache.block_manager import BlockManager
from hf_paged.generation.admission import make_group
from hf_paged.generation.answer import RequestState
from hf_paged.generation.live_requests import LiveRequests
from hf_paged.generation.request import NO_EXTRAS, RequestExtras
from hf_paged.generation.session import Session
from hf_paged.generation.step_loop import StepLoop
from hf_paged.generation.waiting import WaitingRoom
from tests.families import greedy, tiny_model
from tests.paged_models import assert_idle
from tests.tokenizers_for_tests import VOCAB_SIZE, tiny_tokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [1 + (7 * i) % 190 for i in range(100)]


@pytest.fixture
def model():
    return AutoPagedModelForCausalLM.from_model(tiny_model("llama"))


@pytest.mark.parametrize("block_size", [3, 8, 16])
@pytest.mark.parametrize("budget", [8, 20, 56])
def test_a_prompt_that_is_admitted_while_its_twin_stands_inside_a_block(block_size, budget):
    stock = tiny_model("llama")
    for length in (14, 50, 100):
        expected = greedy(stock, [PROMPT[:length]], 6)[0]
        config = PagedConfig(num_blocks=64, block_size=block_size, max_num_batched_tokens=budget)
        engine = AutoPagedModelForCausalLM.from_model(stock, paged_config=config).engine
        with engine.requests() as states:
            states.append(engine.add_request(PROMPT[:length], PARAMS))
            engine.step()
            states.append(engine.add_request(PROMPT[:length], PARAMS))
            for _ in engine.as_finished(states):
                pass
            assert [state.output().outputs[0].token_ids for state in states] == [expected] * 2
        assert engine.generate([PROMPT[:length]], PARAMS)[0].outputs[0].token_ids == expected
        assert_idle(engine)


@pytest.mark.parametrize("words", [[[-1]], [["a"]], [[500]], [[5.0]], [[True]], [[]], [[3], [4, -2]]])
def test_bad_words_that_are_no_tokens_are_refused_and_touch_nobody(model, words):
    expected = model.engine.generate([[9, 8, 7]], PARAMS)[0].outputs[0].token_ids
    with model.engine.requests() as states:
        states.append(model.engine.add_request([9, 8, 7], PARAMS))
        model.engine.step()
        for call in (
            lambda: model.generate(torch.tensor([[4, 5, 6]]), bad_words_ids=words, max_new_tokens=3),
            lambda: model.generate_batch([[4, 5, 6]], bad_words_ids=words, max_new_tokens=3, progress_bar=False),
            lambda: model.engine.add_request(
                [4, 5, 6], PARAMS, extras=RequestExtras(bad_words_ids=tuple(map(tuple, words)))
            ),
        ):
            with pytest.raises(ValueError):  # Transformers' type; the message is ours or theirs
                call()
        for _ in model.engine.as_finished(states):
            pass
        assert states[0].output().outputs[0].token_ids == expected
    assert_idle(model.engine)


def test_interrupt_between_deciding_and_running_a_step(model, monkeypatch):
    engine = model.engine
    expected = engine.generate([PROMPT[:20]], PARAMS)[0].outputs[0].token_ids
    schedule = engine.live.scheduler.schedule
    waiting = engine.add_request(PROMPT[:20], PARAMS)

    def interrupted_after():
        schedule()
        raise KeyboardInterrupt

    # The step is in flight and its output is lost, as if Ctrl-C had struck right after `schedule` returned.
    engine._loop.drain_inbox()
    engine.live.scheduler.schedule()
    other = engine.generate([PROMPT[:33]], PARAMS)[0].outputs[0].token_ids
    engine.wait(waiting)
    assert waiting.output().outputs[0].token_ids == expected
    assert other == engine.generate([PROMPT[:33]], PARAMS)[0].outputs[0].token_ids
    monkeypatch.setattr(engine.live.scheduler, "schedule", interrupted_after)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT[:20]], PARAMS)
    monkeypatch.undo()
    assert engine.generate([PROMPT[:20]], PARAMS)[0].outputs[0].token_ids == expected
    assert_idle(engine)


def test_interrupt_while_a_request_is_being_queued(model, monkeypatch):
    engine = model.engine
    monkeypatch.setattr(engine._turns, "notify", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.add_request(PROMPT[:20], PARAMS)
    monkeypatch.undo()
    engine.release()
    assert_idle(engine)


def interrupted_once(monkeypatch, owner, name: str, times: int = 1, after: bool = False) -> list[int]:
    """Ctrl-C strikes at the beginning of a method, or at its end, at its first calls."""
    method, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) > times:
            return method(*args, **kwargs)
        if after:
            method(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    return calls


@pytest.mark.parametrize("at", range(1, 5))
def test_interrupt_while_blocks_are_freed_at_the_end_of_an_asynchronous_run(at, monkeypatch):
    """The step that was launched ahead of a stop is forgotten, and so are its blocks."""
    config = PagedConfig(async_scheduling=True, num_blocks=20)
    model = AutoPagedModelForCausalLM.from_model(tiny_model("llama"), paged_config=config)
    engine = model.engine
    (answer,) = engine.generate([PROMPT], PARAMS)
    tokens = answer.outputs[0].token_ids
    stopping = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[tokens[3]])
    free, calls = BlockManager.free, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return free(self, *args, **kwargs)

    monkeypatch.setattr(BlockManager, "free", interrupted)
    for _ in range(4):
        with contextlib.suppress(KeyboardInterrupt, EngineError):
            engine.generate([PROMPT], stopping)
    assert len(calls) >= at
    monkeypatch.undo()
    assert engine.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == tokens
    assert_idle(engine)


def test_a_second_interrupt_while_the_callers_are_told_of_the_first(model):
    """The pool is a new one by then: what was cached in the old one must not be found."""
    engine = model.engine
    expected = engine.generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    interrupts = [KeyboardInterrupt, KeyboardInterrupt]

    def on_update(state):
        if interrupts:
            raise interrupts.pop()

    told = engine.add_request(PROMPT[:20], PARAMS, on_update=on_update)
    others = [engine.add_request(PROMPT[:n], PARAMS) for n in (30, 40)]
    with pytest.raises(KeyboardInterrupt):
        engine.wait(told)
    for _ in range(2):
        assert engine.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == expected
    assert all(state.finished for state in [told, *others])
    assert_idle(engine)


@pytest.mark.parametrize("place", [(StepLoop, "forget_all"), (LiveRequests, "forget_all"), (LiveRequests, "reset")])
@pytest.mark.parametrize("after", [False, True])
def test_a_second_interrupt_while_the_engine_starts_over(model, place, after, monkeypatch):
    engine = model.engine
    expected = engine.generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    states = [engine.add_request(PROMPT[:n], PARAMS) for n in (20, 30)]
    interrupted_once(monkeypatch, LiveRequests, "collect", after=after)
    interrupted_once(monkeypatch, *place, after=after)
    with pytest.raises(KeyboardInterrupt):
        engine.wait(states[0])
    for _ in range(2):
        assert engine.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == expected
    assert all(state.finished for state in states)
    assert_idle(engine)


@pytest.mark.parametrize("place", [(WaitingRoom, "leave"), (LiveRequests, "end"), (LiveRequests, "abort")])
@pytest.mark.parametrize("after", [False, True])
def test_interrupt_while_a_call_gives_its_rows_back(model, place, after, monkeypatch):
    def beams():
        return model.generate(torch.tensor([PROMPT[:20]]), num_beams=3, max_new_tokens=6, do_sample=False)

    engine, expected = model.engine, beams()
    calls = interrupted_once(monkeypatch, *place, after=after)
    with pytest.raises(KeyboardInterrupt):
        beams()
    assert calls and torch.equal(beams(), expected)
    assert_idle(engine)


def test_a_request_that_is_posted_when_an_interrupt_strikes_is_told(model, monkeypatch):
    engine = model.engine
    interrupted_once(monkeypatch, LiveRequests, "add")
    state = engine.add_request(PROMPT[:20], PARAMS)
    with pytest.raises(KeyboardInterrupt):
        engine.release()
    engine.wait(state)
    assert isinstance(state.error, EngineError)
    assert_idle(engine)


def test_interrupt_before_a_row_is_queued(model, monkeypatch):
    """Nobody knows of it, so nobody will ever end it."""
    interrupted_once(monkeypatch, type(model.engine), "enqueue")
    with pytest.raises(KeyboardInterrupt):
        model.generate(torch.tensor([PROMPT[:20]]), num_beams=3, max_new_tokens=6)
    monkeypatch.undo()
    session = Session(model.engine, 4)
    interrupted_once(monkeypatch, type(model.engine), "enqueue")
    with pytest.raises(KeyboardInterrupt):
        session.start([PROMPT[:20]])
    session.close()
    limits, params = model.engine.limits, model.engine.resolve(PARAMS)
    group = make_group(PROMPT[:20], params, limits, request_id=None, priority=0, extra_keys=(), extras=NO_EXTRAS)
    unknown = RequestState(group, None, None, None)
    model.engine.end([unknown])
    assert unknown.finished
    assert_idle(model.engine)


@pytest.mark.parametrize(
    "keys",
    [(torch.zeros(3),), (np.zeros(3),), ((1, [2]),), [1], "ab", None, ({},), (object(),)],
    ids=lambda keys: type(keys).__name__,
)
def test_keys_that_cannot_be_compared_are_refused_and_touch_nobody(model, keys):
    engine = model.engine
    running = engine.add_request(PROMPT[:20], PARAMS)
    with pytest.raises(InvalidRequestError, match="`extra_keys`"):
        engine.add_request(PROMPT[:20], PARAMS, extra_keys=keys)
    engine.wait(running)
    assert running.error is None and len(running.output().outputs[0].token_ids) == 6


def test_token_ids_may_be_numbers_of_any_library(model):
    expected = model.engine.generate([PROMPT[:5]], PARAMS)[0].outputs[0].token_ids
    for prompt in (list(np.array(PROMPT[:5])), list(torch.tensor(PROMPT[:5])), tuple(PROMPT[:5]), np.array(PROMPT[:5])):
        assert model.engine.generate([prompt], PARAMS)[0].outputs[0].token_ids == expected
    for prompt in ([True, 2], [np.bool_(True)], [1.0], [np.float32(1)], {1: 2}, {1, 2}, iter([1, 2])):
        with pytest.raises(InvalidRequestError):
            model.engine.generate([prompt], PARAMS)


@pytest.mark.parametrize("name", ["generate", "release", "sleep", "step"])
def test_calling_back_into_the_engine_from_a_step_raises_instead_of_hanging(model, name):
    engine, errors = model.engine, []

    def call_back(state):
        if not errors:
            try:
                engine.generate([[1, 2]], PARAMS) if name == "generate" else getattr(engine, name)()
            except EngineError as error:
                errors.append(error)

    state = engine.add_request(PROMPT[:5], PARAMS, on_update=call_back)
    engine.wait(state)
    assert "within a step" in str(errors[0]) and len(state.output().outputs[0].token_ids) == 6
    engine.abort_all()
    assert_idle(engine)


def test_release_waits_for_the_step_and_then_sees_who_came_meanwhile(model):
    engine = model.engine
    in_step, go_on = threading.Event(), threading.Event()

    def slow(state):
        in_step.set()
        go_on.wait(10)

    first = threading.Thread(target=lambda: engine.wait(engine.add_request([1, 2, 3], PARAMS, on_update=slow)))
    first.start()
    assert in_step.wait(10)
    outcome: list = []

    def release():
        try:
            outcome.append(engine.release())
        except EngineError as error:
            outcome.append(error)

    releaser = threading.Thread(target=release)
    releaser.start()
    time.sleep(0.05)
    late = threading.Thread(target=lambda: outcome.append(engine.generate([[4, 5, 6]], PARAMS)))
    late.start()
    go_on.set()
    for thread in (first, releaser, late):
        thread.join(20)
        assert not thread.is_alive()
    assert len(outcome) == 2  # released or refused to, and the late request was answered
    assert_idle(engine)


def test_a_tokenizer_that_raises_fails_its_own_request(monkeypatch):
    model = AutoPagedModelForCausalLM.from_model(tiny_model("llama", vocab_size=VOCAB_SIZE))
    engine = model.engine
    expected = engine.generate([PROMPT[:20]], PARAMS)[0].outputs[0].token_ids
    with engine.requests() as states:
        states.append(engine.add_request(PROMPT[:20], PARAMS))
        params = PARAMS.replace(stop="never said")
        states.append(engine.add_request(PROMPT[:9], params, tokenizer=tiny_tokenizer()))
        engine.step()

        def broken(token_ids):
            raise RuntimeError("broken tokenizer")

        monkeypatch.setattr(states[1].answers[0]._detokenizer, "append", broken)
        for _ in engine.as_settled(states):
            pass
        assert states[0].output().outputs[0].token_ids == expected
        assert isinstance(states[1].error, EngineError) and not isinstance(states[1].error, StepFailedError)
        assert "broken tokenizer" in str(states[1].error)
    assert_idle(engine)


def test_tokens_given_as_tensors_and_text_are_tokens(model):
    token = model.engine.generate([PROMPT[:20]], PARAMS)[0].outputs[0].token_ids[0]
    for stop in (torch.tensor([token]), [torch.tensor(token)], [str(token)]):
        output = model.engine.generate([PROMPT[:20]], PARAMS.replace(stop_token_ids=stop))[0].outputs[0]
        assert output.token_ids == [token] and output.stop_reason == token
    with pytest.raises(InvalidRequestError, match="`n`"):
        SamplingParams(n=torch.tensor([1, 2]))
    with pytest.raises(InvalidRequestError, match="`temperature`"):
        SamplingParams(temperature=10**400)


def test_generate_treats_odd_values_as_transformers_does(model):
    ids = torch.tensor([PROMPT[:12]])
    stock = tiny_model("llama")
    plain = stock.generate(ids, max_new_tokens=5, do_sample=False)
    for eos in (250, [250, 198]):
        assert torch.equal(
            model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=eos),
            stock.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=eos),
        )
    for wrong in ({"repetition_penalty": 0.0}, {"do_sample": True, "top_k": -1}):
        with pytest.raises(ValueError):
            model.generate(ids, max_new_tokens=5, **wrong)
    mask = torch.tensor([[0, 2, 2] + [1] * 9])
    expected = stock.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False), expected)
    assert plain.shape[1] == 17
