"""`ContinuousBatchingManager`: requests that come and go, with Transformers' methods."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import queue
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, GenerationMixin
from transformers.generation.continuous_batching import ContinuousBatchingManager as Theirs

from hf_paged.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    InvalidTokenError,
    QueueFullError,
    RequestAbortedError,
)
from hf_paged.generation.manager import ContinuousBatchingManager
from hf_paged.generation.outputs import GenerationStatus
from tests.conftest import random_prompts
from tests.families import greedy, tiny_model
from tests.paged_models import assert_idle, paged
from tests.tokenizers_for_tests import VOCAB_SIZE, tiny_tokenizer

PROMPTS = random_prompts(9, VOCAB_SIZE, seed=4)
LONG = 400


@pytest.fixture(scope="module")
def shared():
    return paged(overrides={"vocab_size": VOCAB_SIZE}, max_num_seqs=4, num_blocks=100, max_num_batched_tokens=48)


@pytest.fixture
def model(shared):
    shared.generation_config = tiny_model("llama").generation_config
    yield shared
    assert_idle(shared.engine)
    assert not [thread for thread in threading.enumerate() if thread.name == "hf_paged-manager"]


@pytest.fixture
def manager(model):
    manager = model.init_continuous_batching()
    manager.start()
    yield manager
    manager.stop(timeout=30, hard_stop=True)


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama", vocab_size=VOCAB_SIZE)


def collect(manager, request_ids, timeout=30):
    """The last result of each request, and the numbers of tokens of all results before."""
    results, partial = {}, []
    while len(results) < len(request_ids):
        output = manager.get_result(timeout=timeout)
        assert output is not None, "no result came"
        if output.is_finished():
            results[output.request_id] = output
        else:
            partial.append(output)
    return [results[request_id] for request_id in request_ids], partial


def tokens_of(results) -> list[list[int]]:
    return [result.generated_tokens for result in results]


def wait_for(condition, timeout=30):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------------------------- surface


def test_methods_and_arguments_are_those_of_transformers():
    for name, theirs in inspect.getmembers(Theirs, inspect.isfunction):
        if name.startswith("_") or name == "switch_to_cb_friendly_attn":
            continue
        ours = inspect.signature(getattr(ContinuousBatchingManager, name)).parameters
        needed = [n for n, p in inspect.signature(theirs).parameters.items() if p.kind is not p.VAR_KEYWORD]
        assert [n for n in ours if n in needed] == needed, name


@pytest.mark.parametrize("name", ["init_continuous_batching", "continuous_batching_context_manager"])
def test_entry_points_take_the_arguments_of_transformers(model, name):
    theirs = list(inspect.signature(getattr(GenerationMixin, name)).parameters)
    ours = list(inspect.signature(getattr(type(model), name)).parameters)
    assert ours == theirs


def test_requests_are_answered_as_by_generate(manager, stock):
    ids = manager.add_requests(PROMPTS, max_new_tokens=7)
    assert ids == [f"req_{i}" for i in range(9)]
    results, partial = collect(manager, ids)
    assert tokens_of(results) == greedy(stock, PROMPTS, 7) and partial == []
    assert [result.prompt_ids for result in results] == PROMPTS
    for result in results:
        assert result.status is GenerationStatus.FINISHED and result.error is None and result.timestamps is None
        assert result.created_time <= result.lifespan[0] <= result.lifespan[1]


def test_started_before_the_first_request_and_stopped_twice(model, stock):
    """huggingface/transformers#48303: a manager that was started before the first request died."""
    manager = model.init_continuous_batching()
    assert manager.batch_processor is None and not manager.is_running()
    manager.stop()
    manager.start()
    manager.start()
    time.sleep(0.3)
    assert manager.is_running() and manager.background_thread_status.fatal_error is None
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=5)
    assert manager.batch_processor.scheduler is model.engine.live.scheduler
    assert manager.get_result(request_id, timeout=30).generated_tokens == greedy(stock, PROMPTS[:1], 5)[0]
    for _ in range(2):
        manager.stop()
        assert not manager.is_running()
    with pytest.raises(EngineClosedError, match=r"stopped.*call `start\(\)`"):
        manager.add_request(PROMPTS[0])
    manager.start()
    request_id = manager.add_request(PROMPTS[1], max_new_tokens=5)
    assert manager.get_result(request_id, timeout=30).generated_tokens == greedy(stock, PROMPTS[1:2], 5)[0]
    manager.destroy()
    with pytest.raises(EngineClosedError, match="destroyed"):
        manager.start()


