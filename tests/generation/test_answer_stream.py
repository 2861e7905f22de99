"""Streams of answers between the engine's thread and an event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from hf_paged import (
    AsyncEngine,
    DeadlineExceededError,
    EngineDiedError,
    EngineError,
    InvalidRequestError,
    RequestAbortedError,
    SamplingParams,
    StepFailedError,
)
from tests.conftest import random_prompts
from tests.families import greedy, tiny_model
from tests.paged_models import assert_idle, broken_forward, paged
from tests.successor_model import ids, successor_model
from tests.tokenizers_for_tests import tiny_tokenizer

PROMPTS = random_prompts(12, 199, seed=1)
CHAIN = ids("the", " and", "hell", "o", "\n", "in")


def params(max_tokens: int = 8, **kwargs) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **kwargs})


@pytest.fixture
def model():
    return paged(block_size=8, num_blocks=100, max_num_seqs=8)


@pytest.fixture
def engine(model):
    engine = AsyncEngine(model)
    yield engine
    engine.close()
    assert_idle(model.engine)
    assert not engine._live


def test_deltas_joined_are_the_whole_answers(engine):
    async def run():
        async with engine.submit(PROMPTS[0], params(20, n=3, temperature=1.0, seed=3, logprobs=2)) as stream:
            deltas = [delta async for news in stream for delta in news]
            assert stream.has_ended and stream.has_started
        whole = await engine.submit(
            PROMPTS[0], params(20, n=3, temperature=1.0, seed=3, logprobs=2), stream=False
        ).output()
        return deltas, whole

    deltas, whole = asyncio.run(run())
    for answer in whole.outputs:
        mine = [delta for delta in deltas if delta.index == answer.index]
        assert [token for delta in mine for token in delta.token_ids] == answer.token_ids
        assert sum(len(delta.logprobs) for delta in mine) == len(answer.token_ids)
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [answer.finish_reason]


def test_text_of_deltas_is_the_text():
    from hf_paged import AutoPagedModelForCausalLM

    talker = AutoPagedModelForCausalLM.from_model(successor_model(CHAIN))
    engine = AsyncEngine(talker, tokenizer=tiny_tokenizer())

    async def run(**kwargs):
        stream = engine.submit([CHAIN[-1]], params(12, **kwargs))
        return [delta async for news in stream for delta in news], await stream.output()

    deltas, whole = asyncio.run(run())
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text == tiny_tokenizer().decode(CHAIN * 2)
    deltas, whole = asyncio.run(run(stop="llo\nin"))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text == "the andhe"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "llo\nin")
    engine.close()


def test_slow_reader_gets_what_came_in_one_piece_and_holds_up_nobody(engine):
    expected = greedy(tiny_model("llama"), PROMPTS[:2], 30)

    async def run():
        slow = engine.submit(PROMPTS[0], params(30))
        quick = await engine.submit(PROMPTS[1], params(30)).output()
        while not slow.has_ended:
            await asyncio.sleep(0.01)
        return [news async for news in slow], quick

    pieces, quick = asyncio.run(run())
    assert len(pieces) == 1 and len(pieces[0]) == 1
    assert pieces[0][0].token_ids == expected[0] and pieces[0][0].finish_reason == "length"
    assert quick.outputs[0].token_ids == expected[1]


def test_one_wake_up_a_step_for_all_streams(engine):
    calls = []

    async def run():
        loop = asyncio.get_running_loop()
        plain = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args, **kwargs: (calls.append(1), plain(*args, **kwargs))[1]
        await asyncio.gather(*[engine.submit(prompt, params(16)).output() for prompt in PROMPTS[:8]])

    before = engine.engine.stats().num_steps
    asyncio.run(run())
    assert 0 < len(calls) <= engine.engine.stats().num_steps - before + 2


def test_deadline_ends_the_request_and_says_so(engine):
    async def run():
        stream = engine.submit(PROMPTS[0], params(10_000, ignore_eos=True), deadline=0.2)
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"within 0\.2 s"):
            await stream.output()
        assert time.monotonic() - started < 5
        fast = engine.submit(PROMPTS[0], params(2), deadline=60)
        await fast.output()
        async with asyncio.timeout(10):  # the engine's thread may hand over the end while the reader has it already
            while fast._timer is not None:
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_leaving_ends_the_request_and_abort_tells_the_reader_why(engine):
    async def run():
        async with engine.submit(PROMPTS[0], params(10_000)) as stream:
            await anext(stream)
        stream.abort()
        told = engine.submit(PROMPTS[1], params(10_000))
        threading.Timer(0.1, told.abort, [ValueError("enough")]).start()
        with pytest.raises(ValueError, match="enough"):
            await told.output()
        plain = engine.submit(PROMPTS[1], params(10_000))
        plain.abort()
        with pytest.raises(RequestAbortedError, match="was aborted"):
            await plain.output()

    asyncio.run(run())


def test_refused_request_leaves_nothing(engine):
    async def run():
        with pytest.raises(InvalidRequestError):
            engine.submit([], params())
        kept = engine.submit(PROMPTS[0], params(50), request_id="mine")
        with pytest.raises(InvalidRequestError, match="still running"):
            engine.submit(PROMPTS[0], params(), request_id="mine")
        assert len(engine._live) == 1
        await kept.output()

    asyncio.run(run())


def test_what_came_before_an_error_is_read_before_it(engine, model):
    calls, forward = [], type(model).forward

    def fail(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("the fourth forward")
        return forward(self, *args, **kwargs)

    async def run():
        stream, got = engine.submit(PROMPTS[0], params(10)), []
        with pytest.raises(StepFailedError, match="the fourth forward"):
            async for news in stream:
                got += news[0].token_ids
        return got, await engine.submit(PROMPTS[0], params(10)).output()

    type(model).forward = fail
    try:
        got, after = asyncio.run(run())
    finally:
        type(model).forward = forward
    assert len(got) == 3 and after.outputs[0].token_ids[:3] == got


def test_dead_thread_tells_everybody_and_takes_no_more(model):
    """vllm-project/vllm#7633: an engine whose loop has ended does not look healthy."""
    deaths = []
    engine = AsyncEngine(model, on_death=deaths.append)

    async def run():
        assert engine.is_alive
        streams = [engine.submit(prompt, params(10_000)) for prompt in PROMPTS[:3]]
        await anext(streams[0])
        engine.engine.step = lambda: (_ for _ in ()).throw(SystemExit("killed"))
        for stream in streams:
            with pytest.raises(EngineDiedError, match="thread has ended: SystemExit: killed"):
                await stream.output()
        with pytest.raises(EngineDiedError, match="thread has ended"):
            engine.submit(PROMPTS[0], params())

    asyncio.run(run())
    engine._thread.join(10)
    assert not engine.is_alive and isinstance(engine.cause, SystemExit) and deaths == [engine.cause]
    del engine.engine.step
    engine.close()
    assert_idle(model.engine)


