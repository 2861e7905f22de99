"""`model.generate`: Transformers' arguments, Transformers' results, on the engine or through Transformers' own loop."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings

import pytest
import torch
import transformers
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

from hf_paged import InvalidTokenError, PagedCache, RequestAbortedError
from hf_paged.compat import cache_argument, output_cache
from tests.families import tiny_model
from tests.paged_models import assert_idle, paged
from tests.tokenizers_for_tests import EOS, VOCAB_SIZE, tiny_tokenizer

PROMPT = torch.tensor([[5, 17, 33, 8, 61, 90, 4, 33, 8, 61]])
ROWS = [[7, 150, 9], [5, 17, 33, 8, 61, 90, 4, 33, 8, 61], list(range(3, 40))]


def padded(rows: list[list[int]], side: str = "left") -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    left = side == "left"
    pads = [[0] * (width - len(row)) for row in rows]
    tokens = [pad + row if left else row + pad for pad, row in zip(pads, rows, strict=True)]
    mask = [pad + [1] * len(row) if left else [1] * len(row) + pad for pad, row in zip(pads, rows, strict=True)]
    return {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}


def steps(model) -> int:
    return model.engine.stats().num_steps


@contextlib.contextmanager
def heard():
    """What Transformers, and Python's warnings, say meanwhile; nothing counts as said before."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    for function in ("warning_once", "info_once"):
        getattr(transformers.utils.logging, function).cache_clear()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield messages
            messages += [str(warning.message) for warning in caught]
    finally:
        logger.removeHandler(handler)


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def shared():
    return paged(max_num_seqs=8, num_blocks=200, block_size=8)


@pytest.fixture
def model(shared):
    shared.generation_config = tiny_model("llama").generation_config
    yield shared
    assert_idle(shared.engine)


def test_signature_is_that_of_transformers(model):
    theirs, ours = (inspect.signature(cls.generate).parameters for cls in (GenerationMixin, type(model)))
    names = [name for name, parameter in theirs.items() if parameter.kind is not parameter.VAR_KEYWORD]
    assert [name for name in ours if name in names] == names
    for name in names:
        assert ours[name].default == theirs[name].default, name


# --------------------------------------------------------------------------------------- what the engine runs

ENGINE_CALLS = {
    "greedy": {"max_new_tokens": 9},
    "default length": {},
    "max_length": {"max_length": 45},
    "top_p 0": {"max_new_tokens": 9, "do_sample": True, "top_p": 0.0},
    "top_p too large": {"max_new_tokens": 9, "do_sample": True, "top_p": 1.5, "top_k": 1},
    "both lengths": {"max_length": 30, "max_new_tokens": 4},
    "end token": {"max_new_tokens": 12, "eos_token_id": "third"},
    "several end tokens": {"max_new_tokens": 12, "eos_token_id": [198, "second", "third"]},
    "end token and pad": {"max_new_tokens": 12, "eos_token_id": "second", "pad_token_id": 42},
    "min_new_tokens": {"max_new_tokens": 12, "eos_token_id": "second", "min_new_tokens": 6},
    "min_length": {"max_new_tokens": 12, "eos_token_id": "second", "min_length": 15},
    "repetition_penalty": {"max_new_tokens": 12, "repetition_penalty": 2.5},
    "bad words": {"max_new_tokens": 12, "bad_words_ids": [["first"], [9, 5]]},
    "longer bad words": {"max_new_tokens": 12, "bad_words_ids": [["second", "third"], ["third", 8, 9]]},
    "bad words and end": {"max_new_tokens": 12, "bad_words_ids": [["second"]], "eos_token_id": ["second", 7]},
    "top_k 1": {"max_new_tokens": 9, "do_sample": True, "top_k": 1},
    "config": {"generation_config": GenerationConfig(max_new_tokens=5)},
    "neutral": {"max_new_tokens": 5, "length_penalty": 2.0, "prefill_chunk_size": 4, "num_assistant_tokens": 3},
}


