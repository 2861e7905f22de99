"""Sessions: rows of the engine whose tokens their caller chooses, beside others who come, go, fail and end."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from hf_paged import AutoPagedModelForCausalLM, PagedConfig, SamplingParams
from hf_paged.errors import (
    EngineClosedError,
    EngineError,
    InvalidTokenError,
    QueueFullError,
    RequestAbortedError,
    StepFailedError,
)
from hf_paged.generation.request import HiddenStatesWanted
from hf_paged.generation.session import Session
from tests.families import tiny_model
from tests.generation.loop_outputs import PROMPT, ROWS, Nothing, in_the_loop, padded
from tests.paged_models import assert_idle, paged


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama")


@pytest.fixture
def model():
    model = paged(block_size=4, num_blocks=60, max_num_seqs=8)
    yield model
    assert_idle(model.engine)


@pytest.fixture
def session(model):
    session = Session(model.engine, max_new_tokens=20)
    yield session
    session.close()


def logits_of(stock, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return stock(torch.tensor([tokens])).logits[0, -1]


def check_logits(stock, logits: torch.Tensor, rows: list[list[int]]) -> None:
    expected = torch.stack([logits_of(stock, row) for row in rows])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


# --------------------------------------------------------------------------------------- rows


def test_rows_get_tokens_and_give_logits(session, stock):
    rows = [list(row) for row in ROWS]
    check_logits(stock, session.start(rows), rows)
    for new in ([[1], [2], [3]], [[4, 5], [6], [7, 8, 9]]):
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        check_logits(stock, session.feed(new), rows)


def test_rows_become_copies_of_others(session, stock):
    rows = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 11], [12, 13]]
    session.start(rows)
    for parents, new in (
        ([1, 0, 2, 3], [[21], [22], [23], [24]]),
        ([1, 0, 1, 3], [[31], [32], [33], [34]]),
        ([2, 2, 2, 2], [[41], [42], [43], [44]]),
        ([3, 1, 2, 0], [[51, 52], [53], [54, 55, 56], [57]]),
    ):
        session.reorder(parents)
        rows = [rows[parent] + more for parent, more in zip(parents, new, strict=True)]
        check_logits(stock, session.feed(new), rows)
        assert [request.token_ids for request in session.requests] == rows


def test_reorderings_add_up(session, stock):
    """Two of them before the next tokens are one after the other."""
    rows = [[5, 6], [7, 8], [9, 10]]
    session.start(rows)
    session.reorder([1, 2, 0])
    session.reorder([0, 0, 2])
    check_logits(stock, session.feed([[1], [2], [3]]), [[7, 8, 1], [7, 8, 2], [5, 6, 3]])


def test_copies_hold_their_blocks_once(session, model):
    session.start([list(range(1, 24))] * 5)
    manager = model.engine.live.block_manager
    assert manager.num_blocks_held == 6
    session.feed([[i] for i in range(5)])
    assert manager.num_blocks_held == 5 + 5
    session.reorder([2] * 5)
    session.feed([[i] for i in range(5)])
    assert manager.num_blocks_held == 6 + 5


def test_kv_is_read_as_it_was_computed(session, model, stock):
    rows = [list(row) for row in ROWS]
    session.start(rows)
    session.feed([[1], [2], [3]])
    session.reorder([2, 1, 2])
    rows = [[*ROWS[2], 3], [*ROWS[1], 2], [*ROWS[2], 3]]
    for row, layers in zip(rows, session.read_kv(), strict=True):
        with torch.no_grad():
            cache = stock(torch.tensor([row]), use_cache=True)
        cache = cache.get("cache", cache.get("past_key_values"))
        for (key, value), layer in zip(layers, cache.layers, strict=True):
            torch.testing.assert_close(key, layer.keys[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(value, layer.values[0], atol=1e-4, rtol=1e-4)


def test_closing_twice_or_before_the_start_is_fine(model):
    session = Session(model.engine, max_new_tokens=3)
    session.close()
    session.start([[1, 2]])
    session.close()
    session.close()
    assert session.is_closed
    with pytest.raises(EngineError, match="aborted"):
        session.feed([[3]])


# --------------------------------------------------------------------------------------- lost blocks


def lose_blocks(session: Session, count: int) -> None:
    """Takes some rows' blocks away, as a request that needs them would."""
    scheduler = session.engine.live.scheduler
    for request in session.requests[:count]:
        scheduler._take_blocks(request)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_that_lost_their_blocks_are_computed_anew(stock, caching, count):
    model = paged(block_size=4, num_blocks=60, max_num_seqs=8, enable_prefix_caching=caching)
    session = Session(model.engine, max_new_tokens=20)
    rows = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10], [12, 13]]
    session.start(rows)
    for parents, new in (([1, 0, 2], [[21], [22], [23]]), ([1, 1, 1], [[31], [32], [33]]), (None, [[1], [2], [3]])):
        lose_blocks(session, count)
        if parents is not None:
            session.reorder(parents)
            rows = [rows[parent] for parent in parents]
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        check_logits(stock, session.feed(new), rows)
    lose_blocks(session, count)
    assert [layers[0][0].shape[1] for layers in session.read_kv()] == [len(row) for row in rows]
    session.close()
    assert_idle(model.engine)


