"""`model.generate_batch`: any prompts at once, with Transformers' arguments and result fields."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from hf_paged import (
    GenerationOutput,
    InvalidRequestError,
    InvalidTokenError,
    NotSupportedError,
    PromptTooLongError,
    StepFailedError,
)
from tests.conftest import random_prompts
from tests.families import greedy, tiny_model
from tests.paged_models import assert_idle, paged
from tests.tokenizers_for_tests import VOCAB_SIZE, tiny_tokenizer

PROMPTS = random_prompts(9, VOCAB_SIZE, seed=4)
TEXTS = ["the hello", "and on", "in the other and the"]


@pytest.fixture(scope="module")
def shared():
    return paged(overrides={"vocab_size": VOCAB_SIZE}, max_num_seqs=4, num_blocks=100, max_num_batched_tokens=48)


@pytest.fixture
def model(shared):
    shared.generation_config = tiny_model("llama").generation_config
    yield shared
    assert_idle(shared.engine)


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama", vocab_size=VOCAB_SIZE)


def run(model, inputs, *args, **kwargs) -> list[GenerationOutput]:
    results = model.generate_batch(inputs, *args, progress_bar=False, **kwargs)
    assert all(key == result.request_id for key, result in results.items())
    return list(results.values())


def answers(results) -> list[list[int]]:
    return [result.generated_tokens for result in results]


def test_arguments_are_those_of_transformers(model):
    theirs = list(inspect.signature(GenerationMixin.generate_batch).parameters)
    ours = list(inspect.signature(type(model).generate_batch).parameters)
    assert [name for name in ours if name in theirs] == theirs


def test_result_fields_are_those_of_transformers():
    from transformers.generation.continuous_batching.requests import GenerationOutput as Theirs

    names = {field.name for field in dataclasses.fields(Theirs)}
    assert {name for name in names if not name.startswith("_")} <= {
        f.name for f in dataclasses.fields(GenerationOutput)
    }


def test_prompts_of_all_lengths_in_input_order(model, stock):
    """InfiniTensor/InfiniLM#378: prompts whose length is a multiple of the block size crashed a batch."""
    results = run(model, PROMPTS, max_new_tokens=7)
    assert [result.prompt_ids for result in results] == PROMPTS
    assert answers(results) == greedy(stock, PROMPTS, 7)
    assert [result.request_id for result in results] == [f"req_{i}" for i in range(9)]
    for result in results:
        assert result.is_finished() and result.status == "length" and result.error is None and result.logprobs == []
        assert result.created_time <= result.lifespan[0] <= result.lifespan[1] and result.timestamps is None


@pytest.mark.parametrize("form", [tuple, np.array, torch.tensor, lambda p: torch.tensor([p])])
def test_token_ids_in_any_form(model, form):
    expected = answers(run(model, PROMPTS[:3], max_new_tokens=4))
    results = run(model, [form(prompt) for prompt in PROMPTS[:3]], max_new_tokens=4)
    assert answers(results) == expected and [result.prompt_ids for result in results] == PROMPTS[:3]


def test_texts_and_chats_with_a_tokenizer(model):
    tokenizer = tiny_tokenizer()
    chat = [{"role": "user", "content": "hello"}]
    tokens = [
        *(tokenizer(text)["input_ids"] for text in TEXTS),
        tokenizer("<|user|>hello<|end|><|assistant|>").input_ids,
    ]
    results = run(model, [*TEXTS, chat], tokenizer=tokenizer, max_new_tokens=5)
    assert [result.prompt_ids for result in results] == tokens
    assert answers(results) == answers(run(model, tokens, max_new_tokens=5))


def test_what_a_tokenizer_returns_is_taken_as_it_is(model):
    """huggingface/transformers PR#42012: the template's return type changed and broke its callers."""
    expected = answers(run(model, TEXTS, tokenizer=tiny_tokenizer(), max_new_tokens=4))
    for form in (tiny_tokenizer()(TEXTS), tiny_tokenizer()(TEXTS, return_tensors="pt", padding=True)):
        assert answers(run(model, form, max_new_tokens=4)) == expected
    equal = torch.tensor([[5, 6, 7], [8, 9, 10]])
    assert answers(run(model, equal, max_new_tokens=4)) == answers(run(model, equal.tolist(), max_new_tokens=4))
    for wrong in ("text", 7, None):
        with pytest.raises(InvalidRequestError, match="`inputs` must be a list of prompts"):
            run(model, wrong)