def test_requests_wait_for_the_start(model, stock):
    manager = model.init_continuous_batching()
    ids = manager.add_requests(PROMPTS[:3], max_new_tokens=4)
    assert manager.get_result(timeout=0.01) is None
    manager.start()
    assert tokens_of(collect(manager, ids)[0]) == greedy(stock, PROMPTS[:3], 4)
    manager.stop()


def test_context_manager_stops_and_answers_everything(model, stock):
    with model.continuous_batching_context_manager(GenerationConfig(max_new_tokens=4)) as manager:
        assert manager.warmed_up and manager.is_running()
        ids = manager.add_requests(PROMPTS)
    assert not manager.is_running()
    assert tokens_of(collect(manager, ids)[0]) == greedy(stock, PROMPTS, 4)
    assert list(manager) == [] and manager.get_result() is None


def test_streams_one_token_after_the_other(manager, stock):
    ids = manager.add_requests(PROMPTS[:3], max_new_tokens=5, streaming=True, record_timestamps=True)
    expected = greedy(stock, PROMPTS[:3], 5)
    for request_id, answer in zip(ids, expected, strict=True):
        outputs = list(manager.request_id_iter(request_id))
        assert tokens_of(outputs) == [answer[: i + 1] for i in range(5)]
        assert [output.status.name for output in outputs] == ["DECODING"] * 4 + ["FINISHED"]
        assert [len(output.timestamps) for output in outputs] == [1, 2, 3, 4, 5]
    one = manager.add_request(PROMPTS[0], max_new_tokens=3, streaming=True)
    for i in range(3):  # a new iterator goes on where the last one was left
        assert len(next(manager.request_id_iter(one)).generated_tokens) == i + 1


def test_iterating_over_the_manager(model):
    with model.continuous_batching_context_manager(warmup=False) as manager:
        ids = set(manager.add_requests(PROMPTS, max_new_tokens=3))
        for output in manager:
            ids.remove(output.request_id)
            if not ids:
                break


def test_nothing_can_come_so_nothing_is_waited_for(manager):
    assert manager.get_result("nobody") is None and list(manager.request_id_iter("nobody")) == []
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=2)
    assert manager.get_result(request_id).is_finished() and manager.get_result(request_id) is None


def test_kept_for_the_next_session(model):
    with model.continuous_batching_context_manager(persistent_manager=True) as first:
        pass
    with model.continuous_batching_context_manager() as second:
        assert second is first
    with model.continuous_batching_context_manager(persistent_manager=True) as third:
        assert third is not first
    assert pickle.loads(pickle.dumps(model)).config.vocab_size == VOCAB_SIZE
    assert copy.deepcopy(model).config.vocab_size == VOCAB_SIZE
    model.destroy_cached_continuous_batching_manager()
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching() is not third
    with pytest.raises(EngineClosedError, match="destroyed"):
        third.start()


def test_stop_frees_the_pool_and_the_model():
    """huggingface/trl PR#5765: the pool that generation left behind took the room of the training step."""
    model = paged(overrides={"vocab_size": VOCAB_SIZE}, num_blocks=64)
    with model.continuous_batching_context_manager() as manager:
        request_id = manager.add_request(PROMPTS[0], max_new_tokens=3)
        assert manager.get_result(request_id, timeout=30).is_finished()
        runner = weakref.ref(model.engine._loop.runner)
        assert runner() is not None
    gc.collect()
    assert runner() is None and model.engine._loop.runner is None
    with model.continuous_batching_context_manager(persistent_manager=True):
        pass
    gone = weakref.ref(model)
    del model, manager
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------------------------------------------ per request