def test_nobody_computes_rows_anew_while_their_caller_thinks(session, model):
    """Their blocks went to somebody who needs them now."""
    session.start([[5, 6, 7, 8, 9, 10], [12, 13]])
    lose_blocks(session, 2)
    before = model.engine.stats().num_computed_tokens
    model.generate(PROMPT, max_new_tokens=5)
    assert model.engine.stats().num_computed_tokens - before == PROMPT.shape[1] + 4
    assert model.engine.live.scheduler.num_waiting == 2


def test_logits_of_before_are_not_taken_for_new_ones(session, stock):
    """A row is computed anew, as it was, after its caller has given tokens and before the engine has seen them."""
    session.start([[5, 6, 7, 8, 9, 10]])
    engine, scheduler = session.engine, session.engine.live.scheduler
    session._choosing_since = None  # as if it had lost its blocks while a sibling was still missing
    scheduler._take_blocks(session.requests[0])
    session._choosing_since = time.perf_counter()
    post, posted = engine.post, []

    def post_late(action):
        engine.step()  # as another thread may
        posted.append(True)
        post(action)

    engine.post = post_late
    try:
        logits = session.feed([[1]])
    finally:
        del engine.post
    assert posted
    check_logits(stock, logits, [[5, 6, 7, 8, 9, 10, 1]])


def test_hidden_states_survive_lost_blocks(model, stock):
    session = Session(model.engine, max_new_tokens=9, hidden_states=HiddenStatesWanted(), attentions=True)
    rows = [ROWS[1], ROWS[1][::-1]]
    session.start(rows)
    for new in ([[1], [2]], [[3, 4, 5], [6, 7, 8]]):
        lose_blocks(session, 1)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        session.feed(new)
        with torch.no_grad():
            expected = stock(torch.tensor(rows), output_hidden_states=True).hidden_states
        for mine, theirs in zip(session.hidden_states(), expected, strict=True):
            torch.testing.assert_close(mine, theirs[:, -len(new[0]) :], atol=1e-4, rtol=1e-4)
        for weights in session.attentions():
            assert weights.shape == (2, 4, len(new[0]), len(rows[0]))
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, len(new[0])))
    session.close()


@pytest.mark.parametrize("caching", [True, False])
def test_embeddings_survive_lost_blocks(stock, caching):
    model = paged(block_size=4, num_blocks=60, enable_prefix_caching=caching)
    session = Session(model.engine, max_new_tokens=9)
    embeds = stock.get_input_embeddings()(torch.tensor([ROWS[1], ROWS[1][::-1]])).detach()
    session.start([[0] * 10] * 2, list(embeds))
    rows = [ROWS[1], ROWS[1][::-1]]
    for new in ([[1], [2]], [[3, 4, 5], [6, 7, 8]]):
        lose_blocks(session, 2)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        check_logits(stock, session.feed(new), rows)
    session.close()
    assert_idle(model.engine)


# --------------------------------------------------------------------------------------- what goes wrong


