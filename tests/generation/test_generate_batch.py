"""`model.generate_batch`: any prompts at once, with Transformers' arguments and result fields."""

from __future__ import annotations

import dataclasses
import inspect
import logging

import numpy as np
import psutil
import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_paged import (
    GenerationOutput,
    GenerationStatus,
    HiddenStatesWanted,
    InvalidRequestError,
    InvalidTokenError,
    NotSupportedError,
    PromptTooLongError,
    StepFailedError,
)
from hf_paged.generation.batching_settings import BatchingSettings
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
    from transformers.generation.continuous_batching import RequestStatus as TheirStatus

    assert {status.name: status.value for status in TheirStatus} == {s.name: s.value for s in GenerationStatus}
    assert GenerationStatus.FINISHED == TheirStatus.FINISHED
    ours, theirs = GenerationOutput("a"), Theirs("a")
    for name in ("prompt_ids", "generated_tokens", "logprobs", "error", "status", "lifespan", "timestamps"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_results_are_those_of_transformers_own_continuous_batching(model):
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, use_cache=False)
    batching = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64, return_logprobs=True)
    theirs = tiny_model("llama", vocab_size=VOCAB_SIZE).generate_batch(PROMPTS, config, batching, progress_bar=False)
    ours = model.generate_batch(PROMPTS, config, batching, progress_bar=False)
    assert list(ours) == list(theirs)
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        assert (mine.prompt_ids, mine.generated_tokens) == (other.prompt_ids, other.generated_tokens)
        assert mine.status == other.status and mine.error == other.error
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_prompts_of_all_lengths_in_input_order(model, stock):
    """InfiniTensor/InfiniLM#378: prompts whose length is a multiple of the block size crashed a batch."""
    results = run(model, PROMPTS, max_new_tokens=7)
    assert [result.prompt_ids for result in results] == PROMPTS
    assert answers(results) == greedy(stock, PROMPTS, 7)
    assert [result.request_id for result in results] == [f"req_{i}" for i in range(9)]
    for result in results:
        assert result.is_finished() and result.status is GenerationStatus.FINISHED and result.finish_reason == "length"
        assert result.error is None and result.logprobs == []
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
            assert result.finish_reason == ("stop" if places else "length")
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
    names = [f"req_{i}{child}" for i in range(2) for child in ("", "__child#0", "__child#1")]
    assert [result.request_id for result in results] == names
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
        (None, {"output_attentions": True}, NotSupportedError, "`output_attentions`.*`generate`"),
        (None, {"output_logits": True}, NotSupportedError, "`output_logits`"),
        (None, {"force_words_ids": [[1]]}, NotSupportedError, "`force_words_ids`"),
        (None, {"num_beams": 3, "scores": True}, NotSupportedError, "`scores`.*`num_beams` is set"),
        (None, {"num_beams": 3, "seed": 3}, NotSupportedError, "`seed`.*`num_beams` is set"),
        (None, {"inputs_embeds": torch.zeros(1, 2, 4)}, NotSupportedError, "`inputs_embeds`"),
        (None, {"stop_strings": ["a"]}, ValueError, "tokenizer"),
        (None, {"logits_processor": 3}, InvalidRequestError, "`logits_processor`"),
        (None, {"hidden_states": 5}, InvalidRequestError, "`hidden_states` must be True, or a HiddenStatesWanted"),
        (None, {"hidden_states": HiddenStatesWanted(layers=())}, InvalidRequestError, "names a layer"),
        (None, {"logprobs": -1}, InvalidRequestError, "`logprobs`"),
        (None, {"seed": "x"}, InvalidRequestError, "`seed`"),
        (None, {"max_new_tokns": 4}, ValueError, "max_new_tokns"),
        (None, {"continuous_batching_config": object()}, InvalidRequestError, "PagedConfig"),
        (None, {"do_sample": True, "temperature": 0.0}, InvalidRequestError, "`temperature` must be positive"),
        (None, {"max_length": 3}, ValueError, "max_length"),
        (None, {"max_new_tokens": 0}, ValueError, "max_new_tokens|max_length"),
        (None, {"num_return_sequences": 5, "do_sample": True}, InvalidRequestError, "`n` is 5"),
        (None, {"num_return_sequences": 2}, ValueError, "num_return_sequences"),
        (None, {"bad_words_ids": [5]}, ValueError, "`bad_words_ids`"),
        (None, {"repetition_penalty": -1.0}, ValueError, "`penalty` has to be a strictly positive"),
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
    assert model.engine is not None  # which looks at the model before it is broken
    forward = type(model).forward

    def broken(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits[(kwargs["input_ids"][0, kwargs["logits_to_keep"]] == 42)[None]] = torch.nan
        return output

    monkeypatch.setattr(type(model), "forward", broken)
    prompts = [[9, 8, 7], [9, 8, 42], [9, 7]]
    results = run(model, prompts, max_new_tokens=3)
    monkeypatch.undo()
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert [result.status.name for result in results] == ["FINISHED", "FAILED", "FINISHED"]
    assert "NaN" in results[1].error and results[1].generated_tokens == []
    assert [results[0].generated_tokens, results[2].generated_tokens] == greedy(stock, [prompts[0], prompts[2]], 3)


def test_step_that_fails_is_told_in_each_result(model, monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("a device fell off")

    monkeypatch.setattr(type(model), "forward", broken)
    results = run(model, PROMPTS[:2], max_new_tokens=3)
    assert [result.status for result in results] == [GenerationStatus.FAILED] * 2
    assert all("a device fell off" in result.error for result in results)
    with pytest.raises(StepFailedError, match="a device fell off"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=3)


def test_failures_are_logged_once(model, monkeypatch, caplog):
    def broken(self, *args, **kwargs):
        raise RuntimeError("a device fell off")

    monkeypatch.setattr(type(model), "forward", broken)
    with caplog.at_level(logging.ERROR, logger="hf_paged"):
        run(model, PROMPTS[:2], max_new_tokens=3)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "hf_paged.generation.batch"]
    assert message.startswith("2 of 2 requests failed") and "a device fell off" in message


def no_token_five(input_ids, scores):
    scores = scores.clone()
    scores[:, 5] = -torch.inf
    return scores


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
        {"num_beams": 2, "no_repeat_ngram_size": 2, "eos_token_id": list(range(60, 90))},
        {"no_repeat_ngram_size": 2, "suppress_tokens": list(range(60))},
        {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 7},
        {"guidance_scale": 1.7},
        {"prompt_lookup_num_tokens": 3},
        {"stop_strings": ["on", "th"]},
        {"prefix_allowed_tokens_fn": lambda row, tokens: [5, 6, 7 + len(tokens) % 3]},
        {"prefix_allowed_tokens_fn": lambda row, tokens: [5, 6, 7 + len(tokens) % 3], "num_beams": 2},
        {"logits_processor": LogitsProcessorList([no_token_five]), "forced_eos_token_id": 6},
        {"stopping_criteria": [lambda ids, scores: ids[:, -1] % 3 == 0]},
        {"use_cache": False, "cache_implementation": "static"},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_what_transformers_has_for_generate_works_in_a_batch(model, stock, settings):
    """Each prompt alone through Transformers' `generate`, against all of them in one batch."""
    prompts, tokenizer = PROMPTS[:4], tiny_tokenizer()
    own = {"tokenizer": tokenizer} if "stop_strings" in settings else {}
    theirs = {"pad_token_id": 0} | {
        name: v for name, v in settings.items() if not name.endswith("cache_implementation")
    }
    if "stopping_criteria" in settings:
        theirs["stopping_criteria"] = StoppingCriteriaList(settings["stopping_criteria"])
    expected = []
    for prompt in prompts:
        ends = settings.get("eos_token_id", [])
        for row in stock.generate(torch.tensor([prompt]), max_new_tokens=8, **theirs, **own)[:, len(prompt) :].tolist():
            places = [i + 1 for i, token in enumerate(row) if token in (ends if isinstance(ends, list) else [ends])]
            expected.append(row[: min(places, default=8)])
    assert answers(run(model, prompts, max_new_tokens=8, **settings, **own)) == expected


@pytest.mark.parametrize("num_beams", [1, 2])
def test_allowed_tokens_are_asked_for_with_the_number_of_the_prompt(model, num_beams):
    def allowed(row, tokens):
        return [10 + row]

    results = run(model, PROMPTS[:3], max_new_tokens=3, prefix_allowed_tokens_fn=allowed, num_beams=num_beams)
    assert answers(results) == [[10] * 3, [11] * 3, [12] * 3]


def test_different_configurations_share_the_steps(model, stock):
    """Beams, processors and plain greedy search in one call: each as alone."""
    configs = [
        GenerationConfig(max_new_tokens=6, num_beams=2),
        GenerationConfig(max_new_tokens=6, no_repeat_ngram_size=1),
        GenerationConfig(max_new_tokens=6, repetition_penalty=2.0),
        GenerationConfig(max_new_tokens=6),
    ]
    expected = [
        stock.generate(torch.tensor([prompt]), generation_config=config, pad_token_id=0)[0, len(prompt) :].tolist()
        for prompt, config in zip(PROMPTS[:4], configs, strict=True)
    ]
    assert answers(run(model, PROMPTS[:4], configs)) == expected


def test_seed_alone_fixes_the_text(model):
    """vllm-project/vllm#51226: a seeded request changed with its batch mates."""
    sampled = {"do_sample": True, "max_new_tokens": 8}
    alone = answers(run(model, PROMPTS[:1], seed=42, **sampled))
    assert answers(run(model, PROMPTS[:1] + PROMPTS[1:6], seed=42, **sampled))[:1] == alone
    config = ContinuousBatchingConfig(seed=5)
    first, second = (answers(run(model, PROMPTS[:3] * 2, None, config, **sampled)) for _ in range(2))
    assert first == second and first[:3] != first[3:]


def test_top_k_has_three_spellings_of_off(model):
    """vllm-project/vllm PR#17691: a top_k of 0 was refused, or taken for 1."""
    results = [answers(run(model, PROMPTS[:3], do_sample=True, top_k=k, seed=1, max_new_tokens=6)) for k in (0, None)]
    assert results[0] == results[1]
    greedy_texts = answers(run(model, PROMPTS[:3], max_new_tokens=6))
    assert answers(run(model, PROMPTS[:3], do_sample=True, top_k=1, seed=1, max_new_tokens=6)) == greedy_texts


def test_log_probabilities_of_prompt_and_answer(model, stock):
    """vllm-project/vllm#3707: `logprobs=0` returned nothing instead of the sampled token's value."""
    prompt = PROMPTS[1]
    (result,) = run(model, [prompt], max_new_tokens=5, logprobs=2, prompt_logprobs=1)
    tokens = prompt + result.generated_tokens
    reference = torch.log_softmax(stock(torch.tensor([tokens])).logits[0].double(), dim=-1)
    expected = [reference[i - 1, token].item() for i, token in enumerate(tokens) if i > 0]
    assert result.prompt_logprobs[0] is None
    got = [entry[token].logprob for entry, token in zip(result.prompt_logprobs[1:], prompt[1:], strict=True)]
    assert got + result.logprobs == pytest.approx(expected, abs=1e-4)
    assert all(
        len(entry) >= 2 and entry[t].rank == 1 for entry, t in zip(result.top_logprobs, tokens[-5:], strict=True)
    )
    (bare,) = run(model, [prompt], max_new_tokens=5, logprobs=0)
    # The prompt is cached by now: its last token is computed alone, and sums have another order.
    assert bare.logprobs == pytest.approx(result.logprobs, abs=1e-5)
    assert bare.top_logprobs is None and bare.prompt_logprobs is None


@pytest.mark.parametrize(
    "settings", [{}, {"do_sample": True, "temperature": 0.5, "top_k": 20}, {"num_beams": 2}], ids=str
)
def test_return_logprobs_are_those_that_tokens_were_chosen_with(model, stock, settings):
    """As in Transformers: of the processed scores."""
    torch.manual_seed(0)
    config = ContinuousBatchingConfig(return_logprobs=True)
    results = run(model, PROMPTS[:2], None, config, max_new_tokens=4, **settings)
    for result in results:
        tokens = torch.tensor([result.prompt_ids + result.generated_tokens])
        logits = stock(tokens).logits[0, len(result.prompt_ids) - 1 : -1]
        if "top_k" in settings:
            logits = TopKLogitsWarper(20)(tokens, TemperatureLogitsWarper(0.5)(tokens, logits))
        expected = torch.log_softmax(logits, dim=-1).gather(1, tokens[0, len(result.prompt_ids) :, None])[:, 0]
        assert result.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert result.scores is None and result.top_logprobs is None
    if "num_beams" not in settings:
        torch.manual_seed(0)
        both = run(model, PROMPTS[:2], None, config, max_new_tokens=4, scores=True, **settings)
        assert [result.logprobs for result in both] == [result.logprobs for result in results]
        assert all(len(result.scores) == 4 for result in both)


def test_scores_and_hidden_states(model, stock):
    prompts = PROMPTS[:3]
    config = GenerationConfig(max_new_tokens=4, output_scores=True, output_hidden_states=True, repetition_penalty=1.3)
    for result, prompt in zip(run(model, prompts, config), prompts, strict=True):
        expected = stock.generate(
            torch.tensor([prompt]), generation_config=config, return_dict_in_generate=True, pad_token_id=0
        )
        assert result.generated_tokens == expected.sequences[0, len(prompt) :].tolist()
        torch.testing.assert_close(torch.stack(result.scores), torch.cat(expected.scores), atol=1e-4, rtol=0)
        states = torch.stack([torch.cat(layer, dim=1)[0] for layer in zip(*expected.hidden_states, strict=True)])
        torch.testing.assert_close(result.hidden_states, states, atol=1e-4, rtol=1e-4)
    (last,) = run(
        model, prompts[:1], max_new_tokens=4, hidden_states=HiddenStatesWanted(layers=(-1,), all_tokens=False)
    )
    assert last.hidden_states.shape[:2] == (1, 1)


def test_a_batching_configuration_that_asks_for_another_engine(model, stock, caplog):
    config = ContinuousBatchingConfig(
        num_blocks=1, max_batch_tokens=32, max_requests_per_batch=2, allow_block_sharing=False, use_async_batching=True
    )
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        for _ in range(2):
            assert answers(run(model, PROMPTS, None, config, max_new_tokens=7)) == greedy(stock, PROMPTS, 7)
    lines = [record.getMessage() for record in caplog.records if "continuous_batching_config" in record.getMessage()]
    assert len(lines) == 2 and "use_async_batching say nothing" in lines[0]
    other = BatchingSettings.of(config).engine(model)
    assert other is not model.engine and other is BatchingSettings.of(config).engine(model)
    size = config.page_size if hasattr(config, "page_size") else config.block_size
    assert other.plan.pool_tokens == size and other.plan.max_num_batched_tokens == 32
    assert other.plan.max_num_seqs == 2 and not other.plan.enable_prefix_caching
    assert BatchingSettings.of(ContinuousBatchingConfig()).engine(model) is model.engine
    share = ContinuousBatchingConfig(max_memory_percent=1e-6)
    assert BatchingSettings.of(share).engine(model).plan.pool_bytes <= 1e-6 * psutil.virtual_memory().total
    with pytest.raises(InvalidRequestError, match="`max_memory_percent`"):
        run(model, PROMPTS, None, ContinuousBatchingConfig(max_memory_percent=30.0))


def test_a_batching_configuration_may_be_inside_the_generation_configuration(model):
    config = GenerationConfig(max_new_tokens=3)
    config.continuous_batching_config = ContinuousBatchingConfig(return_logprobs=True)
    assert [len(result.logprobs) for result in run(model, PROMPTS[:2], config)] == [3, 3]


@pytest.mark.parametrize("num_answers", [1, 2])
def test_padding_tokens_that_the_model_chose_stay(model, stock, num_answers):
    prompt, fields = PROMPTS[0], {"num_beams": 2, "num_return_sequences": num_answers, "max_new_tokens": 6}
    expected = stock.generate(torch.tensor([prompt]), eos_token_id=None, do_sample=False, **fields)
    answers = expected[:, len(prompt) :].tolist()
    results = run(model, [prompt], eos_token_id=-1, pad_token_id=answers[0][-1], do_sample=False, **fields)
    assert [result.generated_tokens for result in results] == answers
    assert {result.finish_reason for result in results} == {"length"}


@pytest.mark.parametrize("name", ["input_ids", "inputs", "attention_mask"])
def test_prompts_as_keywords_are_refused(model, name):
    given = torch.ones(1, 3, dtype=torch.long)
    if name == "inputs":
        with pytest.raises(TypeError, match="inputs"):
            run(model, PROMPTS[:1], inputs=given)
        return
    with pytest.raises(NotSupportedError, match=f"`{name}` is an input"):
        run(model, PROMPTS[:1], max_new_tokens=2, **{name: given})


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences"])
@pytest.mark.parametrize("value", [0, -1, True], ids=repr)
def test_counts_below_one_are_refused(model, name, value):
    with pytest.raises(InvalidRequestError, match=f"`{name}` must be a whole number"):
        run(model, PROMPTS[:1], max_new_tokens=2, **{name: value})


def test_to_want_no_graphs_asks_for_no_other_engine_where_there_are_none():
    model = paged()
    model.engine.plan = dataclasses.replace(model.engine.plan, device="cuda:0")
    settings = BatchingSettings.of(ContinuousBatchingConfig(use_cuda_graph=False))
    assert settings.engine(model) is model.engine