def filled(call: dict, stock) -> dict:
    """Puts the tokens that greedy search finds in the place of their names."""
    answer = stock.generate(PROMPT, max_new_tokens=3)[0, -3:].tolist()
    names = dict(zip(("first", "second", "third"), answer, strict=True))

    def fill(value):
        if isinstance(value, list):
            return [fill(item) for item in value]
        return names.get(value, value) if isinstance(value, str) else value

    return {name: fill(value) for name, value in call.items()}


@pytest.mark.parametrize("name", ENGINE_CALLS)
@pytest.mark.parametrize("batch", ["one row", "equal rows", "left padding"])
def test_calls_that_the_engine_runs_equal_stock(model, stock, name, batch):
    """huggingface/transformers#18478: rows of a padded batch must equal their single runs."""
    call = filled(ENGINE_CALLS[name], stock)
    inputs = {
        "one row": {"inputs": PROMPT},
        "equal rows": {"input_ids": torch.cat([PROMPT, PROMPT.flip(1), PROMPT + 100])},
        "left padding": padded(ROWS),
    }[batch]
    before = steps(model)
    with heard() as expected_words:
        expected = stock.generate(**inputs, **call)
    with heard() as words:
        answer = model.generate(**inputs, **call)
    assert torch.equal(answer, expected) and answer.dtype == expected.dtype
    assert set(words) == set(expected_words)
    if not (batch == "left padding" and "repetition_penalty" in call):
        assert steps(model) > before, "it ran through Transformers' loop"


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gpt2", "deepseek_v3"])
def test_other_families_equal_stock(family):
    answers = [
        each.generate(**padded(ROWS), max_new_tokens=8, min_new_tokens=8)
        for each in (tiny_model(family), paged(family))
    ]
    assert torch.equal(answers[0], answers[1])


def test_one_dimensional_input_is_one_row(model, stock):
    expected = stock.generate(PROMPT, max_new_tokens=6)
    for given in ({"inputs": PROMPT[0]}, {"input_ids": PROMPT[0]}):
        assert torch.equal(model.generate(**given, max_new_tokens=6), expected)
    mask = torch.ones_like(PROMPT[0])
    assert torch.equal(model.generate(PROMPT[0], attention_mask=mask, max_new_tokens=6), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_dtype(model, stock, dtype):
    inputs = padded(ROWS)
    expected = stock.generate(**inputs, max_new_tokens=5)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5), expected)


def test_padding_is_inferred_from_the_pad_token(model, stock):
    tokens = padded(ROWS)["input_ids"]
    expected = stock.generate(tokens, max_new_tokens=5, pad_token_id=0, eos_token_id=198)
    answer = model.generate(tokens, max_new_tokens=5, pad_token_id=0, eos_token_id=198)
    assert torch.equal(answer, expected)
    assert torch.equal(answer, stock.generate(**padded(ROWS), max_new_tokens=5, eos_token_id=198))


def test_right_padding_warns_and_equals_stock(model, stock):
    """Transformers continues after the padding and warns that these are no good results."""
    inputs = padded(ROWS, "right")
    with heard() as words:
        answer = model.generate(**inputs, max_new_tokens=6)
    assert any("right-padding was detected" in word for word in words)
    assert torch.equal(answer, stock.generate(**inputs, max_new_tokens=6))


def test_rows_end_one_by_one_and_are_filled_up(model, stock):
    """huggingface/transformers#26959: one row that ends must not end the others."""
    singles = [stock.generate(torch.tensor([row]), max_new_tokens=10)[0, len(row) :].tolist() for row in ROWS]
    eos = singles[0][2]
    answer = model.generate(**padded(ROWS), max_new_tokens=10, eos_token_id=eos, pad_token_id=150)
    for row, single in zip(answer, singles, strict=True):
        cut = single[: single.index(eos) + 1] if eos in single else single
        new = row[len(ROWS[2]) :].tolist()
        assert new == cut + [150] * (len(new) - len(cut))
    assert len({len(single[: single.index(eos)]) if eos in single else 10 for single in singles}) > 1