def test_each_request_has_a_configuration_of_its_own(manager, stock):
    tokenizer = tiny_tokenizer()
    configs = [
        GenerationConfig(max_new_tokens=6, num_beams=2, num_return_sequences=2),
        GenerationConfig(max_new_tokens=6, no_repeat_ngram_size=1),
        GenerationConfig(max_new_tokens=6, repetition_penalty=2.0),
        GenerationConfig(max_new_tokens=20, stop_strings=["on"]),
        GenerationConfig(max_new_tokens=3),
    ]
    expected = []
    for prompt, config in zip(PROMPTS, configs, strict=False):
        own = {"tokenizer": tokenizer} if config.stop_strings else {}
        rows = stock.generate(torch.tensor([prompt]), generation_config=config, pad_token_id=0, **own)
        expected.append(rows[:, len(prompt) :].tolist())
    ids = manager.add_requests(PROMPTS[:5], generation_config=configs, tokenizer=tokenizer)
    results, _ = collect(manager, [ids[0], f"{ids[0]}__child#0", *ids[1:]])
    assert tokens_of(results) == [row for rows in expected for row in rows]


def test_arguments_of_a_request_come_before_the_configuration(manager, stock):
    answer = greedy(stock, PROMPTS[:1], 9)[0]
    end = answer[4]
    config = GenerationConfig(max_new_tokens=3, eos_token_id=answer[0])
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=9, eos_token_id=end, generation_config=config)
    result = manager.get_result(request_id, timeout=30)
    assert result.generated_tokens == answer[: answer.index(end) + 1] and result.finish_reason == "stop"
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=9, eos_token_id=-1, generation_config=config)
    assert manager.get_result(request_id, timeout=30).generated_tokens == answer


def test_texts_chats_log_probabilities_and_hidden_states(manager):
    tokenizer = tiny_tokenizer()
    request_id = manager.add_request(
        "the hello", tokenizer=tokenizer, max_new_tokens=3, logprobs=1, prompt_logprobs=0, hidden_states=True
    )
    result = manager.get_result(request_id, timeout=30)
    assert result.prompt_ids == tokenizer("the hello").input_ids
    assert len(result.logprobs) == 3 and len(result.prompt_logprobs) == len(result.prompt_ids)
    assert result.hidden_states.shape[1] == len(result.prompt_ids) + 2
    request_id = manager.add_request([{"role": "user", "content": "hello"}], tokenizer=tokenizer, max_new_tokens=2)
    expected = tokenizer("<|user|>hello<|end|><|assistant|>").input_ids
    assert manager.get_result(request_id, timeout=30).prompt_ids == expected


def test_custom_processors_see_their_own_request_alone(manager):
    seen = []

    def remember(input_ids, scores):
        seen.append(input_ids.tolist())
        return scores

    other = manager.add_request(PROMPTS[2], max_new_tokens=3)
    request_id = manager.add_request(PROMPTS[1], max_new_tokens=3, logits_processor=[remember])
    results, _ = collect(manager, [other, request_id])
    texts = PROMPTS[1] + results[1].generated_tokens
    assert seen == [[texts[: len(PROMPTS[1]) + i]] for i in range(3)]


def test_processor_that_raises_fails_its_request_alone(manager, stock):
    def broken(input_ids, scores):
        raise ZeroDivisionError("oh")

    ids = [manager.add_request(PROMPTS[0], max_new_tokens=4, logits_processor=[broken])]
    ids += manager.add_requests(PROMPTS[1:3], max_new_tokens=4)
    ids.append(manager.add_request(PROMPTS[3], max_new_tokens=4, num_beams=2, logits_processor=[broken]))
    results, _ = collect(manager, ids)
    assert [result.status.name for result in results] == ["FAILED", "FINISHED", "FINISHED", "FAILED"]
    assert "oh" in results[0].error and "oh" in results[3].error
    assert tokens_of(results[1:3]) == greedy(stock, PROMPTS[1:3], 4)
    assert manager.background_thread_status.fatal_error is None


def test_seeds_fix_texts(model):
    texts = []
    for _ in range(2):
        config = ContinuousBatchingConfig(seed=9, return_logprobs=True)
        with model.continuous_batching_context_manager(GenerationConfig(do_sample=True), False, 30, config) as manager:
            ids = manager.add_requests([PROMPTS[0]] * 3, max_new_tokens=6)
            ids.append(manager.add_request(PROMPTS[0], max_new_tokens=6, seed=4))
            results, _ = collect(manager, ids)
        assert all(len(result.logprobs) == 6 for result in results)
        manager.join(timeout=30)
        texts.append(tokens_of(results))
    assert texts[0] == texts[1] and len(set(map(tuple, texts[0]))) == 4


