"""Beam search and beam sampling: Transformers' own loop over rows in the engine, whose blocks beams share."""

from __future__ import annotations

import contextlib
import logging
import re
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_paged import SamplingParams
from tests.families import tiny_model
from tests.generation.loop_outputs import PROMPT, ROWS, TWO, both, check_same, in_the_loop, padded
from tests.paged_models import assert_idle, broken_forward, paged

ENDS = list(range(20, 60))  # so many end tokens that beams do end
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def shared():
    return paged(max_num_seqs=12, num_blocks=200, block_size=8)


@pytest.fixture
def model(shared):
    yield shared
    assert_idle(shared.engine)


CALLS = {
    "plain": {},
    "several answers": {"num_return_sequences": 3},
    "long ones": {"length_penalty": 2.0, "eos_token_id": ENDS, "num_return_sequences": 3},
    "short ones": {"length_penalty": -1.0, "eos_token_id": ENDS, "num_return_sequences": 2},
    "stops early": {"early_stopping": True, "eos_token_id": ENDS, "num_return_sequences": 3},
    "never stops early": {"early_stopping": "never", "eos_token_id": ENDS, "length_penalty": 1.5},
    "one end token": {"eos_token_id": 33, "pad_token_id": 42, "num_return_sequences": 3},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 40, "num_return_sequences": 2},
    "renormalized": {"do_sample": True, "top_p": 0.9, "renormalize_logits": True},
    "processors": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.7, "min_new_tokens": 4, "eos_token_id": ENDS},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": 11},
    "outputs": {**OUTPUTS, "num_return_sequences": 2, "eos_token_id": ENDS},
    "sampled outputs": {**OUTPUTS, "do_sample": True, "num_return_sequences": 3},
    "dictionary": {"return_dict_in_generate": True},
    "one new token": {"max_new_tokens": 1},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("batch", ["one", "padded"])
def test_beams_equal_stock(model, stock, name, batch):
    inputs = {"one": {"inputs": PROMPT}, "padded": padded()}[batch]
    check_same(stock, model, num_beams=3, **inputs, **CALLS[name])


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gpt2", "opt", "deepseek_v3", "olmoe"])
def test_beams_of_other_families_equal_stock(family):
    model = paged(family, block_size=4)
    check_same(tiny_model(family), model, num_beams=3, max_new_tokens=12, num_return_sequences=3, **OUTPUTS, **padded())
    assert_idle(model.engine)


@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 1, "num_blocks": 600},
        {"block_size": 64},
        {"enable_prefix_caching": False},
        {"batch_invariant": True},
        {"max_num_batched_tokens": 13},
        {"enable_chunked_prefill": False},
        {"attn_backend": "reference"},
    ],
    ids=str,
)
def test_settings_of_the_engine_do_not_show(stock, config):
    model = paged(**config)
    check_same(stock, model, num_beams=4, num_return_sequences=2, max_new_tokens=12, **padded())
    assert_idle(model.engine)


def test_real_model(real_model, real_model_path, real_tokenizer):
    stock = AutoModelForCausalLM.from_pretrained(real_model_path, dtype=torch.float32)
    real_tokenizer.padding_side = "left"
    inputs = real_tokenizer(["The capital of France is", "Once"], return_tensors="pt", padding=True)
    call = {"num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 3, "max_new_tokens": 12}
    check_same(stock, real_model, return_dict_in_generate=True, output_scores=True, **inputs, **call)


# --------------------------------------------------------------------------------------- blocks


def test_beams_share_their_blocks():
    """Beams of one prompt hold it once, and what they add after it hardly more than once each."""
    model = paged(block_size=4, num_blocks=200, enable_prefix_caching=False)
    prompt = torch.arange(1, 62)[None]
    model.generate(prompt, num_beams=6, max_new_tokens=12)
    stats = model.engine.stats()
    each = -(-(61 + 12) // 4)
    assert stats.peak_blocks_held <= each + 6 * (12 // 4 + 1) < 6 * each / 2
    assert stats.num_computed_tokens <= 61 + 6 * 11  # the prompt once
    assert_idle(model.engine)


def test_equal_prompts_of_a_batch_are_computed_once(model, stock):
    before = model.engine.stats().num_computed_tokens
    inputs = torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 1]] * 3)
    check_same(stock, model, inputs=inputs, num_beams=2, max_new_tokens=3)
    assert model.engine.stats().num_computed_tokens - before <= 9 + 6 * 2