def test_missing_pad_token_falls_back_to_the_end_token(model, stock):
    """huggingface/transformers#25353: a configuration without a pad id raised because an end id was set."""
    config = GenerationConfig(max_new_tokens=5, eos_token_id=198)
    stock_config = stock.generation_config
    try:
        for each in (stock, model):
            each.generation_config = GenerationConfig(eos_token_id=198)
        inputs = torch.cat([PROMPT, PROMPT + 1])
        with heard() as expected_words:
            expected = stock.generate(inputs, generation_config=config)
        with heard() as words:
            assert torch.equal(model.generate(inputs, generation_config=config), expected)
        assert set(words) == set(expected_words)
    finally:
        stock.generation_config = stock_config


@pytest.mark.parametrize("in_model", [None, 3])
@pytest.mark.parametrize("in_config", [None, 4])
@pytest.mark.parametrize("in_call", [None, 5])
def test_who_decides_the_length(model, stock, in_model, in_config, in_call):
    """Call, then configuration, then the model's own, then the default."""
    stock_config = stock.generation_config
    try:
        lengths = []
        for each in (stock, model):
            each.generation_config = GenerationConfig(pad_token_id=0, max_new_tokens=in_model)
            given = {} if in_call is None else {"max_new_tokens": in_call}
            if in_config is not None:
                given["generation_config"] = GenerationConfig(max_new_tokens=in_config)
            lengths.append(each.generate(PROMPT, **given).shape[1] - PROMPT.shape[1])
    finally:
        stock.generation_config = stock_config
    assert lengths[0] == lengths[1] == (in_call or in_config or in_model or 20)


@pytest.mark.parametrize("sources", range(8))
def test_who_decides_where_a_text_ends(model, stock, sources):
    """Of the model's own end token, the configuration's and the call's, the last one given counts."""
    third, fourth, fifth = stock.generate(PROMPT, max_new_tokens=5)[0, -3:].tolist()
    stock_config, answers = stock.generation_config, []
    try:
        for each in (stock, model):
            each.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=fifth if sources & 1 else None)
            given = {"eos_token_id": third} if sources & 2 else {}
            if sources & 4:
                given["generation_config"] = GenerationConfig(eos_token_id=fourth, do_sample=True, top_k=1)
            answers.append(each.generate(PROMPT, max_new_tokens=9, **given)[0, PROMPT.shape[1] :].tolist())
    finally:
        stock.generation_config = stock_config
    assert answers[0] == answers[1]
    assert len(answers[0]) == (3 if sources & 2 else 4 if sources & 4 else 5 if sources & 1 else 9)


# --------------------------------------------------------------------------------------- sampling


SAMPLING = {"do_sample": True, "max_new_tokens": 8, "temperature": 1.3, "top_p": 0.95}


def test_sampling_is_repeated_by_the_global_seed(model):
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append([model.generate(PROMPT, **SAMPLING), model.generate(PROMPT, **SAMPLING)])
    assert torch.equal(answers[0][0], answers[1][0]) and torch.equal(answers[0][1], answers[1][1])
    assert not torch.equal(answers[0][0], answers[0][1]) and not torch.equal(answers[0][0], answers[2][0])


def test_greedy_search_draws_no_random_numbers(model):
    before = torch.get_rng_state()
    model.generate(PROMPT, max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_several_answers_to_each_row_and_no_false_warning(model):
    """huggingface/transformers#45563: a warning said that `num_return_sequences` was unsupported though it worked."""
    inputs = padded(ROWS)
    before = model.engine.stats().num_computed_tokens
    with heard() as words:
        answer = model.generate(**inputs, **SAMPLING, num_return_sequences=3)
    assert words == []
    assert torch.equal(answer[:, :-8], inputs["input_ids"].repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in answer.tolist()}) == 9
    computed = model.engine.stats().num_computed_tokens - before
    assert computed <= sum(map(len, ROWS)) + 9 * 7  # each prompt once