def test_priorities():
    model = paged(overrides={"vocab_size": VOCAB_SIZE}, max_num_seqs=1, num_blocks=100, scheduling_policy="priority")
    manager = model.init_continuous_batching()
    ids = [manager.add_request(PROMPTS[0], max_new_tokens=3, priority=p) for p in (5, 3, 1, 4)]
    manager.start()
    order = [manager.get_result(timeout=30).request_id for _ in ids]
    assert order == [ids[2], ids[1], ids[3], ids[0]]
    manager.stop()


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"input_ids": []}, InvalidRequestError, "prompt is empty"),
        ({"input_ids": [VOCAB_SIZE]}, InvalidTokenError, str(VOCAB_SIZE)),
        ({"input_ids": "text"}, InvalidRequestError, "tokenizer"),
        ({"input_ids": [1], "max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"input_ids": [1], "tempratur": 0.5}, ValueError, "tempratur"),
        ({"input_ids": [1], "generation_config": {"top_k": 3}}, InvalidRequestError, "got dict"),
        ({"input_ids": [1], "priority": "high"}, InvalidRequestError, "`priority`"),
        ({"input_ids": [1], "do_sample": True, "temperature": -1.0}, ValueError, "temperature"),
    ],
    ids=str,
)
def test_wrong_request_is_refused_where_it_is_added(manager, kwargs, error, match):
    with pytest.raises(error, match=match):
        manager.add_request(**kwargs)
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=2)
    assert manager.get_result(request_id, timeout=30).error is None


def test_wrong_request_among_several(manager):
    with pytest.raises(InvalidTokenError):
        manager.add_requests([PROMPTS[0], [VOCAB_SIZE]], max_new_tokens=LONG)
    wait_for(lambda: not manager.engine.has_unfinished)


def test_ids_must_be_unique_while_they_live(manager):
    manager.add_request(PROMPTS[0], request_id="a", max_new_tokens=LONG)
    with pytest.raises(InvalidRequestError, match="'a' belongs to a request that is running"):
        manager.add_request(PROMPTS[0], request_id="a")
    manager.cancel_request("a")
    assert manager.get_result("a", timeout=30).is_finished()
    manager.add_request(PROMPTS[0], request_id="a", max_new_tokens=1)
    assert manager.get_result("a", timeout=30).error is None


# ------------------------------------------------------------------------------------------- cancelling, back-pressure


def test_cancel_while_running(manager):
    ids = manager.add_requests(PROMPTS, max_new_tokens=LONG, streaming=True)
    next(manager.request_id_iter(ids[0]))
    for request_id in ids[:8]:
        manager.cancel_request(request_id)
    for request_id in ids[:8]:
        *_, last = manager.request_id_iter(request_id)
        assert last.status is GenerationStatus.FAILED and "cancelled" in last.error and last.finish_reason == "abort"
        assert len(last.generated_tokens) < LONG
    manager.cancel_request(ids[8])
    assert list(manager.request_id_iter(ids[8]))[-1].is_finished()


def test_cancelling_what_is_unknown_or_over_does_nothing(manager):
    """tenstorrent/vllm#145: aborting a request that the backend no longer knew crashed it."""
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=2)
    assert manager.get_result(request_id, timeout=30).error is None
    for name in ("nope", request_id, request_id):
        manager.cancel_request(name)
    waiting = manager.add_request(PROMPTS[0], max_new_tokens=LONG)
    manager.cancel_request(waiting)
    manager.cancel_request(waiting)
    assert manager.get_result(waiting, timeout=30).finish_reason == "abort"
    assert manager.background_thread_status.fatal_error is None


def test_cancel_a_beam_search(manager):
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=LONG, num_beams=2)
    time.sleep(0.1)
    manager.cancel_request(request_id)
    result = manager.get_result(request_id, timeout=30)
    assert result.status is GenerationStatus.FAILED and "cancelled" in result.error


