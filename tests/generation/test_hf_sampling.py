"""What a `GenerationConfig` asks for, sampled by the engine's sampler: the scores and the endings of Transformers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
)
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, SynthIDTextWatermarkLogitsProcessor

from hf_paged.errors import InvalidRequestError, NotSupportedError
from hf_paged.generation.hf_sampling import HOW, CustomParts, request_settings
from hf_paged.generation.request import Request
from hf_paged.generation.sampling.criteria import stops
from hf_paged.generation.sampling.row_processors import PerAnswer
from hf_paged.generation.sampling.sampler import Sampler
from tests.families import tiny_model
from tests.paged_models import paged
from tests.tokenizers_for_tests import tiny_tokenizer

PROMPT = [5, 6, 7, 5, 6, 9, 5, 7, 7, 6, 5]
LENGTH = len(PROMPT)
EOS = [3, 9]
MAX_TOKENS = 8


@functools.cache
def model():
    return paged("llama")


class Ramp(LogitsProcessor):
    """A caller's own processor, which looks at the tokens and works in place."""

    def __call__(self, input_ids, scores):
        scores += torch.arange(scores.shape[-1]) * 0.01 * input_ids.shape[-1]
        return scores


# Each with the number of tokens at which it acts, where that matters.
SETTINGS = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "encoder_repetition_penalty": 0.8},
    "bigrams": {"no_repeat_ngram_size": 2},
    "unigrams": {"no_repeat_ngram_size": 1},
    "prompt bigrams": {"encoder_no_repeat_ngram_size": 2},
    "prompt trigrams": {"encoder_no_repeat_ngram_size": 3, "no_repeat_ngram_size": 3},
    "bad words": {"bad_words_ids": [[7], [5, 6], [3], [9, 5, 8]]},
    "bias": {"sequence_bias": [[[7], 3.0], [[5, 8], -2.0], [[9, 5, 8], 1.5], [[8], 0.5], [[6, 6], float("-inf")]]},
    "bias by tuples": {"sequence_bias": {(7,): 3.0, (5, 6): -9.0}},
    "lengths": {"min_new_tokens": 3},
    "length in all": {"min_length": len(PROMPT) + 2},
    "forced end": {"forced_eos_token_id": 9},
    "forced ends": {"forced_eos_token_id": [9, 11]},
    "invalid": {"remove_invalid_values": True, "suppress_tokens": [4]},
    "decay": {"exponential_decay_length_penalty": (2, 1.5)},
    "decay from a list": {"exponential_decay_length_penalty": [0, 1.01]},
    "suppress": {"suppress_tokens": [1, 2, 50], "begin_suppress_tokens": [4, 5]},
    "normalized": {"renormalize_logits": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "sample": {"do_sample": True},
    "temperature": {"do_sample": True, "temperature": 0.6, "top_k": 0},
    "top k, p, min p": {"do_sample": True, "temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "top h": {"do_sample": True, "top_h": 0.5, "top_k": 0},
    "typical": {"do_sample": True, "typical_p": 0.6, "top_k": 0},
    "epsilon": {"do_sample": True, "epsilon_cutoff": 0.01, "top_k": 0},
    "eta": {"do_sample": True, "eta_cutoff": 0.02, "top_k": 0},
    "all cuts": {
        "do_sample": True, "temperature": 1.7, "top_h": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.001,
        "typical_p": 0.9, "epsilon_cutoff": 0.001, "eta_cutoff": 0.002, "renormalize_logits": True,
    },
    "sampled watermark": {"do_sample": True, "top_k": 20, "watermarking_config": WatermarkingConfig(),
                          "renormalize_logits": True},
}  # fmt: skip
SETTINGS["everything"] = {
    name: value
    for each in SETTINGS.values()
    for name, value in each.items()
    if name not in ("watermarking_config", "min_length", "suppress_tokens", "no_repeat_ngram_size")
}


def make_config(**fields):
    config = GenerationConfig(**{"eos_token_id": EOS, "pad_token_id": 0, "max_new_tokens": MAX_TOKENS} | fields)
    config, _ = model()._prepare_generation_config(config)
    return config


def least(config, prompt_length):
    return max(config.min_new_tokens or 0, (config.min_length or 0) - prompt_length, 0)


def settings_of(config, prompt_length=LENGTH, **parts):
    return request_settings(
        model(), config, prompt_length, max_tokens=MAX_TOKENS, min_tokens=least(config, prompt_length),
        custom=CustomParts(**parts),
    )  # fmt: skip


def make_request(config, prompt=PROMPT, *, seed=0, name="a", scores=True, **parts):
    params, extras = settings_of(config, len(prompt), **parts)
    extras = dataclasses.replace(extras, scores=scores)
    return Request(
        name, list(prompt), params, max_tokens=params.max_tokens, stop_token_ids=frozenset(params.stop_token_ids),
        seed=seed, extras=extras,
    )  # fmt: skip


def stock_processors(config, prompt=PROMPT, logits_processor=(), prefix_allowed_tokens_fn=None):
    """What Transformers' `generate` makes for one row, by its own steps."""
    config = copy.copy(config)
    model()._prepare_special_tokens(config, True, device="cpu")
    config.max_length = len(prompt) + MAX_TOKENS
    return model()._get_logits_processor(
        generation_config=config, input_ids_seq_length=len(prompt), encoder_input_ids=torch.tensor([prompt]),
        logits_processor=LogitsProcessorList(logits_processor), device="cpu", model_kwargs={},
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
    )  # fmt: skip


def vocab_size():
    return model().engine.limits.vocab_size


def logits_for(steps, rows=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(steps, rows, vocab_size(), generator=generator) * 2
    logits[..., 5:8] += 9  # so that answers repeat themselves and the prompt
    return logits


def assert_same_scores(request, stock, logits, sampler):
    """One step: our scores are stock's, and the token is one of those that it left."""
    input_ids = torch.tensor([request.token_ids])
    expected = stock(input_ids, logits.float().clone())[0]
    result = sampler.sample(logits, [request], [0])
    assert not result.failed_rows and not result.errors
    ours = result.scores[0]
    assert torch.equal(ours.isneginf(), expected.isneginf())
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-6)
    if request.params.greedy:
        assert result.token_ids[0] == int(expected.argmax())
    assert expected[result.token_ids[0]] > -torch.inf
    return result.token_ids[0]


def compare_all_steps(config, prompt=PROMPT, seed=0, **parts):
    request = make_request(config, prompt, seed=seed, **parts)
    stock = stock_processors(config, prompt, **parts)
    sampler = Sampler(vocab_size())
    for logits in logits_for(MAX_TOKENS, seed=seed):
        request.token_ids.append(assert_same_scores(request, stock, logits, sampler))
    return request


@pytest.mark.parametrize("name", SETTINGS)
def test_scores_equal_to_transformers_at_every_step(name):
    compare_all_steps(make_config(**SETTINGS[name]))


def test_settings_that_should_change_scores_do():
    """The comparison above is not between untouched logits."""
    logits = logits_for(MAX_TOKENS)
    for name, fields in SETTINGS.items():
        request = make_request(make_config(**fields))
        sampler, changed = Sampler(vocab_size()), False
        for step in logits:
            result = sampler.sample(step, [request], [0])
            changed |= not torch.equal(result.scores[0], step[0])
            request.token_ids.append(result.token_ids[0])
        assert changed == (name != "greedy"), name


def test_a_prompt_of_one_token():
    """`forced_bos_token_id` acts there alone, and moves `begin_suppress_tokens` on by one."""
    config = make_config(forced_bos_token_id=17, begin_suppress_tokens=[4, 5, 17])
    assert compare_all_steps(config, [8]).output_token_ids[0] == 17
    compare_all_steps(config)


def test_lengths_count_padding_as_transformers_does():
    config = make_config(forced_bos_token_id=17)
    assert settings_of(config, 4)[1].features is None and settings_of(config, 1)[1].features is not None


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, {"logits_processor": [Ramp()]}),
        ({"no_repeat_ngram_size": 2, "do_sample": True, "top_p": 0.8}, {"logits_processor": [Ramp(), Ramp()]}),
        ({"no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "min_new_tokens": 3},
         {"logits_processor": [Ramp(), NoRepeatNGramLogitsProcessor(1)]}),
        ({"do_sample": True, "temperature": 0.7}, {"logits_processor": [TemperatureLogitsWarper(0.5)]}),
        ({"min_new_tokens": 3}, {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1]), 9, 40 + row]}),
        ({"watermarking_config": WatermarkingConfig(), "min_new_tokens": 3}, {"logits_processor": [Ramp()]}),
    ],
    ids=["added", "with others", "in the place of one", "a warper", "prefix function", "watermark"],
)  # fmt: skip
def test_custom_processors(fields, parts):
    compare_all_steps(make_config(**fields), **parts)