def test_sampled_tokens_come_from_the_allowed_ones(model, stock):
    logits = stock(PROMPT).logits[0, -1]
    best = set(logits.topk(3).indices.tolist())
    torch.manual_seed(0)
    answers = model.generate(
        PROMPT, do_sample=True, top_k=3, temperature=50.0, max_new_tokens=1, num_return_sequences=8
    )
    assert {row[-1] for row in answers.tolist()} <= best and len({row[-1] for row in answers.tolist()}) > 1


# --------------------------------------------------------------------------------------- Transformers' own loop


class BanEven(transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.arange(0, scores.shape[1], 2), -torch.inf)


class StopAfterThree(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= PROMPT.shape[1] + 3)


SESSION_CALLS = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 4.0},
    "suppress": {"suppress_tokens": list(range(0, 190, 2))},
    "begin_suppress": {"begin_suppress_tokens": list(range(0, 190))},
    "forced_eos": {"forced_eos_token_id": 11},
    "sequence_bias": {"sequence_bias": [[[7], 30.0]]},
    "decay": {"exponential_decay_length_penalty": (2, 5.0), "eos_token_id": 11},
    "guidance": {"guidance_scale": 2.0},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "logits": {"output_logits": True, "return_dict_in_generate": True},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "hidden states for nobody": {"output_hidden_states": True},
    "attentions for nobody": {"output_attentions": True},
    "hidden states for nobody in chunks": {"output_hidden_states": True, "prefill_chunk_size": 4},
    "sampled scores": {"do_sample": True, "output_scores": True, "return_dict_in_generate": True},
    "processor": {"logits_processor": transformers.LogitsProcessorList([BanEven()])},
    "criterion": {"stopping_criteria": transformers.StoppingCriteriaList([StopAfterThree()])},
    "allowed": {"prefix_allowed_tokens_fn": lambda batch, tokens: [3, 4, 5]},
    "stop strings": {"stop_strings": ["a", "zz"], "tokenizer": tiny_tokenizer()},
    "remove invalid": {"remove_invalid_values": True, "renormalize_logits": True},
    "time": {"max_time": 100.0},
}
LOOP_CALLS = {
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "dynamic cache": {"cache_implementation": "dynamic"},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "positions": {"position_ids": torch.arange(PROMPT.shape[1])[None] * 2},
}


@pytest.mark.parametrize("name", [*SESSION_CALLS, *LOOP_CALLS])
def test_calls_equal_stock_in_the_engine_or_beside_it(model, stock, name):
    call = {"max_new_tokens": 6, **(SESSION_CALLS | LOOP_CALLS)[name]}
    before, answers, words = steps(model), [], []
    for each in (stock, model):
        torch.manual_seed(0)
        with heard() as said:
            answer = each.generate(PROMPT, **call)
        words.append(set(said))
        answers.append(answer if isinstance(answer, torch.Tensor) else answer.sequences)
    assert torch.equal(answers[0], answers[1])
    assert words[1] <= words[0]
    assert (steps(model) > before) == (name in SESSION_CALLS), "the wrong one ran it"