def test_beams_are_not_streamed_before_they_are_answers(manager):
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=5, num_beams=2, num_return_sequences=2, streaming=True)
    for name in (request_id, f"{request_id}__child#0"):
        (only,) = manager.request_id_iter(name)
        assert len(only.generated_tokens) == 5 and only.finish_reason == "length"


def test_hard_stop_cancels_and_plain_stop_answers(model, stock):
    manager = model.init_continuous_batching()
    manager.start()
    ids = manager.add_requests(PROMPTS, max_new_tokens=LONG)
    manager.stop(hard_stop=True)
    results, _ = collect(manager, ids)
    assert all(result.finish_reason == "abort" for result in results)
    manager.start()
    ids = manager.add_requests(PROMPTS, max_new_tokens=7)
    manager.stop(block=False)
    assert tokens_of(collect(manager, ids)[0]) == greedy(stock, PROMPTS, 7)
    manager.join()


def test_stop_gives_up_waiting_in_time(model):
    manager = model.init_continuous_batching()
    manager.start()
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=LONG)
    manager.stop(timeout=0.01)
    assert manager.is_running()
    manager.cancel_request(request_id)
    manager.stop()


def test_full_queue_makes_callers_wait_or_says_so(model):
    manager = model.init_continuous_batching(None, ContinuousBatchingConfig(max_queue_size=2))
    for _ in range(2):
        manager.add_request(PROMPTS[0], max_new_tokens=3)
    with pytest.raises(QueueFullError, match="`max_queue_size`"):
        manager.add_request(PROMPTS[0], max_new_tokens=3, queue_timeout=0.05)
    with pytest.raises(queue.Full):
        asyncio.run(_add_in_loop(manager))
    late = []
    caller = threading.Thread(target=lambda: late.append(manager.add_request(PROMPTS[1], max_new_tokens=3)))
    caller.start()
    manager.start()
    caller.join(30)
    assert len(collect(manager, ["req_0", "req_1", *late])[0]) == 3
    manager.stop()


async def _add_in_loop(manager):
    """Waiting would keep the loop, and with it the results that make room, from running."""
    started = time.monotonic()
    try:
        manager.add_request(PROMPTS[0], max_new_tokens=3)
    finally:
        assert time.monotonic() - started < 5


def test_many_requests_in_a_tiny_pool(stock):
    """huggingface/transformers PR#43150: a full K/V cache raised an error instead of waiting."""
    model = paged(overrides={"vocab_size": VOCAB_SIZE}, max_num_seqs=8, num_blocks=14, max_num_batched_tokens=64)
    prompts = random_prompts(200, VOCAB_SIZE, seed=8, longest=40)
    with model.continuous_batching_context_manager() as manager:
        ids = manager.add_requests(prompts, max_new_tokens=9)
        results, _ = collect(manager, ids)
    assert model.engine.stats().num_preemptions > 0
    checked = range(0, 200, 9)
    assert [results[i].generated_tokens for i in checked] == greedy(stock, [prompts[i] for i in checked], 9)
    assert all(result.error is None and len(result.generated_tokens) == 9 for result in results)
    assert_idle(model.engine)


# ------------------------------------------------------------------------------------------------ handlers and threads


def test_handlers_on_an_event_loop(manager, stock):
    expected = greedy(stock, PROMPTS[:4], 5)

    async def answer(number: int) -> list[list[int]]:
        seen, done = [], asyncio.Event()

        def on_output(output) -> None:
            seen.append(output.generated_tokens)
            if output.is_finished():
                done.set()

        request_id = manager.add_request(PROMPTS[number], max_new_tokens=5, streaming=True)
        if number % 2:
            await asyncio.sleep(0.2)  # results that came before the handler are not lost
        manager.register_result_handler(request_id, on_output)
        await asyncio.wait_for(done.wait(), 30)
        return seen

    async def main() -> list[list[list[int]]]:
        return await asyncio.gather(*(answer(number) for number in range(4)))

    for seen, tokens in zip(asyncio.run(main()), expected, strict=True):
        assert seen == [tokens[: i + 1] for i in range(5)]
    assert manager.get_result(timeout=0.01) is None


