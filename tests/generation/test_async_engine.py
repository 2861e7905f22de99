"""`AsyncEngine`: requests that come and go in an event loop, each a stream of outputs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import warnings

import pytest
import torch

from hf_paged import (
    AsyncEngine,
    EngineClosedError,
    InvalidRequestError,
    PromptTooLongError,
    RequestAbortedError,
    SamplingParams,
    StepFailedError,
)
from tests.conftest import random_prompts
from tests.families import greedy, tiny_model
from tests.paged_models import assert_idle, paged
from tests.successor_model import ids, successor_model
from tests.tokenizers_for_tests import tiny_tokenizer

PROMPTS = random_prompts(12, 199, seed=1)
CHAIN = ids("the", " and", "hell", "o", "\n", "in")


def params(max_tokens: int = 8, **kwargs) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **kwargs})


@pytest.fixture(scope="module")
def model():
    return paged(block_size=8, num_blocks=100, max_num_seqs=8)


@pytest.fixture(scope="module")
def expected():
    return greedy(tiny_model("llama"), PROMPTS, 8)


@pytest.fixture
def engine(model):
    threads = threading.active_count()
    engine = AsyncEngine(model)
    yield engine
    engine.close()
    engine.close()
    assert_idle(model.engine)
    assert threading.active_count() == threads


@pytest.fixture(scope="module")
def talker():
    from hf_paged import AutoPagedModelForCausalLM

    return AutoPagedModelForCausalLM.from_model(successor_model(CHAIN))


async def collect(stream) -> list:
    return [output async for output in stream]


async def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.005)


def test_cumulative_delta_and_final_outputs(talker):
    async def run():
        engine = AsyncEngine(talker, tokenizer=tiny_tokenizer())
        try:
            return [
                await collect(engine.generate("in", params(9, logprobs=1), output_kind=kind))
                for kind in ("cumulative", "delta", "final")
            ]
        finally:
            engine.close()

    cumulative, delta, final = asyncio.run(run())
    whole, text = (CHAIN * 2)[:9], tiny_tokenizer().decode((CHAIN * 2)[:9])
    for output in cumulative[:-1]:
        answer = output.outputs[0]
        assert not output.finished and answer.finish_reason is None
        assert answer.token_ids == whole[: len(answer.token_ids)] and text.startswith(answer.text)
    lengths = [len(output.outputs[0].token_ids) for output in cumulative]
    assert lengths == sorted(lengths) and len(cumulative) > 2
    assert [token for output in delta for token in output.outputs[0].token_ids] == whole
    assert "".join(output.outputs[0].text for output in delta) == text
    assert sum(len(output.outputs[0].logprobs) for output in delta) == 9
    assert len(final) == 1
    for outputs in (cumulative, final):
        assert outputs[-1].finished and outputs[-1].prompt == "in"
        assert outputs[-1].outputs[0].token_ids == whole and outputs[-1].outputs[0].text == text
        assert outputs[-1].outputs[0].finish_reason == "length"


def test_stop_string_is_never_shown(talker):
    """vllm-project/vllm#11089: hold back what could begin a stop string, and nothing else."""

    async def run():
        engine = AsyncEngine(talker, tokenizer=tiny_tokenizer())
        try:
            return await collect(engine.generate("in", params(20, stop="lo\nX"))), await collect(
                engine.generate("in", params(20, stop="llo\nin"))
            )
        finally:
            engine.close()

    missed, hit = asyncio.run(run())
    texts = {len(output.outputs[0].token_ids): output.outputs[0].text for output in missed}
    assert texts.get(1, "the") == "the" and texts.get(2, "the and") == "the and"
    assert all("lo" not in text[-2:] for count, text in texts.items() if count < 20)
    assert texts[20] == tiny_tokenizer().decode((CHAIN * 4)[:20])
    assert hit[-1].outputs[0].text == "the andhe" and hit[-1].outputs[0].stop_reason == "llo\nin"
    assert all("the andhe".startswith(output.outputs[0].text) for output in hit)