def test_wrong_tokens_are_named(session):
    session.start([[1, 2]])
    with pytest.raises(InvalidTokenError, match="199"):
        session.feed([[199]])
    session.feed([[198]])


@pytest.mark.parametrize("queue", [1, 2])
def test_a_full_queue_refuses_a_call_and_nothing_is_left(queue):
    """The rows that were queued before it was full are taken back, and nobody waits for those that were not."""
    model = paged(max_queue_size=queue)
    with pytest.raises(QueueFullError):
        model.generate(**padded(), num_beams=2, max_new_tokens=3)
    assert_idle(model.engine)
    assert model.generate(PROMPT, num_beams=2, max_new_tokens=3).shape == (1, 13)


def test_a_failed_step_fails_its_rows_and_nobody_else(model, stock, monkeypatch):
    expected = stock.generate(PROMPT, num_beams=2, max_new_tokens=6)
    launch, calls = type(model.engine._loop.ready_runner()).launch, []

    def fails_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no more")
        return launch(*args, **kwargs)

    monkeypatch.setattr(type(model.engine._loop.ready_runner()), "launch", fails_once)
    with pytest.raises(StepFailedError, match="no more"):
        model.generate(PROMPT, num_beams=2, max_new_tokens=6)
    assert_idle(model.engine)
    assert torch.equal(model.generate(PROMPT, num_beams=2, max_new_tokens=6), expected)


def test_ctrl_c_in_a_step_ends_the_call_whose_thread_ran_it(model, stock, monkeypatch):
    runner = type(model.engine._loop.ready_runner())
    launch, calls = runner.launch, []

    def is_interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return launch(*args, **kwargs)

    monkeypatch.setattr(runner, "launch", is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPT, num_beams=2, max_new_tokens=6)
    assert_idle(model.engine)
    expected = stock.generate(PROMPT, num_beams=2, max_new_tokens=6)
    assert torch.equal(model.generate(PROMPT, num_beams=2, max_new_tokens=6), expected)


def test_a_call_from_within_a_step_is_refused_and_leaves_nothing(model):
    """Its end is what the step would have to wait for."""
    errors: list = []

    def on_update(state):
        if not errors:
            with pytest.raises(EngineError, match="from within a step") as caught:
                model.generate(PROMPT, num_beams=2, max_new_tokens=4)
            errors.append(caught.value)

    state = model.engine.add_request([5, 6, 7], on_update=on_update)
    model.engine.wait(state)
    assert len(errors) == 1
    model.generate(PROMPT, max_new_tokens=2)


class During(Nothing):
    """Does something in its third call."""

    def __init__(self, action):
        self.action, self.calls = action, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            self.action()
        return scores


@pytest.mark.parametrize("num_beams", [1, 2])
def test_an_engine_that_is_closed_during_a_call_says_so(num_beams):
    model = paged()
    with pytest.raises(EngineClosedError, match="closed"):
        model.generate(PROMPT, num_beams=num_beams, max_new_tokens=9, logits_processor=[During(model.engine.close)])
    assert not model.engine.live.states


def test_an_engine_that_is_closed_by_another_thread_says_so():
    model = paged()
    timer = threading.Timer(0.3, model.engine.close)
    timer.start()
    with pytest.raises(EngineClosedError, match="closed"):
        model.generate(PROMPT, num_beams=2, max_new_tokens=500)
    timer.join()
    assert not model.engine.live.states


@pytest.mark.parametrize("num_beams", [1, 2])
def test_an_engine_cannot_sleep_during_a_call(model, stock, num_beams):
    errors: list = []

    def sleep():
        for action in (model.engine.sleep, model.engine.release):
            with pytest.raises(EngineError, match="still running") as caught:
                action()
            errors.append(caught.value)

    call = {"num_beams": num_beams, "max_new_tokens": 9}
    answer = model.generate(PROMPT, logits_processor=[During(sleep)], **call)
    assert len(errors) == 2 and torch.equal(answer, stock.generate(PROMPT, **call))