def test_handler_without_a_loop_and_one_that_raises(manager, caplog):
    seen = []
    manager.register_result_handler("good", lambda output: seen.append(output.request_id))
    manager.register_result_handler("bad", lambda output: 1 / 0)
    for name in ("good", "bad"):
        manager.add_request(PROMPTS[0], request_id=name, max_new_tokens=3)
    other = manager.add_request(PROMPTS[1], max_new_tokens=3)
    assert manager.get_result(other, timeout=30).error is None
    wait_for(lambda: seen == ["good"] and "'bad' failed" in caplog.text)
    assert manager.is_running()


def test_handler_whose_loop_is_gone(manager, caplog):
    async def leave() -> str:
        request_id = manager.add_request(PROMPTS[0], max_new_tokens=40, streaming=True)
        manager.register_result_handler(request_id, lambda output: None)
        return request_id

    asyncio.run(leave())
    wait_for(lambda: not manager.engine.has_unfinished)
    assert manager.is_running() and manager.background_thread_status.fatal_error is None


def test_manager_and_generate_share_the_engine(manager, model, stock):
    expected = greedy(stock, PROMPTS, 12)
    seen: dict[int, list[int]] = {}

    def call(number: int) -> None:
        prompt = PROMPTS[number]
        if number % 2:
            (result,) = model.generate_batch([prompt], max_new_tokens=12, progress_bar=False).values()
            seen[number] = result.generated_tokens
        else:
            seen[number] = model.generate(torch.tensor([prompt]), max_new_tokens=12)[0, len(prompt) :].tolist()

    ids = manager.add_requests(PROMPTS, max_new_tokens=12)
    threads = [threading.Thread(target=call, args=(i,)) for i in range(9)]
    for thread in threads:
        thread.start()
    results, _ = collect(manager, ids)
    for thread in threads:
        thread.join()
    assert tokens_of(results) == expected and [seen[i] for i in range(9)] == expected


def test_two_managers_at_once(model, manager, stock):
    with model.continuous_batching_context_manager(warmup=False) as other:
        ids = manager.add_requests(PROMPTS, max_new_tokens=5), other.add_requests(PROMPTS, max_new_tokens=5)
        assert ids[0] == ids[1]
        for one in (manager, other):
            assert tokens_of(collect(one, ids[0])[0]) == greedy(stock, PROMPTS, 5)


def test_pause_keeps_everything_and_lets_weights_change(manager, model):
    with pytest.raises(EngineError, match="not running"), model.init_continuous_batching().pause():
        pass
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=60, streaming=True)
    next(manager.request_id_iter(request_id))
    with manager.pause(), manager.pause():
        steps = model.engine.stats().num_steps
        time.sleep(0.1)
        assert model.engine.stats().num_steps == steps
        with pytest.raises(EngineError, match="pause"):
            model.generate(torch.tensor([[1, 2]]), max_new_tokens=1)
        with pytest.raises(EngineError, match="inside a pause"):
            manager.stop()
    assert list(manager.request_id_iter(request_id))[-1].error is None


@pytest.mark.parametrize("config", [None, ContinuousBatchingConfig(max_requests_per_batch=2)], ids=["own", "extra"])
def test_engine_that_is_closed_ends_the_manager(config):
    model = paged(overrides={"vocab_size": VOCAB_SIZE})
    manager = model.init_continuous_batching(None, config)
    manager.start()
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=LONG, streaming=True)
    next(manager.request_id_iter(request_id))
    model.to(torch.float64)
    assert list(manager.request_id_iter(request_id))[-1].status is GenerationStatus.FAILED
    wait_for(lambda: not manager.is_running())
    assert isinstance(manager.background_thread_status.fatal_error, EngineClosedError)
    with pytest.raises(EngineClosedError, match="died"):
        manager.add_request(PROMPTS[0])
    manager.start()
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=3)
    assert manager.get_result(request_id, timeout=30).error is None
    manager.stop()


def test_step_that_fails_is_not_fatal(manager, model, stock, monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("a device fell off")

    monkeypatch.setattr(type(model), "forward", broken)
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=3)
    assert "a device fell off" in manager.get_result(request_id, timeout=30).error
    monkeypatch.undo()
    request_id = manager.add_request(PROMPTS[0], max_new_tokens=3)
    assert manager.get_result(request_id, timeout=30).generated_tokens == greedy(stock, PROMPTS[:1], 3)[0]
    assert manager.background_thread_status.fatal_error is None


