"""Every family on the engine gives the tokens that Transformers' own generate gives, in float32."""

from __future__ import annotations

import pytest
import torch

from hf_paged import AutoPagedModelForCausalLM, PagedConfig, SamplingParams
from tests.conftest import random_prompts
from tests.families import OTHER_FAMILIES, greedy, tiny_model

NEW_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
ROOMY = PagedConfig()
TINY = PagedConfig(num_blocks=14, max_num_batched_tokens=24)


def test_family_equals_stock_in_a_roomy_and_in_a_tiny_pool(family):
    model = tiny_model(family)
    prompts = random_prompts(10, 199, longest=40)
    expected = greedy(model, prompts, NEW_TOKENS)
    assert len({tuple(answer) for answer in expected}) > 5, "the tiny model says the same whatever it is asked"
    for config in (ROOMY, TINY):
        paged = AutoPagedModelForCausalLM.from_model(model, paged_config=config)
        outputs = paged.engine.generate(prompts, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert paged.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("backend", ["reference", "torch_sdpa"])
def test_every_backend_equals_stock(family, backend):
    model = tiny_model(family)
    prompts = random_prompts(6, 199, seed=3, longest=40)
    expected = greedy(model, prompts, NEW_TOKENS)
    paged = AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(attn_backend=backend))
    assert [output.outputs[0].token_ids for output in paged.engine.generate(prompts, PARAMS)] == expected


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("budget", [16, 64, 2048])
def test_block_size_and_budget_do_not_show(tiny_llama, block_size, budget):
    prompts = random_prompts(12, 199, seed=1)
    expected = greedy(tiny_llama, prompts, NEW_TOKENS)
    config = PagedConfig(block_size=block_size, max_num_batched_tokens=budget)
    paged = AutoPagedModelForCausalLM.from_model(tiny_llama, paged_config=config)
    assert [output.outputs[0].token_ids for output in paged.engine.generate(prompts, PARAMS)] == expected


@pytest.mark.parametrize("family", sorted(OTHER_FAMILIES))
def test_family_that_takes_the_other_way_equals_stock_and_says_so(family, caplog):
    model = tiny_model(family)
    prompts = random_prompts(3, 199, seed=2, longest=20)
    expected = greedy(model, prompts, NEW_TOKENS)
    with caplog.at_level("WARNING", logger="hf_paged"):
        paged = AutoPagedModelForCausalLM.from_model(model)
    assert len([record for record in caplog.records if "own loop" in record.message]) == 1
    assert greedy(paged, prompts, NEW_TOKENS) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_near_those_of_a_float32_run(tiny_llama, dtype):
    prompt = random_prompts(1, 199, seed=4)[0] * 3
    exact = tiny_llama(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).detach()
    paged = AutoPagedModelForCausalLM.from_model(tiny_model("llama", dtype=dtype))
    output = paged.engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1, logprobs=20))[0]
    stock = tiny_model("llama", dtype=dtype)(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1).detach()
    allowed = 2 * float((stock - exact).abs().max()) + 1e-3  # rounding of another order, not of another size
    for token, entry in output.outputs[0].logprobs[0].items():
        assert abs(entry.logprob - float(exact[token])) <= allowed


def test_prompts_with_the_same_beginning_that_start_together_compute_it_once(tiny_llama):
    beginning = random_prompts(1, 199, seed=5)[0][:1] + list(range(1, 128))
    prompts = [beginning + own for own in random_prompts(6, 199, seed=6, longest=20)]
    expected = greedy(tiny_llama, prompts, 4)
    paged = AutoPagedModelForCausalLM.from_model(tiny_llama, paged_config=PagedConfig(max_num_batched_tokens=64))
    outputs = paged.engine.generate(prompts, PARAMS.replace(max_tokens=4))
    assert [output.outputs[0].token_ids for output in outputs] == expected
    own = sum(len(prompt) - 128 for prompt in prompts) + 3 * len(prompts)
    assert paged.engine.stats().num_computed_tokens <= 128 + own + 16 * len(prompts)  # at most a block each besides