def test_many_at_once_equal_single_runs(engine, expected):
    async def run():
        return await asyncio.gather(
            *[collect(engine.generate(prompt, params(), output_kind="final")) for prompt in PROMPTS * 2]
        )

    engine.engine.reset_stats()
    results = asyncio.run(run())
    assert [outputs[-1].outputs[0].token_ids for outputs in results] == expected * 2
    assert engine.engine.stats().peak_running > 1


def test_several_answers_in_one_stream(engine):
    async def run():
        return await collect(engine.generate([5, 6], params(6, n=3, temperature=1.2, seed=4), output_kind="delta"))

    outputs = asyncio.run(run())
    answers = [[], [], []]
    for output in outputs:
        for answer in output.outputs:
            answers[answer.index] += answer.token_ids
    (single,) = engine.engine.generate([[5, 6]], params(6, n=3, temperature=1.2, seed=4))
    assert answers == [answer.token_ids for answer in single.outputs]


def test_started_idle_then_used(engine, expected):
    """huggingface/transformers#48303: the manager died if it was started before the first request."""
    engine.start()
    engine.start()
    time.sleep(0.2)
    assert len([thread for thread in threading.enumerate() if thread.name == "hf_paged-engine"]) == 1
    (output,) = asyncio.run(collect(engine.generate(PROMPTS[0], params(), output_kind="final")))
    assert output.outputs[0].token_ids == expected[0]
    time.sleep(0.1)
    (output,) = asyncio.run(collect(engine.generate(PROMPTS[1], params(), output_kind="final")))
    assert output.outputs[0].token_ids == expected[1]


def test_idle_thread_does_nothing(engine, monkeypatch):
    step, calls = engine.engine.step, []
    monkeypatch.setattr(engine.engine, "step", lambda: calls.append(1) or step())
    engine.start()
    asyncio.run(collect(engine.generate([3, 4], params(2))))
    asyncio.run(until(lambda: not engine.engine.has_unfinished))
    time.sleep(0.1)
    before = len(calls)
    time.sleep(0.3)
    assert len(calls) == before >= 2