def test_rows_that_somebody_aborts_end_the_call(model):
    with pytest.raises(EngineError, match="aborted"):
        model.generate(PROMPT, num_beams=2, max_new_tokens=9, logits_processor=[During(model.engine.abort_all)])


def test_generate_may_be_called_from_within_a_processor(model, stock):
    """The rows of the call outside stand still meanwhile."""
    answers: list = []
    inside = During(lambda: answers.append(model.generate(PROMPT + 7, num_beams=2, max_new_tokens=5)))
    answer = model.generate(PROMPT, num_beams=3, max_new_tokens=9, logits_processor=[inside])
    assert torch.equal(answer, stock.generate(PROMPT, num_beams=3, max_new_tokens=9))
    assert torch.equal(answers[0], stock.generate(PROMPT + 7, num_beams=2, max_new_tokens=5))


def test_a_call_within_a_call_goes_on_though_there_are_no_seats_left(stock):
    """The call outside has them all, and cannot go on before the one inside has ended."""
    model = paged(max_num_seqs=2, num_blocks=40)
    answers: list = []
    inside = During(lambda: answers.append(model.generate(PROMPT + 7, max_new_tokens=4)))
    answer = model.generate(PROMPT, num_beams=2, max_new_tokens=9, logits_processor=[inside])
    assert torch.equal(answer, stock.generate(PROMPT, num_beams=2, max_new_tokens=9))
    assert torch.equal(answers[0], stock.generate(PROMPT + 7, max_new_tokens=4))
    assert_idle(model.engine)


def test_a_deleted_model_leaves_nothing():
    model = AutoPagedModelForCausalLM.from_model(tiny_model("llama"), paged_config=PagedConfig(num_blocks=40))
    model.generate(PROMPT, num_beams=2, max_new_tokens=4)
    engine, gone = model.engine, weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(EngineClosedError, match="deleted"):
        Session(engine, 3).start([[1, 2]])
    assert_idle(engine)


def test_weights_that_change_during_a_call_are_used(stock):
    """As in Transformers: K/V of before stay, and new tokens are computed with the new weights."""
    answers = []
    for each in (tiny_model("llama"), paged("llama", block_size=4)):

        def change(each=each):
            with torch.no_grad():
                each.lm_head.weight.mul_(-1)

        answers.append(each.generate(PROMPT, num_beams=2, max_new_tokens=9, logits_processor=[During(change)]))
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], stock.generate(PROMPT, num_beams=2, max_new_tokens=9))


def test_sessions_of_many_threads(model, stock):
    """Every kind of call at once, again and again, in an engine that cannot hold them all."""
    calls = [{"num_beams": 1 + i % 4, "max_new_tokens": 6 + i, **(in_the_loop() if i % 2 else {})} for i in range(8)]
    expected = [stock.generate(PROMPT + i, **call) for i, call in enumerate(calls)]
    results: list = [None] * len(calls)

    def run(i):
        for _ in range(3):
            results[i] = model.generate(PROMPT + i, **calls[i])

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("struck", ["abort", "start over"])
def test_rows_that_end_while_their_kv_is_read_end_the_call_alone(stock, struck):
    """The one crashed whoever ran the step, after the other the call waited for ever."""
    model = paged(block_size=8, num_blocks=60)
    engine = model.engine
    bystander = engine.add_request([1, 2, 3], SamplingParams(max_tokens=30, temperature=0.0))
    post = engine.post

    def strike(action):
        post(action)
        if action.__name__ != "read":
            return
        if struck == "abort":
            own = [name for name in engine.live.states if name != bystander.request_id]
            engine._loop.inbox.appendleft(lambda: [engine.live.abort(name) for name in own])
        else:
            with engine._turns.mutex:
                engine._turns.wait_for_turn()
                engine._loop._start_over(KeyboardInterrupt())

    engine.post = strike
    with pytest.raises(RequestAbortedError if struck == "abort" else EngineError):
        model.generate(torch.tensor([[5, 6, 7]]), num_beams=2, max_new_tokens=4, return_dict_in_generate=True)
    del engine.post
    engine.wait(bystander)
    assert (bystander.error is None) == (struck == "abort")
    assert_idle(engine)
