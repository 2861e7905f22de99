"""Calls from several threads: they share steps, they do not share anything else."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import transformers

from hf_paged import EngineClosedError, SamplingParams, StepFailedError
from tests.conftest import random_prompts
from tests.families import greedy, tiny_model
from tests.paged_models import assert_idle, broken_forward, paged

PROMPTS = random_prompts(8, 199, seed=1)
PARAMS = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama")


@pytest.fixture
def model():
    model = paged(block_size=8, num_blocks=100, max_num_seqs=8, max_num_batched_tokens=40)
    yield model
    assert_idle(model.engine)


def run_in_threads(*calls) -> list:
    results: list = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:  # handed to the test
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call hangs"
    return results


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def all_together(model, count: int):
    """The first step waits until so many requests are there."""

    def wait(forward, kwargs):
        deadline = time.monotonic() + 30
        while len(model.engine.live.states) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        return forward()

    return broken_forward(model, wait)


def test_calls_from_several_threads_overlap_and_equal_single_ones(model, stock):
    engine = model.engine
    calls = [lambda i=i: tokens(engine.generate([PROMPTS[i]], PARAMS))[0] for i in range(2)]
    calls.append(lambda: model.generate(torch.tensor([PROMPTS[2]]), max_new_tokens=24)[0, len(PROMPTS[2]) :].tolist())
    calls.append(
        lambda: model.generate_batch([PROMPTS[3]], max_new_tokens=24, progress_bar=False)["req_0"].generated_tokens
    )
    with all_together(model, 4):
        assert run_in_threads(*calls) == greedy(stock, PROMPTS[:4], 24)
    assert engine.stats().peak_running == 4


def test_calls_of_every_kind_run_side_by_side(model, stock):
    """Sampling by a seed of its own, beams, processors of the caller's, and a stream, each as if it were alone."""

    class BanEven(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, ::2] = -torch.inf
            return scores

    ids = [torch.tensor([prompt]) for prompt in PROMPTS[:4]]
    settings = [
        {"max_new_tokens": 12, "repetition_penalty": 1.3},
        {"max_new_tokens": 12, "num_beams": 3},
        {"max_new_tokens": 12, "logits_processor": transformers.LogitsProcessorList([BanEven()])},
        {"max_new_tokens": 12, "num_beams": 2, "no_repeat_ngram_size": 2},
    ]
    sampled = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
    alone = tokens(model.engine.generate([PROMPTS[4]], sampled))
    expected = [stock.generate(row, **kwargs).tolist() for row, kwargs in zip(ids, settings, strict=True)]
    calls = [
        lambda row=row, kwargs=kwargs: model.generate(row, **kwargs).tolist()
        for row, kwargs in zip(ids, settings, strict=True)
    ]
    for _ in range(2):
        results = run_in_threads(*calls, lambda: tokens(model.engine.generate([PROMPTS[4]], sampled)))
        assert results == [*expected, alone]


def test_thread_whose_request_fails_its_steps_does_not_stop_the_others(model):
    engine = model.engine
    expected = [tokens(engine.generate([PROMPTS[i]], PARAMS)) for i in range(4)]

    def poisoned(forward, kwargs):
        if (kwargs["input_ids"] == 198).any():
            raise RuntimeError("poison")
        return forward()

    prompts = [PROMPTS[0], [*PROMPTS[1], 198], PROMPTS[2], PROMPTS[3]]
    with broken_forward(model, poisoned, times=10**6):
        results = run_in_threads(*[lambda i=i: tokens(engine.generate([prompts[i]], PARAMS)) for i in range(4)])
    assert isinstance(results[1], StepFailedError)
    assert [results[0], *results[2:]] == [expected[0], *expected[2:]]


def test_closing_while_another_thread_runs_ends_its_call():
    """run-llama/llama_index#12492: an engine must let go of its memory within the process."""
    model = paged(block_size=8, num_blocks=100)
    engine = model.engine
    started = threading.Event()
    long = PARAMS.replace(max_tokens=300, ignore_eos=True)

    def notify(forward, kwargs):
        started.set()
        time.sleep(0.02)
        return forward()

    def close():
        assert started.wait(30)
        engine.close()

    with broken_forward(model, notify, at=3, times=400):
        results = run_in_threads(
            lambda: engine.generate(PROMPTS[:2], long), lambda: engine.generate(PROMPTS[2:4], long), close
        )
    assert [type(result) for result in results] == [EngineClosedError, EngineClosedError, type(None)]
    assert_idle(engine)
    assert engine._loop.runner is None