def test_abort_ends_the_stream_with_an_error(engine, expected):
    async def run():
        stream, seen = engine.generate(PROMPTS[0], params(400), "mine"), []
        other = asyncio.create_task(collect(engine.generate(PROMPTS[1], params())))
        with pytest.raises(RequestAbortedError, match="'mine'"):
            async for output in stream:
                seen.append(output)
                if len(seen) == 3:
                    await engine.abort("mine")
                    await engine.abort("mine")
                    await engine.abort("nobody")
        return seen, await other

    seen, other = asyncio.run(run())
    assert 3 <= len(seen) < 400 and other[-1].outputs[0].token_ids == expected[1]


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "exception"])
def test_consumer_that_leaves_frees_its_blocks(engine, how):
    """raullenchai/Rapid-MLX#1759: clients that disconnected kept their slots until none was left."""

    async def run():
        async def consume(fail: bool = False):
            async for output in engine.generate(PROMPTS[0], params(400, ignore_eos=True)):
                if len(output.outputs[0].token_ids) > 2 and how != "cancel":
                    if fail:
                        raise LookupError
                    break

        if how == "aclose":
            stream = engine.generate(PROMPTS[0], params(400, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
        elif how == "cancel":
            task = asyncio.create_task(consume())
            await until(lambda: engine.engine.stats().num_generated_tokens > before)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "exception":
            with pytest.raises(LookupError):
                await consume(fail=True)
        else:
            await consume()
        gc.collect()
        await until(lambda: not engine.engine.has_unfinished)
        assert engine.engine.stats().num_generated_tokens - before < 400

    before = engine.engine.stats().num_generated_tokens
    asyncio.run(run())
    assert_idle(engine.engine)


def test_many_consumers_that_leave_do_not_block_those_that_stay(engine, expected):
    async def run():
        async def leave(prompt):
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(0.01):
                    async for _ in engine.generate(prompt, params(300, ignore_eos=True)):
                        pass

        await asyncio.gather(*[leave(PROMPTS[i % 12]) for i in range(40)])
        (output,) = await collect(engine.generate(PROMPTS[2], params(), output_kind="final"))
        return output

    assert asyncio.run(run()).outputs[0].token_ids == expected[2]


def test_event_loop_that_ends_in_the_middle_harms_nobody(engine, expected):
    """What a dead loop is told must not fail the requests of others."""
    state = engine.engine.add_request(PROMPTS[0], params(60, ignore_eos=True))

    async def run():
        stream = engine.generate(PROMPTS[1], params(300, ignore_eos=True))
        await anext(stream)
        return stream  # still open when the loop is closed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            asyncio.run(run())
    engine.engine.wait(state)
    assert state.error is None
    assert state.output().outputs[0].token_ids[:8] == expected[0]


def test_error_of_a_step_reaches_the_consumers_and_the_engine_goes_on(model, engine, expected):
    forward = type(model).forward

    def broken(self, *args, **kwargs):
        raise ZeroDivisionError("in the model")

    async def run():
        return await asyncio.gather(
            *[collect(engine.generate(prompt, params())) for prompt in PROMPTS[:3]], return_exceptions=True
        )

    type(model).forward = broken
    try:
        errors = asyncio.run(run())
    finally:
        type(model).forward = forward
    assert all(isinstance(error, StepFailedError) for error in errors)
    assert all(isinstance(error.__cause__, ZeroDivisionError) for error in errors)
    assert [outputs[-1].outputs[0].token_ids for outputs in asyncio.run(run())] == expected[:3]


def test_requests_of_other_threads_run_beside_the_streams(model, engine, expected):
    async def run():
        stream = asyncio.create_task(collect(engine.generate(PROMPTS[0], params(60, ignore_eos=True))))
        answers = [
            await asyncio.to_thread(model.generate, torch.tensor([prompt]), max_new_tokens=8) for prompt in PROMPTS[1:3]
        ]
        return answers, await stream

    answers, stream = asyncio.run(run())
    assert [row[0, -8:].tolist() for row in answers] == expected[1:3]
    assert stream[-1].outputs[0].token_ids[:8] == expected[0]


@pytest.mark.parametrize(
    ("prompt", "kwargs", "error", "match"),
    [
        ([], {}, InvalidRequestError, "prompt is empty"),
        ([3] * 600, {}, PromptTooLongError, "600 tokens"),
        ("text", {}, InvalidRequestError, "no tokenizer"),
        ([3], {"sampling_params": {"n": 2}}, InvalidRequestError, "must be a SamplingParams"),
        ([3], {"output_kind": "all"}, InvalidRequestError, "`output_kind` must be"),
        ([3], {"sampling_params": SamplingParams(stop="x")}, InvalidRequestError, "`stop` needs a tokenizer"),
    ],
)
def test_wrong_requests_are_refused_and_nobody_else_notices(engine, expected, prompt, kwargs, error, match):
    async def run():
        other = asyncio.create_task(collect(engine.generate(PROMPTS[0], params())))
        with pytest.raises(error, match=match):
            await collect(engine.generate(prompt, **kwargs))
        return await other

    assert asyncio.run(run())[-1].outputs[0].token_ids == expected[0]


def test_close_aborts_what_runs_and_refuses_what_comes(model, expected):
    async def run():
        engine = AsyncEngine(model)
        task = asyncio.create_task(collect(engine.generate(PROMPTS[0], params(400, ignore_eos=True))))
        await until(lambda: model.engine.has_unfinished)
        await asyncio.to_thread(engine.close)
        engine.close()
        with pytest.raises(RequestAbortedError):
            await task
        with pytest.raises(EngineClosedError, match="closed"):
            await collect(engine.generate(PROMPTS[0], params()))
        with pytest.raises(EngineClosedError):
            engine.start()

    asyncio.run(run())
    assert_idle(model.engine)
    assert not [thread for thread in threading.enumerate() if thread.name == "hf_paged-engine"]
    assert model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8)[0, -8:].tolist() == expected[0]


def test_close_does_not_abort_the_requests_of_others(model, expected):
    engine = AsyncEngine(model)
    engine.start()
    state = model.engine.add_request(PROMPTS[0], params(8))
    engine.close()
    model.engine.wait(state)
    assert state.output().outputs[0].token_ids == expected[0]
    assert_idle(model.engine)


def test_engine_closed_under_it_ends_the_streams():
    model = paged(num_blocks=50)
    engine = AsyncEngine(model)

    async def run():
        task = asyncio.create_task(collect(engine.generate(PROMPTS[0], params(400, ignore_eos=True))))
        await until(lambda: model.engine.stats().num_generated_tokens > 2)
        await asyncio.to_thread(model.engine.close)
        with pytest.raises(EngineClosedError):
            await task

    asyncio.run(run())
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hf_paged-engine"]


def test_request_waits_while_the_engine_sleeps(model):
    engine = AsyncEngine(model)
    engine.start()
    model.engine.sleep()
    model.engine.weights_changed()
    model.engine.wake()  # the thread looks, and must not end
    time.sleep(0.05)
    try:
        with pytest.raises(EngineClosedError, match="sleeps"):
            asyncio.run(collect(engine.generate(PROMPTS[0], params())))
    finally:
        model.engine.wake_up()
    (output,) = asyncio.run(collect(engine.generate(PROMPTS[0], params(), output_kind="final")))
    assert len(output.outputs[0].token_ids) == 8
    engine.close()


def test_extra_keys_and_priority_are_passed_on(engine):
    prompt = list(range(3, 40))

    async def run():
        cached = []
        for keys in (("x",), ("y",), ("x",)):
            (output,) = await collect(
                engine.generate(prompt, params(2), extra_keys=keys, priority=1, output_kind="final")
            )
            cached.append(output.num_cached_tokens)
        return cached

    assert asyncio.run(run()) == [0, 0, 32]


def test_loose_engine_ends_with_the_process():
    """An engine that nobody closed must not keep the process alive."""
    import subprocess
    import sys

    code = (
        "import asyncio, torch\n"
        "from tests.paged_models import paged\n"
        "from hf_paged import AsyncEngine, SamplingParams\n"
        "engine = AsyncEngine(paged(num_blocks=20))\n"
        "async def run():\n"
        "    async for output in engine.generate([3, 4], SamplingParams(max_tokens=3)): pass\n"
        "asyncio.run(run())\n"
        "print('done')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout == "done\n", run.stderr


def test_process_that_ends_while_the_thread_is_at_work():
    """A daemon thread that the interpreter kills inside torch takes the process along."""
    import subprocess
    import sys

    code = (
        "import asyncio, sys, torch; torch.set_num_threads(1)\n"
        "from tests.paged_models import paged, spend_time_in_torch\n"
        "from hf_paged import AsyncEngine, SamplingParams\n"
        "engine = AsyncEngine(paged(num_blocks=300, block_size=8)); spend_time_in_torch(engine.model)\n"
        "async def one(i):\n"
        "    async for output in engine.generate([5, 6, 7 + i], SamplingParams(max_tokens=450, temperature=0)):\n"
        "        started.set()\n"
        "async def run():\n"
        "    global started\n"
        "    started = asyncio.Event()\n"
        "    global tasks\n"
        "    tasks = [asyncio.create_task(one(i)) for i in range(6)]\n"
        "    await started.wait()\n"
        "    await asyncio.sleep(0.2)\n"
        "loop = asyncio.new_event_loop()\n"
        "loop.run_until_complete(run())\n"
        "sys.exit(3)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 3, run.stderr