def test_counts_of_those_that_run_and_wait(model):
    async def run():
        streams = [engine.submit(prompt, params(10_000)) for prompt in [PROMPTS[0]] * 12]
        await anext(streams[0])
        while engine.num_running < 8:
            await asyncio.sleep(0.01)
        assert engine.num_waiting == 4 and engine.num_waiting_tokens == 4 * len(PROMPTS[0])
        assert engine.seconds_since_step < 5
        for stream in streams:
            stream.abort()
        for stream in streams:
            with pytest.raises(RequestAbortedError):
                await stream.output()
        assert (engine.num_running, engine.num_waiting, engine.seconds_since_step) == (0, 0, 0.0)

    engine = AsyncEngine(model)
    asyncio.run(run())
    engine.close()


def test_lost_device_ends_the_thread(model):
    """After an error of the accelerator itself no step of this process can succeed, so only a restart helps."""
    engine, cause = AsyncEngine(model), torch.AcceleratorError("an illegal memory access was encountered")

    async def ask(prompt):  # the thread may have ended before the later ones are submitted
        return await engine.submit(prompt, params()).output()

    async def run():
        with broken_forward(model, cause):
            return await asyncio.gather(*(ask(prompt) for prompt in PROMPTS[:3]), return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, EngineError) and "illegal memory access" in str(error)
    engine._thread.join(10)
    assert not engine.is_alive and engine.cause is cause
    engine.close()
    assert_idle(model.engine)


@pytest.mark.parametrize("ending", ["closed", "dead"])
def test_request_that_comes_while_the_thread_ends_is_told_and_leaves_nothing(model, monkeypatch, ending):
    engine, add_request = AsyncEngine(model), model.engine.add_request

    def fall_dead(*args):
        raise SystemExit("enough")

    def add_late(*args, **kwargs):
        if ending == "closed":
            engine.close()
        else:
            engine._thread.join(10)
        return add_request(*args, **kwargs)

    async def run():
        stream = engine.submit(PROMPTS[0], params())
        with pytest.raises(RequestAbortedError if ending == "closed" else EngineDiedError):
            await asyncio.wait_for(stream.output(), 10)

    monkeypatch.setattr(model.engine, "add_request", add_late)
    if ending == "dead":
        monkeypatch.setattr(model.engine, "serve", fall_dead)
    asyncio.run(run())
    monkeypatch.undo()
    engine.close()
    assert_idle(model.engine)
    assert not engine._live
