"""The real model in float32: whatever the engine is put through, the tokens are those of Transformers' generate."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_paged import AutoPagedModelForCausalLM, PagedConfig, SamplingParams
from hf_paged.tools.prompts import user_prompts

COUNT = 64
NEW_TOKENS = 16
LONGEST = 96
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def stock(real_model_path):
    return AutoModelForCausalLM.from_pretrained(real_model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(real_tokenizer) -> list[list[int]]:
    """64 pieces of real text; their lengths go around multiples of the block sizes."""
    texts = [real_tokenizer(text)["input_ids"] for text in user_prompts()]
    source = random.Random(0)
    pieces = []
    for i in range(COUNT):
        tokens = texts[i % len(texts)][i // len(texts) :]
        pieces.append(tokens[: source.choice([7, 15, 16, 17, 31, 32, 33, 48, 64, LONGEST])])
    return pieces


@pytest.fixture(scope="module")
def expected(stock, prompts) -> list[list[int]]:
    """Stock answers from static batches of prompts of similar length, padded on the left."""
    order = sorted(range(COUNT), key=lambda i: len(prompts[i]))
    answers: dict[int, list[int]] = {}
    for start in range(0, COUNT, 16):
        rows = order[start : start + 16]
        width = max(len(prompts[i]) for i in rows)
        ids = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in rows])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in rows])
        new = stock.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )[:, width:]
        # `min_new_tokens` forbids the end tokens, and so do the requests below.
        answers.update(zip(rows, new.tolist(), strict=True))
    return [answers[i] for i in range(COUNT)]


@pytest.fixture(scope="module")
def params(stock) -> SamplingParams:
    ends = stock.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends)
    return PARAMS.replace(ignore_eos=False, min_tokens=NEW_TOKENS, stop_token_ids=ends)


def page(stock, **settings):
    return AutoPagedModelForCausalLM.from_model(stock, paged_config=PagedConfig(**settings)).engine


def answers(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_block_sizes(stock, prompts, expected, params, block_size):
    assert answers(page(stock, block_size=block_size).generate(prompts, params)) == expected


@pytest.mark.parametrize("budget", [16, 64, 2048])
def test_token_budgets(stock, prompts, expected, params, budget):
    assert answers(page(stock, max_num_batched_tokens=budget).generate(prompts, params)) == expected


def test_pool_so_small_that_requests_are_preempted(stock, prompts, expected, params):
    engine = page(stock, num_blocks=100, block_size=4, max_num_batched_tokens=256)
    again = random.Random(1).sample(range(COUNT), COUNT // 2)
    outputs = engine.generate(prompts + [prompts[i] for i in again], params)
    assert answers(outputs) == expected + [expected[i] for i in again]
    assert engine.stats().num_preemptions >= 20
    assert engine.stats().peak_blocks_held <= 100


def test_prefix_hits(stock, prompts, expected, params):
    engine = page(stock)
    assert answers(engine.generate(prompts, params)) == expected
    warm = engine.generate(prompts, params)
    assert answers(warm) == expected
    # All full blocks but the one with the last token are found again.
    assert sum(output.num_cached_tokens for output in warm) == sum((len(p) - 1) // 16 * 16 for p in prompts)


def test_arrival_in_random_order_while_others_run(stock, prompts, expected, params):
    engine = page(stock, max_num_seqs=12, max_num_batched_tokens=64)
    source = random.Random(5)
    order = source.sample(range(COUNT), COUNT)
    with engine.requests() as states:
        while len(states) < COUNT:
            for i in order[len(states) : len(states) + source.randint(0, 4)]:
                states.append(engine.add_request(prompts[i], params))
            engine.step()
        for _ in engine.as_finished(states):
            pass
    found = {i: state.output().outputs[0].token_ids for i, state in zip(order, states, strict=True)}
    assert [found[i] for i in range(COUNT)] == expected


def test_several_answers_share_their_prompt(stock, prompts, expected, params):
    engine = page(stock)
    outputs = engine.generate(prompts[:24], params.replace(n=4))
    assert [[answer.token_ids for answer in output.outputs] for output in outputs] == [[e] * 4 for e in expected[:24]]
    assert engine.stats().num_prompt_tokens == sum(map(len, prompts[:24]))