def test_settings_in_the_models_generation_config_are_followed(model, stock):
    stock_config = stock.generation_config
    try:
        for settings in ({"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "static"}):
            for each in (stock, model):
                each.generation_config = GenerationConfig(pad_token_id=0, disable_compile=True, **settings)
            expected = stock.generate(PROMPT, max_new_tokens=5)
            assert torch.equal(model.generate(PROMPT, max_new_tokens=5), expected), settings
    finally:
        stock.generation_config = stock_config


def test_mask_with_holes_and_empty_rows_go_through_the_loop(model, stock):
    mask = torch.ones_like(PROMPT)
    mask[0, 4] = 0
    before = steps(model)
    expected = stock.generate(PROMPT, attention_mask=mask, max_new_tokens=5)
    assert torch.equal(model.generate(PROMPT, attention_mask=mask, max_new_tokens=5), expected)
    assert steps(model) == before
    assert not torch.equal(expected, stock.generate(PROMPT, max_new_tokens=5))


@pytest.mark.parametrize("what", ["length", "seats", "budget"])
def test_calls_beyond_the_engines_limits_go_through_the_loop(stock, what):
    limits = {
        "length": {"max_model_len": 16},
        "seats": {"max_num_seqs": 2},
        "budget": {"enable_chunked_prefill": False, "max_num_batched_tokens": 4},
    }[what]
    model = paged(**limits)
    call = {"max_new_tokens": 8}
    if what == "seats":
        call |= {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    answer = model.generate(PROMPT, **call)
    assert torch.equal(answer, stock.generate(PROMPT, **call)) and steps(model) == 0


def test_autocast_goes_through_the_loop(model, stock):
    answers, before = [], steps(model)
    for each in (stock, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answers.append(each.generate(PROMPT, max_new_tokens=6))
    assert torch.equal(answers[0], answers[1]) and steps(model) == before


def test_embeddings_count_as_ids_do(model, stock):
    """huggingface/transformers PR#28994: `max_length` counted differently with `inputs_embeds`."""
    embeds = stock.get_input_embeddings()(PROMPT).detach()
    for each in (stock, model):
        tail = each.generate(inputs_embeds=embeds, max_new_tokens=7)
        assert tail[0].tolist() == stock.generate(PROMPT, max_new_tokens=7)[0, -7:].tolist()


def test_assistant_model(model, stock):
    assistant = tiny_model("llama", num_hidden_layers=1)
    expected = stock.generate(PROMPT, max_new_tokens=8)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=8, assistant_model=assistant), expected)


def test_own_decoding_loop(model, stock):
    def fixed(model, input_ids, **kwargs):
        return torch.cat([input_ids, torch.full_like(input_ids[:, :2], 77)], dim=1)

    for each in (stock, model):
        assert each.generate(PROMPT, custom_generate=fixed, max_new_tokens=3)[0, -2:].tolist() == [77, 77]


# --------------------------------------------------------------------------------------- results with their cache


def test_returned_cache_continues(model, stock):
    """huggingface/transformers#24841: the returned cache could not be given to the next call."""
    expected = stock.generate(PROMPT, max_new_tokens=15, return_dict_in_generate=True)
    tokens, cache = PROMPT, None
    for _ in range(3):
        given = {} if cache is None else {cache_argument(model): cache}
        output = model.generate(tokens, max_new_tokens=5, return_dict_in_generate=True, **given)
        assert isinstance(output, GenerateDecoderOnlyOutput)
        tokens, cache = output.sequences, output_cache(output)
        assert isinstance(cache, PagedCache) and cache.get_seq_length() == tokens.shape[1] - 1
    assert torch.equal(tokens, expected.sequences)
    for layer in range(2):
        theirs, ours = output_cache(expected).layers[layer], cache.layers[layer]
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)


def test_returned_cache_of_padded_rows_continues(model, stock):
    inputs = padded(ROWS)
    output = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], dim=1)
    again = model.generate(
        output.sequences, attention_mask=mask, max_new_tokens=5, **{cache_argument(model): output_cache(output)}
    )
    for row, prompt in zip(again, ROWS, strict=True):
        assert row[-9:].tolist() == stock.generate(torch.tensor([prompt]), max_new_tokens=9)[0, -9:].tolist()


def test_returned_cache_of_several_answers_has_a_row_for_each(model, stock):
    torch.manual_seed(0)
    output = model.generate(PROMPT, **SAMPLING, num_return_sequences=3, return_dict_in_generate=True)
    again = model.generate(output.sequences, max_new_tokens=4, **{cache_argument(model): output_cache(output)})
    assert torch.equal(again, stock.generate(output.sequences, max_new_tokens=4))