def blocks_that_just_suffice(rows: list[list[int]], num_beams: int, max_new_tokens: int, block_size: int) -> int:
    """The least `num_blocks` with which `generate` lets these beams into the engine."""
    total = 0
    for row in rows:
        whole = -(-(len(row) + max_new_tokens) // block_size) + 1
        total += whole + (num_beams - 1) * (whole - len(row) // block_size)
    return total


class Rival:
    """A long answer beside the beams, by steps of the same thread, so that who has which block when is no accident.

    Args:
        model (`PreTrainedModel`):
            The paged model.
        prompt (`list[int]`):
            A prompt.
        num_tokens (`int`):
            The answer's length.
    """

    def __init__(self, model, prompt: list[int], num_tokens: int):
        self.engine, self.prompt = model.engine, prompt
        self.params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self.state = None

    def come(self):
        self.state = self.engine.add_request(self.prompt, self.params)

    def answer(self) -> list[int]:
        self.engine.wait(self.state)
        return self.state.output().outputs[0].token_ids


@pytest.mark.parametrize("first", ["rival", "beams"])
@pytest.mark.parametrize(("block_size", "caching"), [(1, True), (4, True), (4, False)])
def test_rows_that_lose_their_blocks_equal_stock(stock, caching, block_size, first):
    """The pool just holds the beams; another request holds most of it, or comes in between; either is computed anew."""
    rows, new = [ROWS[0], ROWS[1]], 14
    if caching:
        num_blocks = blocks_that_just_suffice(rows, 3, new, block_size)
    else:
        num_blocks = sum(3 * (-(-(len(row) + new) // block_size) + 1) for row in rows)
    model = paged(block_size=block_size, num_blocks=num_blocks, max_num_seqs=7, enable_prefix_caching=caching)
    length = num_blocks * block_size - 1  # in the end the rival needs the whole pool
    prompt = [i * 7 % 198 + 1 for i in range(length * 3 // 4)]
    rival = Rival(model, prompt, length - len(prompt))
    expected = stock.generate(**padded(rows), num_beams=3, max_new_tokens=new, **OUTPUTS)

    def meanwhile(compute, kwargs):
        rival.come()
        return compute()

    if first == "rival":
        rival.come()
        model.engine.step()
    with contextlib.nullcontext() if first == "rival" else broken_forward(model, meanwhile):
        ours = model.generate(**padded(rows), num_beams=3, max_new_tokens=new, **OUTPUTS)
    assert torch.equal(ours.sequences, expected.sequences)
    torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4)
    [answer] = stock.generate(torch.tensor([prompt]), max_new_tokens=length - len(prompt))
    assert rival.answer() == answer[len(prompt) :].tolist()
    assert model.engine.stats().num_preemptions > 0
    assert model.engine.stats().peak_running > 1
    assert_idle(model.engine)


# --------------------------------------------------------------------------------------- together with others


def in_threads(*calls) -> list:
    """The results of calls that run at the same time."""
    results: list = [None] * len(calls)

    def run(place, call):
        try:
            results[place] = call()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_beams_and_ordinary_requests_meet_in_steps(stock):
    model = paged(max_num_seqs=32, num_blocks=300, block_size=8)
    calls = [
        {"inputs": PROMPT, "num_beams": 4, "max_new_tokens": 24},
        {"inputs": TWO, "num_beams": 3, "max_new_tokens": 24, "length_penalty": 0.0},
        {**padded(), "max_new_tokens": 24},
        {"inputs": PROMPT + 20, "max_new_tokens": 24, **in_the_loop()},
        {**padded(), "num_beams": 2, "max_new_tokens": 24},
    ]
    expected = [stock.generate(**call) for call in calls]
    alone = []
    for call in calls:
        before = model.engine.stats().num_steps
        model.generate(**call)
        alone.append(model.engine.stats().num_steps - before)
    model.engine.reset_stats()
    results = in_threads(*(lambda call=call: model.generate(**call) for call in calls))
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)
    stats = model.engine.stats()
    assert stats.peak_running > 10, "calls did not meet in a step"
    assert stats.num_steps < sum(alone)
    assert_idle(model.engine)


def test_more_beams_than_seats_take_turns(stock):
    """Three calls of which any two need more seats than there are."""
    model = paged(max_num_seqs=4, num_blocks=100, block_size=8)
    calls = [{"inputs": PROMPT + 9 * i, "num_beams": 3, "max_new_tokens": 10} for i in range(3)]
    expected = [stock.generate(**call) for call in calls]
    results = in_threads(*(lambda call=call: model.generate(**call) for call in calls))
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert_idle(model.engine)


# --------------------------------------------------------------------------------------- rows that do not fit


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"max_num_seqs": 5}, r"6 rows exceed `max_num_seqs` 5"),
        ({"block_size": 4, "num_blocks": 20}, r"the rows may need \d+ blocks, and the pool has 20"),
        ({"max_model_len": 17}, r"a row may get 18 tokens, and `max_model_len` is 17"),
        ({"max_num_batched_tokens": 8, "enable_chunked_prefill": False}, "a prompt exceeds `max_num_batched_tokens` 8"),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_go_elsewhere(stock, caplog, config, reason):
    model = paged(**config)
    caplog.set_level(logging.INFO, logger="hf_paged")
    ours, theirs = both(stock, model, inputs=TWO, num_beams=3, num_return_sequences=2)
    assert torch.equal(ours, theirs)
    assert model.engine.stats().num_steps == 0
    messages = [record.getMessage() for record in caplog.records if "PagedCache" in record.getMessage()]
    assert len(messages) == 1
    assert re.search(reason, messages[0])


def test_the_smallest_pool_that_is_accepted(stock):
    need = blocks_that_just_suffice(TWO.tolist(), 3, 8, 4)
    for num_blocks in (need - 1, need):
        model = paged(block_size=4, num_blocks=num_blocks)
        ours, theirs = both(stock, model, inputs=TWO, num_beams=3)
        assert torch.equal(ours, theirs)
        assert (model.engine.stats().num_steps > 0) == (num_blocks == need)
        assert_idle(model.engine)
