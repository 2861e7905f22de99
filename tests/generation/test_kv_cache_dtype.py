"""Quantized K/V: answers are those over keys and values that went through codes, however they were computed."""

from __future__ import annotations

import math
import pydoc_data.topics

import pytest
import torch
from transformers import DynamicCache

from hf_paged import LLM, AutoPagedModelForCausalLM, ConfigurationError, PagedConfig, SamplingParams, compat
from hf_paged.kernels.quantized_blocks import DTYPES, numbers, quantized
from tests.conftest import random_prompts
from tests.families import tiny_model
from tests.paged_models import assert_idle, paged, paged_engine
from tests.tokenizers_for_tests import VOCAB_SIZE, tiny_tokenizer

VOCAB = 199
PROMPTS = random_prompts(6, VOCAB, seed=7)
NEW = 12
NAMES = sorted(DTYPES)
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
# How far below the best a chosen token may be: a code that rounds to its neighbour moves logits a little.
MARGIN = 0.05


class RoundedCache(DynamicCache):
    """Transformers' cache, whose keys and values have been codes."""

    def __init__(self, name: str):
        super().__init__()
        self.codes = DTYPES[name]

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = (numbers(*quantized(x, self.codes), x.dtype) for x in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


def over(model, cache: RoundedCache) -> dict[str, RoundedCache]:
    return {compat.cache_argument(model): cache}


def tokens(outputs) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def shortfall(stock, prompts, answers, name: str) -> float:
    """How far the chosen tokens are below the best ones of the model over rounded keys and values, at most."""
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = stock(torch.tensor([prompt + answer]), **over(stock, RoundedCache(name))).logits[0].float()
        rows = logits[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(answer)[:, None])[:, 0]
        worst = max(worst, float((rows.amax(1) - chosen).max()))
    return worst


@pytest.mark.parametrize("backend", [None, "torch_sdpa", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_over_rounded_keys_and_values(name, backend):
    engine = paged_engine(kv_cache_dtype=name, attn_backend=backend)
    assert engine.plan.dtype == str(DTYPES[name]).removeprefix("torch.")
    answers = tokens(engine.generate(PROMPTS, PARAMS))
    assert shortfall(tiny_model("llama"), PROMPTS, answers, name) < MARGIN
    assert_idle(engine)


# A window, caps, sinks, no rotation, normed heads.
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gpt2", "qwen3"])
def test_families(family):
    for name in ("int8", "fp8_e4m3"):
        answers = tokens(paged_engine(family, kv_cache_dtype=name).generate(PROMPTS, PARAMS))
        assert shortfall(tiny_model(family), PROMPTS, answers, name) < MARGIN


def test_without_native_operators(monkeypatch):
    from hf_paged.generation import native_layers

    monkeypatch.setattr(native_layers, "native_operators", lambda: None)
    for name in NAMES:
        engine = paged_engine(kv_cache_dtype=name, attn_backend="torch_sdpa")
        assert engine.plan.native == "off"
        answers = tokens(engine.generate(PROMPTS, PARAMS))
        assert shortfall(tiny_model("llama"), PROMPTS, answers, name) < MARGIN


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_chunks_prefix_hits_preemption_and_copies_change_nothing(name):
    settings = {"kv_cache_dtype": name, "block_size": 4}
    whole = paged_engine(**settings)
    expected = tokens(whole.generate(PROMPTS, PARAMS))
    assert tokens(whole.generate(PROMPTS, PARAMS)) == expected
    assert whole.stats().num_cached_tokens > 0
    chunked = paged_engine(**settings, max_num_batched_tokens=7)
    assert tokens(chunked.generate(PROMPTS, PARAMS)) == expected
    tight = paged_engine(**settings, num_blocks=22, max_model_len=80)
    assert tokens(tight.generate(PROMPTS * 2, PARAMS)) == expected * 2
    assert tight.stats().num_preemptions > 0
    branches = tokens(whole.generate(PROMPTS[:3], PARAMS.replace(n=3)))
    assert branches == [answer for answer in expected[:3] for _ in range(3)]
    for engine in (whole, chunked, tight):
        assert_idle(engine)


def test_batch_invariant_answers_do_not_change_by_a_bit():
    settings = {"kv_cache_dtype": "int8", "batch_invariant": True, "block_size": 8}
    params = PARAMS.replace(max_tokens=5, logprobs=1)

    def logprobs(engine) -> list[list[float]]:
        outputs = engine.generate(PROMPTS[:3], params)
        return [[max(entry.values()).logprob for entry in o.outputs[0].logprobs] for o in outputs]

    assert logprobs(paged_engine(**settings, max_num_batched_tokens=9)) == logprobs(paged_engine(**settings))


def test_beams_share_quantized_blocks():
    """Beams copy blocks that are partly filled; their scores are those over rounded keys and values."""
    model, stock = paged(kv_cache_dtype="int8", block_size=4), tiny_model("llama")
    prompt = torch.tensor([PROMPTS[0]])
    how = {"num_beams": 3, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    found = model.generate(prompt, **how)
    expected = stock.generate(prompt, **over(stock, RoundedCache("int8")), **how)
    assert torch.equal(found, expected)
    assert model.engine.stats().num_steps > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_gib_holds_nearly_twice_the_tokens(name):
    def tokens_of(**config) -> int:
        model = tiny_model("llama", torch.bfloat16, head_dim=64)
        return AutoPagedModelForCausalLM.from_model(
            model, paged_config=PagedConfig(cpu_kv_cache_gib=2**-8, **config)
        ).engine.plan.pool_tokens

    assert tokens_of(kv_cache_dtype=name) >= 1.9 * tokens_of()


def test_the_pool_takes_what_the_plan_says():
    engine = paged_engine(kv_cache_dtype="fp8", num_blocks=30)
    (pool,) = engine._make_runner().pools
    assert pool.num_bytes == engine.plan.pool_bytes == 30 * engine.plan.bytes_per_block
    assert "K/V in float8_e4m3fn" in engine.plan.describe()


def test_released_and_sleeping_engines_answer_as_before():
    engine = paged_engine(kv_cache_dtype="int8")
    expected = tokens(engine.generate(PROMPTS[:2], PARAMS))
    engine.release()
    assert tokens(engine.generate(PROMPTS[:2], PARAMS)) == expected
    engine.sleep()
    engine.wake_up()
    assert tokens(engine.generate(PROMPTS[:2], PARAMS)) == expected


def test_a_cache_that_is_handed_out_holds_numbers():
    model, stock = paged(kv_cache_dtype="int8"), tiny_model("llama")
    prompt = torch.tensor([PROMPTS[1]])
    out = model.generate(prompt, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    rounded = RoundedCache("int8")
    with torch.no_grad():
        stock(out.sequences[:, :-1], **over(stock, rounded))
    for ours, theirs in zip(out.past_key_values.layers, rounded.layers, strict=True):
        assert ours.keys.dtype == torch.float32
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=0.05)
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=0.05)


def test_llm_takes_the_name_and_unknown_ones_are_refused():
    model = tiny_model("llama", vocab_size=VOCAB_SIZE)
    llm = LLM(model, tokenizer=tiny_tokenizer(), kv_cache_dtype="fp8_e5m2")
    assert llm.engine.plan.dtype == "float8_e5m2"
    for name in ("int4", "fp16", ""):
        with pytest.raises(ConfigurationError, match=f"one of auto, fp8, fp8_e4m3, fp8_e5m2, int8, got {name!r}"):
            PagedConfig(kv_cache_dtype=name)


@pytest.mark.slow
def test_perplexity_of_the_real_model(real_model_path, real_tokenizer):
    """On English text that comes with Python: the reference of its statements and expressions."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in ("compound", "assignment", "import", "execmodel", "formatstrings"))
    ids = real_tokenizer(text)["input_ids"]
    windows = [ids[start : start + 768] for start in range(0, 3 * 768, 768)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def perplexity(name: str) -> float:
        config = PagedConfig(kv_cache_dtype=name, max_num_batched_tokens=512)
        model = AutoPagedModelForCausalLM.from_pretrained(real_model_path, dtype=torch.float32, paged_config=config)
        logprobs = [
            entry[token].logprob
            for window, output in zip(windows, model.engine.generate(windows, params), strict=True)
            for token, entry in zip(window[1:], output.prompt_logprobs[1:], strict=True)
        ]
        return math.exp(-sum(logprobs) / len(logprobs))

    plain = perplexity("auto")
    changes = {name: perplexity(name) / plain - 1 for name in ("int8", "fp8_e4m3", "fp8_e5m2")}
    print(f"perplexity {plain:.3f};", ", ".join(f"{name} {change:+.3%}" for name, change in changes.items()))
    assert abs(changes["int8"]) < 0.003
    # Three and two bits after the point: each number is off by up to 6 and 12 %, whatever its scale.
    assert abs(changes["fp8_e4m3"]) < 0.02 and 0 < changes["fp8_e5m2"] < 0.08