def test_prefix_function_is_told_its_row():
    seen = []
    parts = {"prefix_allowed_tokens_fn": lambda row, ids: seen.append((row, ids.tolist())) or [4], "row": 6}
    request = make_request(make_config(num_return_sequences=2, do_sample=True), **parts)
    assert Sampler(vocab_size()).sample(logits_for(1)[0], [request], [0]).token_ids == [4]
    assert seen == [(6, PROMPT)]


def test_a_processor_that_is_listed_twice_is_called_once():
    ramp = Ramp()
    compare_all_steps(make_config(), logits_processor=[ramp, ramp])


FIELDS = {
    "repetition_penalty": st.sampled_from([1.0, 1.2, 0.7]),
    "no_repeat_ngram_size": st.integers(0, 3),
    "encoder_no_repeat_ngram_size": st.integers(0, 3),
    "encoder_repetition_penalty": st.sampled_from([1.0, 1.5, 0.7]),
    "bad_words_ids": st.sampled_from([None, [[7], [5, 6]]]),
    "sequence_bias": st.sampled_from([None, [[[4], 5.0], [[6, 9], -3.0]]]),
    "min_new_tokens": st.integers(0, 4),
    "exponential_decay_length_penalty": st.sampled_from([None, (1, 1.3)]),
    "suppress_tokens": st.sampled_from([None, [1, 60]]),
    "renormalize_logits": st.booleans(),
    "do_sample": st.booleans(),
    "temperature": st.sampled_from([1.0, 0.5, 2.0]),
    "top_k": st.sampled_from([0, 5, 50]),
    "top_p": st.sampled_from([1.0, 0.9, 0.3]),
    "min_p": st.sampled_from([None, 0.05]),
    "top_h": st.sampled_from([None, 0.4, 1.0]),
    "typical_p": st.sampled_from([1.0, 0.9, 0.2]),
    "epsilon_cutoff": st.sampled_from([0.0, 0.005]),
    "eta_cutoff": st.sampled_from([0.0, 0.01]),
}


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    fields=st.fixed_dictionaries(FIELDS),
    # Transformers before 5.24 does not complete a sequence whose other tokens are the whole prompt.
    prompt=st.lists(st.integers(4, 12), min_size=2, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_any_combination(fields, prompt, seed):
    if any(fields[name] for name in ("min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size")):
        # Transformers before 5.24 makes NaN of an end token that is removed already.
        fields["exponential_decay_length_penalty"] = None
    compare_all_steps(make_config(**fields), prompt, seed)


def test_rows_of_all_kinds_in_one_batch_equal_each_alone():
    torch.manual_seed(0)
    rows, steps = len(SETTINGS), 4
    logits = logits_for(steps, rows)

    def requests():
        return [make_request(make_config(**fields), seed=i, name=n) for i, (n, fields) in enumerate(SETTINGS.items())]

    alone = requests()
    expected = []
    for row, request in enumerate(alone):
        sampler = Sampler(vocab_size())
        for step in range(steps):
            result = sampler.sample(logits[step], [request], [row])
            expected.append(result.scores[0])
            request.token_ids.append(result.token_ids[0])
    together, sampler = requests(), Sampler(vocab_size())
    order = torch.randperm(rows).tolist()
    for step in range(steps):
        parts = [order] if step % 2 else [order[: rows // 2], order[rows // 2 :]]  # the batch changes
        for part in parts:
            result = sampler.sample(logits[step], [together[row] for row in part], part)
            for i, row in enumerate(part):
                assert torch.equal(result.scores[i], expected[row * steps + step]), list(SETTINGS)[row]
                together[row].token_ids.append(result.token_ids[i])
    assert [request.token_ids for request in together] == [request.token_ids for request in alone]


def test_asking_for_scores_changes_no_token():
    for fields in SETTINGS.values():
        config = make_config(**fields)
        answers = []
        for scores in (False, True):
            request, sampler = make_request(config, seed=5, scores=scores), Sampler(vocab_size())
            for logits in logits_for(MAX_TOKENS, seed=3):
                request.token_ids += sampler.sample(logits, [request], [0]).token_ids
            answers.append(request.token_ids)
        assert answers[0] == answers[1], fields


# --------------------------------------------------------------------------------------------- guidance, state


def test_guidance_is_that_of_transformers():
    """The processor runs the model beside the engine, and keeps a cache between the tokens."""
    config = make_config(guidance_scale=1.5, min_new_tokens=2)
    negative = torch.tensor([[8, 11, 12]])
    request = make_request(config, negative_prompt_ids=negative)
    prepared = copy.copy(config)
    model()._prepare_special_tokens(prepared, True, device="cpu")
    stock = model()._get_logits_processor(
        prepared, input_ids_seq_length=len(PROMPT), device="cpu", negative_prompt_ids=negative,
        encoder_input_ids=torch.tensor([PROMPT]), logits_processor=LogitsProcessorList(),
    )  # fmt: skip
    sampler = Sampler(vocab_size())
    with torch.no_grad():
        for logits in logits_for(4):
            request.token_ids.append(assert_same_scores(request, stock, logits, sampler))


def test_every_answer_has_processors_of_its_own():
    config = make_config(do_sample=True, guidance_scale=2.0, num_return_sequences=2)
    params, extras = settings_of(config)
    assert params.n == 2 and isinstance(extras.logits_processor, PerAnswer)
    requests = [
        Request(str(i), PROMPT, params, max_tokens=9, branch=i, seed=1, extras=extras) for i in range(2)
    ]  # fmt: skip
    sampler = Sampler(vocab_size())
    sampler.sample(logits_for(1)[0], requests, [0, 0])
    made = [sampler._memory.recall(request, "processors", lambda _: None) for request in requests]
    assert made[0][0] is not made[1][0]
    for request in requests:
        sampler.forget(request.request_id)
    assert len(sampler._memory) == 0


def test_watermark_with_state():
    config = make_config(
        do_sample=True, watermarking_config=SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)
    )
    request = compare_all_steps(config)
    assert any(isinstance(p, SynthIDTextWatermarkLogitsProcessor) for p in stock_processors(config))
    assert request.num_output_tokens == MAX_TOKENS


# ------------------------------------------------------------------------------------------------------ endings


def test_end_tokens():
    params, _ = settings_of(make_config(eos_token_id=[3, 9, 10**6]))
    assert params.stop_token_ids == (3, 9)
    assert settings_of(make_config(eos_token_id=None))[0].stop_token_ids == ()


def test_criteria_of_the_callers_own_take_the_place_of_the_configurations():
    config = make_config(max_time=1000.0)
    soon = MaxTimeCriteria(0.0, initial_timestamp=time.time() - 1)
    criteria = [MaxLengthCriteria(len(PROMPT) + 3), EosTokenCriteria(50), soon]
    params, extras = settings_of(config, stopping_criteria=criteria)
    assert params.max_tokens == 3 and params.stop_token_ids == (50,) and extras.stopping_criteria == (soon,)
    longer = settings_of(config, stopping_criteria=[MaxLengthCriteria(len(PROMPT) + 30)])[0]
    assert longer.max_tokens == 30
    assert settings_of(config, stopping_criteria=[MaxLengthCriteria(2)])[0].max_tokens == 1


def test_other_ends_leave_the_configurations_in_the_processors():
    """`min_new_tokens` is about the configuration's end tokens, whatever a criterion ends with."""
    config = make_config(min_new_tokens=4)
    request = make_request(config, stopping_criteria=[EosTokenCriteria(50)])
    sampler = Sampler(vocab_size())
    assert_same_scores(request, stock_processors(config), logits_for(1)[0], sampler)
    assert request.stop_token_ids == {50}


def test_max_time():
    config = make_config(max_time=0.02)
    request = make_request(config)
    request.token_ids.append(5)
    assert not stops(request)
    time.sleep(0.03)
    assert stops(request)


def test_stop_strings_as_transformers_finds_them():
    tokenizer = tiny_tokenizer()
    config = make_config(stop_strings=["cat", " the"])
    criterion = StopStringCriteria(tokenizer, ["cat", " the"])
    generator = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(300):
        prompt = torch.randint(0, len(tokenizer), (4,), generator=generator).tolist()
        request = make_request(config, prompt, tokenizer=tokenizer)
        request.token_ids += tokenizer("cat the")["input_ids"][: 1 + int(torch.randint(0, 4, (1,)))]
        expected = bool(criterion(torch.tensor([request.token_ids]), None))
        assert stops(request) == expected
        found += expected
    assert 0 < found < 300
    assert settings_of(config, tokenizer=tokenizer)[1].stopping_criteria == request.extras.stopping_criteria


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True, "temperature": 0.0},
        {"do_sample": True, "temperature": 2},
        {"do_sample": True, "top_k": -3},
        {"do_sample": True, "top_p": -0.5},
        {"do_sample": True, "min_p": 1.5},
        {"do_sample": True, "top_h": 0.0},
        {"do_sample": True, "top_h": 1.5},
        {"do_sample": True, "typical_p": -0.5},
        {"repetition_penalty": -1.0},
        {"encoder_repetition_penalty": 0.0},
        {"no_repeat_ngram_size": 2.5},
        {"bad_words_ids": []},
        {"bad_words_ids": [[-5]]},
        {"sequence_bias": {}},
        {"sequence_bias": {(1,): 2}},
        {"sequence_bias": {(10**6,): 2.0}},
        {"forced_eos_token_id": -4},
        {"forced_eos_token_id": 10**6},
        {"forced_bos_token_id": 10**6},
        {"stop_strings": ["x"]},
        {"exponential_decay_length_penalty": ("x", 1.0)},
    ],
    ids=str,
)
def test_what_transformers_refuses(fields):
    with pytest.raises((ValueError, TypeError)):
        settings_of(make_config(**fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("top_p", "most"),
        ("min_p", "some"),
        ("max_time", "soon"),
        ("stop_strings", [1]),
        ("stop_strings", 5),
        ("exponential_decay_length_penalty", (1,)),
        ("exponential_decay_length_penalty", ("a", 1.0)),
        ("exponential_decay_length_penalty", 3),
    ],
)
def test_an_error_names_the_setting(name, value):
    with pytest.raises(InvalidRequestError, match=f"`{name}`"):
        settings_of(make_config(do_sample=True, **{name: value}), tokenizer=tiny_tokenizer())