def test_one_configuration_for_each_prompt(model, stock):
    configs = [GenerationConfig(max_new_tokens=2 + i, do_sample=False) for i in range(8)] + [None]
    results = run(model, PROMPTS, configs)
    expected = greedy(stock, PROMPTS, 20)
    assert answers(results) == [answer[:n] for answer, n in zip(expected, [*range(2, 10), 20], strict=True)]


def test_open_fields_come_from_the_models_configuration(model, stock):
    """huggingface/open-r1 PR#663: only one of several end-of-sequence ids was honoured."""
    expected = greedy(stock, PROMPTS, 9)
    ends = [expected[0][3], expected[1][5]]
    model.generation_config.eos_token_id = ends
    model.generation_config.max_new_tokens = 9
    for config in (None, GenerationConfig(), GenerationConfig(do_sample=False)):
        results = run(model, PROMPTS, config)
        for result, answer in zip(results, expected, strict=True):
            places = [answer.index(end) + 1 for end in ends if end in answer]
            assert result.generated_tokens == answer[: min(places, default=9)]
            assert result.status == ("stop" if places else "length")
    own = run(model, PROMPTS[:1], GenerationConfig(eos_token_id=VOCAB_SIZE - 1, max_new_tokens=6))
    assert answers(own) == [expected[0][:6]]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_length": 40},
        {"max_length": 50},
        {"max_new_tokens": 3, "max_length": 50},
        {"min_length": 52, "eos_token_id": 7},
        {"min_new_tokens": 8, "max_new_tokens": 9, "eos_token_id": list(range(3, 200))},
        {"repetition_penalty": 3.0, "max_new_tokens": 9},
        {"bad_words_ids": [[i] for i in range(100)], "max_new_tokens": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["call", "configuration", "model"])
def test_settings_mean_what_they_mean_in_generate(model, stock, settings, where):
    """Call, then configuration, then the model's own, then the default of 20 new tokens."""
    prompts = [prompt[:39] for prompt in PROMPTS[:5]]
    config = GenerationConfig(**settings) if where == "configuration" else None
    kwargs = settings if where == "call" else {}
    own = GenerationConfig(pad_token_id=0, **(settings if where == "model" else {}))
    before, stock.generation_config = stock.generation_config, own
    model.generation_config = own
    try:
        expected = [
            stock.generate(torch.tensor([prompt]), generation_config=config, **kwargs)[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    finally:
        stock.generation_config = before
    assert answers(run(model, prompts, config, **kwargs)) == expected


def test_default_length_ends_where_the_model_ends(model, stock):
    long = [[1 + i % 200 for i in range(500)]]
    expected = stock.generate(torch.tensor(long))[0, 500:].tolist()
    assert answers(run(model, long)) == [expected] and len(expected) == 12


def test_sampling_with_all_processors_is_repeated_by_the_global_seed(model):
    """huggingface/transformers PR#40692: sampling in continuous batching broke on the shape of the logits."""
    config = GenerationConfig(
        do_sample=True, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.3, max_new_tokens=8
    )
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(answers(run(model, PROMPTS, config)))
    assert runs[0] == runs[1] != runs[2]


def test_several_answers_to_a_prompt(model):
    results = run(model, PROMPTS[:2], do_sample=True, num_return_sequences=3, max_new_tokens=5)
    assert [result.request_id for result in results] == [f"req_{i}_{j}" for i in range(2) for j in range(3)]
    assert [result.prompt_ids for result in results] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert len({tuple(answer) for answer in answers(results)}) > 3


def test_every_token_has_a_time(model):
    for result in run(model, PROMPTS[:3], max_new_tokens=5, record_timestamps=True):
        assert len(result.timestamps) == 5 and result.timestamps == sorted(result.timestamps)
        assert result.created_time <= result.timestamps[0] and result.timestamps[-1] <= result.lifespan[1] + 0.5


def test_progress_bar(model, capsys):
    model.generate_batch(PROMPTS[:3], max_new_tokens=2, progress_bar=True)
    assert "3/3" in capsys.readouterr().err
    model.generate_batch(PROMPTS[:3], max_new_tokens=2, progress_bar=False)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_nothing_to_do(model):
    assert model.generate_batch([], progress_bar=False) == {}


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ([], InvalidRequestError, "prompt is empty"),
        ([3, VOCAB_SIZE], InvalidTokenError, rf"`prompt_token_ids\[1\]` is {VOCAB_SIZE}"),
        ([3, -1], InvalidTokenError, "is -1"),
        ([3, 4.0], InvalidTokenError, "got 4.0"),
        ([[3], [4]], InvalidTokenError, r"got \[3\]"),
        ([1] * 512, PromptTooLongError, "512"),
        ([1] * 510, PromptTooLongError, "510 tokens and an answer of up to 4 need 514.*`max_model_len` is 512"),
        ("text", InvalidRequestError, "holds a text; pass `tokenizer=`"),
        ([{"role": "user", "content": "x"}], InvalidRequestError, "holds a chat; pass `tokenizer=`"),
        (None, InvalidRequestError, "NoneType"),
        (torch.tensor(7), InvalidRequestError, "int"),
        (7, InvalidRequestError, "int"),
    ],
)
def test_wrong_prompt_is_refused_before_anything_starts(model, stock, bad, error, match):
    """huggingface/transformers: one token beyond the vocabulary failed every request of the batch."""
    before = model.engine.stats().num_steps
    with pytest.raises(error, match=match):
        run(model, [*PROMPTS[:2], bad, *PROMPTS[2:]], max_new_tokens=4)
    assert model.engine.stats().num_steps == before
    assert_idle(model.engine)
    assert answers(run(model, PROMPTS, max_new_tokens=4)) == greedy(stock, PROMPTS, 4)


