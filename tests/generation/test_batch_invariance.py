"""`batch_invariant`: a request's logits are the same bits whatever runs beside it, and however it was cut up."""

from __future__ import annotations

import pytest

from hf_paged import AutoPagedModelForCausalLM, PagedConfig, SamplingParams
from tests.conftest import random_prompts
from tests.families import greedy, tiny_model

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)


def answer(output):
    """Tokens and the exact log-probabilities of an answer."""
    completion = output.outputs[0]
    return completion.token_ids, [{t: e.logprob for t, e in entry.items()} for entry in completion.logprobs]


@pytest.fixture(params=["llama", "gemma2", "gpt2", "mixtral", "olmoe", "gpt_oss"])
def model(request):
    return tiny_model(request.param)


def page(model, **settings):
    return AutoPagedModelForCausalLM.from_model(
        model, paged_config=PagedConfig(batch_invariant=True, **settings)
    ).engine


def test_alone_and_in_batches_gives_the_same_bits(model):
    # vllm-project/vllm#5898
    prompts = random_prompts(12, 199, seed=7, longest=50)
    expected = greedy(model, prompts, 8)
    engine = page(model, enable_prefix_caching=False)
    alone = [answer(engine.generate([prompt], PARAMS)[0]) for prompt in prompts]
    assert [tokens for tokens, _ in alone] == expected
    for size in (2, 5, 12):
        together = [answer(output) for output in engine.generate(prompts[:size], PARAMS)]
        assert together == alone[:size]


def test_chunks_prefix_hits_and_preemption_do_not_change_a_bit(model):
    # vllm-project/vllm#40896
    prompts = random_prompts(10, 199, seed=8, longest=50)
    params = PARAMS.replace(max_tokens=24)
    roomy = page(model)
    cold = [answer(output) for output in roomy.generate(prompts, params)]
    warm = roomy.generate(prompts, params)
    assert sum(output.num_cached_tokens for output in warm) > 0
    assert [answer(output) for output in warm] == cold
    tight = page(model, num_blocks=8, max_num_batched_tokens=20)
    assert [answer(output) for output in tight.generate(prompts, params)] == cold
    assert tight.stats().num_preemptions > 0


def test_prompt_log_probabilities_come_through_tiles():
    model = tiny_model("llama")
    prompt = random_prompts(1, 199, seed=9)[0] + list(range(1, 40))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    tiles = page(model).generate([prompt], params)[0].prompt_logprobs
    flat = AutoPagedModelForCausalLM.from_model(model).engine.generate([prompt], params)[0].prompt_logprobs
    assert len(tiles) == len(prompt) and tiles[0] is None
    for tile, row, token in zip(tiles[1:], flat[1:], prompt[1:], strict=True):
        assert tile[token].logprob == pytest.approx(row[token].logprob, abs=1e-4)