def test_a_penalty_in_favour_of_no_end_token():
    with pytest.raises(InvalidRequestError, match="eos_token_id"):
        settings_of(make_config(exponential_decay_length_penalty=(2, 1.5), eos_token_id=None))


def test_what_is_no_list_of_callables():
    for name in ("logits_processor", "stopping_criteria"):
        with pytest.raises(InvalidRequestError, match=name):
            settings_of(make_config(), **{name: [5]})
        with pytest.raises(InvalidRequestError, match=name):
            settings_of(make_config(), **{name: Ramp()})


def test_beams_are_no_single_request():
    with pytest.raises(NotSupportedError, match="num_beams"):
        settings_of(make_config(num_beams=2))


def test_the_configuration_is_not_changed():
    config = make_config(no_repeat_ngram_size=2, max_time=4.0, stop_strings=["a"])
    before = config.to_dict()
    settings_of(config, tokenizer=tiny_tokenizer())
    assert config.to_dict() == before


def test_how_names_fields():
    config = GenerationConfig()
    assert all(hasattr(config, name) for name in HOW)


# ---------------------------------------------------------------------------------------------------- the engine


GREEDY = [name for name, fields in SETTINGS.items() if not fields.get("do_sample")]


def test_greedy_answers_of_the_engine_equal_stock_generate():
    prompts = [[5, 6, 7, 5, 6, 9, 5], [8], [11, 12, 11, 12, 11]]
    engine, expected = model().engine, []
    with engine.requests() as states:
        for name in GREEDY:
            for prompt in prompts:
                fields = SETTINGS[name] | {"forced_bos_token_id": 17}
                params, extras = settings_of(make_config(**fields), len(prompt))
                states.append(engine.add_request(prompt, params, extras=extras))
                expected.append((name, fields, prompt))
        for _ in engine.as_finished(states):
            pass
    stock = tiny_model("llama")
    for state, (name, fields, prompt) in zip(states, expected, strict=True):
        config = GenerationConfig(eos_token_id=EOS, pad_token_id=0, max_new_tokens=MAX_TOKENS, **fields)
        sequence = stock.generate(torch.tensor([prompt]), generation_config=config)[0].tolist()
        assert prompt + state.answers[0].request.output_token_ids == sequence, (name, prompt)