@pytest.mark.parametrize(
    ("config", "kwargs", "error", "match"),
    [
        ([GenerationConfig()] * 3, {}, InvalidRequestError, "9 prompts were given 3 generation configurations"),
        ([{"max_new_tokens": 3}] * 9, {}, InvalidRequestError, "must hold GenerationConfigs, got dict"),
        ({"max_new_tokens": 3}, {}, InvalidRequestError, "`generation_config`"),
        (None, {"num_beams": 3}, NotSupportedError, "`num_beams`"),
        (GenerationConfig(no_repeat_ngram_size=2), {}, NotSupportedError, "`no_repeat_ngram_size`"),
        (None, {"output_scores": True}, NotSupportedError, "`output_scores`"),
        (None, {"use_cache": False}, NotSupportedError, "`use_cache`"),
        (None, {"stop_strings": ["a"]}, NotSupportedError, "`stop_strings`"),
        (None, {"max_new_tokns": 4}, ValueError, "max_new_tokns"),
        (None, {"continuous_batching_config": object()}, NotSupportedError, "PagedConfig"),
        (None, {"do_sample": True, "temperature": 0.0}, InvalidRequestError, "`temperature` must be positive"),
        (None, {"max_length": 3}, ValueError, "max_length"),
        (None, {"max_new_tokens": 0}, ValueError, "max_new_tokens|max_length"),
        (None, {"num_return_sequences": 5, "do_sample": True}, InvalidRequestError, "`n` is 5"),
        (None, {"num_return_sequences": 2}, ValueError, "num_return_sequences"),
        (None, {"bad_words_ids": [5]}, ValueError, "`bad_words_ids`"),
        (None, {"repetition_penalty": -1.0}, ValueError, "`repetition_penalty`"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_settings_are_refused_before_anything_starts(model, config, kwargs, error, match):
    before = model.engine.stats().num_steps
    with pytest.raises(error, match=match):
        run(model, [prompt + [5, 6, 7] for prompt in PROMPTS], config, **kwargs)
    assert model.engine.stats().num_steps == before


def test_request_that_fails_says_why_and_the_others_are_answered(model, stock, monkeypatch):
    """A row of NaN fails its request alone."""
    forward = type(model).forward

    def broken(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits[(kwargs["input_ids"][0, kwargs["logits_to_keep"]] == 42)[None]] = torch.nan
        return output

    monkeypatch.setattr(type(model), "forward", broken)
    prompts = [[9, 8, 7], [9, 8, 42], [9, 7]]
    results = run(model, prompts, max_new_tokens=3)
    monkeypatch.undo()
    assert [result.status for result in results] == ["length", "error", "length"]
    assert "NaN" in results[1].error and results[1].generated_tokens == []
    assert [results[0].generated_tokens, results[2].generated_tokens] == greedy(stock, [prompts[0], prompts[2]], 3)


def test_step_that_fails_is_told_in_each_result(model, monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("a device fell off")

    monkeypatch.setattr(type(model), "forward", broken)
    results = run(model, PROMPTS[:2], max_new_tokens=3)
    assert [result.status for result in results] == ["error"] * 2
    assert all("a device fell off" in result.error for result in results)
    with pytest.raises(StepFailedError, match="a device fell off"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=3)


def test_transformers_manager_is_a_typed_not_yet(model):
    with pytest.raises(NotSupportedError, match="`generate_batch`"):
        model.init_continuous_batching()
    with pytest.raises(NotSupportedError, match="`generate_batch`"):
        model.continuous_batching_context_manager()