def test_cache_of_part_of_the_prompt_is_continued(model, stock):
    """huggingface/transformers#36151: a given cache led to an empty position and an IndexError."""
    expected = stock.generate(PROMPT, max_new_tokens=6)
    for cache in (PagedCache(model.config), transformers.DynamicCache()):
        given = {cache_argument(model): cache}
        with torch.no_grad():
            model(PROMPT[:, :6], use_cache=True, **given)
        assert torch.equal(model.generate(PROMPT, max_new_tokens=6, **given), expected)


# --------------------------------------------------------------------------------------- streaming


class Collector(transformers.generation.streamers.BaseStreamer):
    """Like TextStreamer: takes one row, the prompt first."""

    def __init__(self):
        self.tokens: list[int] = []
        self.puts = 0
        self.ended = 0

    def put(self, value):
        if value.ndim > 1 and value.shape[0] > 1:
            raise ValueError("TextStreamer only supports batch size 1")
        self.puts += 1
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("call", [{}, {"eos_token_id": "third"}, {"num_beams": 1, "no_repeat_ngram_size": 2}])
def test_streamer_gets_the_prompt_then_token_by_token(model, stock, call):
    call = {"max_new_tokens": 7, **filled(call, stock)}
    collectors = []
    for each in (stock, model):
        collectors.append(Collector())
        answer = each.generate(PROMPT, streamer=collectors[-1], **call)
        assert answer[0].tolist() == collectors[-1].tokens
    assert (collectors[0].puts, collectors[0].ended) == (collectors[1].puts, collectors[1].ended)


def test_text_streamer(model, capsys):
    streamer = transformers.TextStreamer(tiny_tokenizer(), skip_prompt=True)
    answer = model.generate(PROMPT, max_new_tokens=7, streamer=streamer)
    assert capsys.readouterr().out == tiny_tokenizer().decode(answer[0, PROMPT.shape[1] :]) + "\n"


def error_of(call) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011, B017 - compared with the other's
        call()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        {"inputs": PROMPT.repeat(2, 1), "streamer": "collector"},
        {"inputs": PROMPT, "streamer": "collector", "num_beams": 2},
        {"inputs": PROMPT, "do_sample": True, "temperature": 0.0},
        {"inputs": PROMPT, "do_sample": True, "temperature": -1.0},
        {"inputs": PROMPT, "num_return_sequences": 2},
        {"inputs": PROMPT, "max_length": PROMPT.shape[1]},
        {"inputs": PROMPT, "max_new_tokens": 0},
        {"inputs": PROMPT, "max_new_tokns": 5},
        {"inputs": PROMPT, "foo": 1, "bar": 2},
        {"inputs": PROMPT, "bad_words_ids": []},
        {"inputs": PROMPT, "bad_words_ids": [5]},
        {"inputs": PROMPT, "repetition_penalty": -1.0},
        {"inputs": PROMPT, "do_sample": True, "top_p": -0.5},
        {"inputs": PROMPT, "do_sample": True, "top_k": -3},
        {"inputs": PROMPT, "do_sample": True, "min_p": 2.0},
        {"inputs": PROMPT, "stop_strings": "a"},
        {"inputs": PROMPT, "input_ids": PROMPT},
        {"inputs": PROMPT, "attention_mask": torch.ones(1, 1, 10, 10)},
    ],
    ids=lambda call: ", ".join(f"{k}={v}" for k, v in call.items() if not isinstance(v, torch.Tensor)) or "tensors",
)
def test_wrong_calls_raise_what_transformers_raises(model, stock, call):
    def run(each):
        given = dict(call)
        if "streamer" in given:
            given["streamer"] = Collector()
        return each.generate(**given)

    theirs, ours = error_of(lambda: run(stock)), error_of(lambda: run(model))
    assert issubclass(ours[0], theirs[0])
    assert ours[1] == theirs[1] or (issubclass(ours[0], ValueError) and "`" in ours[1]), (theirs, ours)


def test_token_beyond_the_vocabulary_is_named(model):
    with pytest.raises(InvalidTokenError, match=r"`prompt_token_ids\[2\]` is 199, outside .* 199 tokens"):
        model.generate(torch.tensor([[5, 6, 7], [1, 2, 199]]))