def test_settings_of_another_engine(model, stock):
    config = ContinuousBatchingConfig(num_blocks=1, max_requests_per_batch=2)
    with model.continuous_batching_context_manager(None, True, None, config) as manager:
        assert manager.engine is not model.engine and manager.engine.plan.max_num_seqs == 2
        ids = manager.add_requests(PROMPTS, max_new_tokens=5)
        assert tokens_of(collect(manager, ids)[0]) == greedy(stock, PROMPTS, 5)
    assert_idle(manager.engine)


@pytest.fixture
def slow_steps(shared):
    """However fast the machine is, LONG tokens take half a second."""
    handle = shared.register_forward_pre_hook(lambda *_: time.sleep(0.5 / LONG))
    yield
    handle.remove()


def test_the_clock_of_max_time_is_each_requests_own(manager, slow_steps):
    config = GenerationConfig(max_new_tokens=LONG, max_time=0.3, eos_token_id=None)
    first = manager.add_request(PROMPTS[0], generation_config=config)
    (result,) = collect(manager, [first])[0]
    assert 0 < len(result.generated_tokens) < LONG
    second = manager.add_request(PROMPTS[0], generation_config=config)  # after the first one's time
    (result,) = collect(manager, [second])[0]
    assert len(result.generated_tokens) > 1


# ------------------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(("last_line", "code"), [("", 0), ("1 / 0", 1)], ids=["end", "exception"])
def test_process_that_ends_while_the_thread_is_at_work(last_line, code):
    """A daemon thread that the interpreter kills inside torch takes the process along."""
    script = (
        "import time, logging, torch; torch.set_num_threads(1); logging.basicConfig(level=logging.INFO)\n"
        "from tests.paged_models import paged, spend_time_in_torch\n"
        "model = paged(num_blocks=300, block_size=8); spend_time_in_torch(model)\n"
        "unused = model.init_continuous_batching()\n"
        "manager = model.init_continuous_batching(); manager.start()\n"
        "ids = [manager.add_request([5, 6, 7 + i], max_new_tokens=450, streaming=True) for i in range(6)]\n"
        "assert manager.get_result(ids[0], timeout=60) is not None\n"
        f"{last_line}\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == code, run.stderr
    assert "Logging error" not in run.stderr and run.stderr.count("Traceback") == code


def test_stop_before_the_start_ends_what_was_added(model):
    manager = model.init_continuous_batching()
    ids = [manager.add_request(PROMPTS[0], max_new_tokens=LONG, **more) for more in ({}, {"num_beams": 2})]
    assert not manager.is_running() and manager.get_result(timeout=0.01) is None
    manager.stop()
    assert not model.engine.has_unfinished
    for request_id in ids:
        result = manager.get_result(request_id)
        assert result.status is GenerationStatus.FAILED and result.finish_reason == "abort"


@pytest.mark.parametrize("stop", [True, False], ids=["stopped", "dropped"])
def test_manager_that_was_never_started_lets_the_model_go(stop):
    model = paged(overrides={"vocab_size": VOCAB_SIZE})
    manager = model.init_continuous_batching()
    manager.add_request(PROMPTS[0], max_new_tokens=LONG)
    manager.add_request(PROMPTS[0], max_new_tokens=LONG, num_beams=2)
    if stop:
        manager.stop()
        assert_idle(model.engine)
    gone = weakref.ref(model)
    del manager
    gc.collect()
    model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2)  # its steps do what was left to do
    assert_idle(model.engine)
    del model
    gc.collect()
    assert gone() is None


def test_requests_for_transformers_loop_wait_for_the_start_too(model, stock):
    manager = model.init_continuous_batching()
    (request_id,) = manager.add_requests(PROMPTS[:1], max_new_tokens=4, num_beams=2)
    steps = model.engine.stats().num_steps
    time.sleep(0.2)
    assert manager.get_result(request_id, timeout=0) is None and model.engine.stats().num_steps == steps
    manager.start()
    expected = stock.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, num_beams=2)[0, len(PROMPTS[0]) :].tolist()
    assert manager.get_result(request_id, timeout=30).generated_tokens == expected
    manager.stop()


# --------------------------------------------------------------------------------------------------------- handlers