# --------------------------------------------------------------------------------------- pipelines, chats


@pytest.fixture(scope="module")
def talker():
    return paged(overrides={"vocab_size": VOCAB_SIZE})


def pipe(model):
    return transformers.pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())


def test_pipeline_equals_stock(talker):
    texts = ["the hello", "and", "in on the other and on"]
    results = []
    for each in (tiny_model("llama", vocab_size=VOCAB_SIZE), talker):
        call = {"max_new_tokens": 5, "do_sample": False}
        results.append([pipe(each)(texts[0], **call), pipe(each)(texts, batch_size=2, **call)])
    assert results[0] == results[1]


def test_pipeline_keeps_several_answers_with_their_prompt(talker):
    """huggingface/transformers#15316: `batch_size` with `num_return_sequences` mixed up the prompts."""
    texts = ["the hello", "and", "in on the other and on", "o", "er"]
    results = pipe(talker)(texts, batch_size=2, num_return_sequences=3, do_sample=True, max_new_tokens=4)
    assert [len(result) for result in results] == [3] * 5
    for text, result in zip(texts, results, strict=True):
        assert all(answer["generated_text"].startswith(text) for answer in result)


def test_pipeline_honours_the_models_own_length(talker):
    try:
        talker.generation_config.max_new_tokens = 3
        (answer,) = pipe(talker)("the hello", return_tensors=True)
        assert len(answer["generated_token_ids"]) == len(tiny_tokenizer()("the hello")["input_ids"]) + 3
    finally:
        talker.generation_config.max_new_tokens = None


def test_chat_templates_output_is_taken_as_it_is(talker):
    """huggingface/transformers PR#42012: the template's return type changed and broke its callers."""
    chat = [{"role": "user", "content": "hello"}]
    tokenizer = tiny_tokenizer()
    encoding = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )  # fmt: skip
    first = talker.generate(**encoding, max_new_tokens=5)
    assert torch.equal(talker.generate(encoding["input_ids"], max_new_tokens=5), first)
    (result,) = talker.generate_batch([chat], tokenizer=tokenizer, max_new_tokens=5, progress_bar=False).values()
    assert result.prompt_ids + result.generated_tokens == first[0].tolist()
    assert EOS not in first[0, :1].tolist()


@pytest.mark.parametrize("shape", [(1, 0), (0, 4)])
@pytest.mark.parametrize("call", [{}, {"num_beams": 2}, {"output_scores": True, "return_dict_in_generate": True}])
def test_inputs_without_tokens_are_refused_as_in_transformers(model, stock, shape, call):
    for each in (stock, model):
        with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
            each.generate(torch.zeros(shape, dtype=torch.long), max_new_tokens=3, **call)


def test_mask_of_another_width_than_the_inputs_is_refused(model):
    with pytest.raises(ValueError, match="2 and 3 columns"):
        model.generate(torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 2, dtype=torch.long), max_new_tokens=3)


def test_beam_sampling_shows_a_streamer_the_prompt_as_in_transformers(model, stock):
    class Streamer(transformers.generation.BaseStreamer):
        def __init__(self):
            self.got = []

        def put(self, value):
            self.got.append(value.tolist())

        def end(self):
            self.got.append("end")

    streamers = [Streamer(), Streamer()]
    for each, streamer in zip((stock, model), streamers, strict=True):
        torch.manual_seed(0)
        each.generate(PROMPT, num_beams=2, do_sample=True, max_new_tokens=3, streamer=streamer)
    assert streamers[0].got == streamers[1].got != []


def test_aborted_rows_end_the_call(model):
    class Abort(transformers.generation.BaseStreamer):
        def put(self, value):
            model.engine.abort_all()

        def end(self):
            pass

    with pytest.raises(RequestAbortedError):
        model.generate(PROMPT, max_new_tokens=5, streamer=Abort())