def test_handler_that_would_wait_for_itself_is_told(manager):
    told = []

    def handler(output):
        assert manager.get_result(other, timeout=0) is None
        for wait in (manager.get_result, lambda: manager.get_result(other, 60), lambda: next(iter(manager))):
            with pytest.raises(EngineError, match="handler cannot wait"):
                wait()
        assert manager.get_result("unknown") is None
        told.append(output.status)

    manager.register_result_handler("mine", handler)
    with manager.pause():
        other = manager.add_request(PROMPTS[1], max_new_tokens=60)
        manager.add_request(PROMPTS[0], request_id="mine", max_new_tokens=2)
    assert manager.get_result(other, timeout=30).error is None
    assert told == [GenerationStatus.FINISHED]


def test_handler_does_not_wait_for_room(model):
    config = ContinuousBatchingConfig(max_queue_size=1, max_requests_per_batch=1)
    seen, running, full = [], threading.Event(), threading.Event()

    def handler(output):
        if seen:
            return
        running.set()
        assert full.wait(30)
        with pytest.raises(QueueFullError):
            manager.add_request(PROMPTS[1], max_new_tokens=2, queue_timeout=3600)
        seen.append(output)

    with model.continuous_batching_context_manager(continuous_batching_config=config, timeout=30) as manager:
        manager.register_result_handler("first", handler)
        manager.add_request(PROMPTS[0], request_id="first", max_new_tokens=5, streaming=True)
        assert running.wait(30)
        second = manager.add_request(PROMPTS[1], max_new_tokens=2)
        full.set()
        assert manager.get_result(second, timeout=30).error is None
    assert len(seen) == 1


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()], ids=repr)
def test_handler_that_exits_ends_no_thread(manager, caplog, error):
    def handler(output):
        raise error

    other = manager.add_request(PROMPTS[1], max_new_tokens=30)
    manager.register_result_handler("bad", handler)
    manager.add_request(PROMPTS[0], request_id="bad", max_new_tokens=3)
    assert manager.get_result(other, timeout=30).error is None
    wait_for(lambda: "'bad' failed" in caplog.text)
    assert manager.is_running()
    assert manager.get_result(manager.add_request(PROMPTS[1], max_new_tokens=2), timeout=30).error is None


def test_processor_that_exits_fails_its_request(manager):
    def processor(input_ids, scores):
        raise SystemExit(7)

    request_id = manager.add_request(PROMPTS[0], max_new_tokens=3, num_beams=2, logits_processor=[processor])
    assert "SystemExit: 7" in manager.get_result(request_id, timeout=30).error


# ------------------------------------------------------------------------------------------------------- cancelling


def test_any_answers_id_cancels_the_request(manager):
    request_id = manager.add_request(
        PROMPTS[0], max_new_tokens=LONG, do_sample=True, num_return_sequences=2, eos_token_id=-1
    )
    child = f"{request_id}__child#0"
    for unknown in (5, None, "__child#0"):
        manager.cancel_request(unknown)
    manager.cancel_request(child)
    for answer in (request_id, child):
        assert manager.get_result(answer, timeout=30).finish_reason == "abort"


@pytest.mark.parametrize("end", ["cancel", "stop"])
def test_request_that_waits_for_room_can_be_cancelled(model, end):
    manager = model.init_continuous_batching(None, ContinuousBatchingConfig(max_queue_size=1))
    manager.add_request(PROMPTS[0], max_new_tokens=2)
    raised = []

    def add():
        try:
            manager.add_request(PROMPTS[0], request_id="late", max_new_tokens=2, queue_timeout=3600)
        except RequestAbortedError as error:
            raised.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    wait_for(lambda: manager._requests.expects("late"))
    if end == "cancel":
        manager.cancel_request("late")
    else:
        manager.stop()
    thread.join(30)
    assert not thread.is_alive() and "waited for room" in str(raised[0])
    manager.stop()


def test_no_warmup_where_the_engine_runs_nothing():
    model = paged(overrides={"vocab_size": VOCAB_SIZE})
    model.set_attn_implementation("eager")
    with model.continuous_batching_context_manager() as manager:
        request_id = manager.add_request(PROMPTS[0], max_new_tokens=3)
        assert manager.get_result(request_id, timeout=30).error is None
