"""Transformers' text-generation pipeline with a paged model, and ours: the results of stock Transformers, exactly."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch
import transformers
from transformers import GenerationConfig
from transformers.pipelines.pt_utils import KeyDataset

import hf_paged
from hf_paged import AutoPagedModelForCausalLM, PagedConfig
from hf_paged.errors import (
    ConfigurationError,
    EngineClosedError,
    InvalidRequestError,
    InvalidTokenError,
    NotSupportedError,
    PromptTooLongError,
    RequestAbortedError,
    RowFailedError,
)
from hf_paged.generation.answer import RequestState
from hf_paged.generation.request import Request
from tests.families import tiny_model
from tests.paged_models import assert_idle
from tests.tokenizers_for_tests import EOS, VOCAB_SIZE, tiny_tokenizer

TEXTS = ["the and", "hello", "on the other", "an", "in the and hello on the"]
CHAT = [{"role": "user", "content": "hello there"}]
PREFILLED = [*CHAT, {"role": "assistant", "content": "and the"}]
CHATS = [CHAT, PREFILLED, [{"role": "system", "content": "on"}, *CHAT]]
GREEDY = {"do_sample": False, "max_new_tokens": 9}


def model(**overrides):
    made = tiny_model("llama", **{"vocab_size": VOCAB_SIZE, **overrides})
    made.generation_config.eos_token_id = EOS
    return made


def stock_pipeline(of=None, **kwargs):
    return transformers.pipeline("text-generation", model=of or model(), tokenizer=tiny_tokenizer(), **kwargs)


def paged_pipeline(of=None, *, paged_config=None, **kwargs):
    paged = AutoPagedModelForCausalLM.from_model(of or model(), paged_config=paged_config)
    return transformers.pipeline("text-generation", model=paged, tokenizer=tiny_tokenizer(), **kwargs)


def our_pipeline(of=None, **kwargs):
    return hf_paged.pipeline("text-generation", model=of or model(), tokenizer=tiny_tokenizer(), **kwargs)


DOORS = {"transformers": paged_pipeline, "hf_paged": our_pipeline}
_kept: dict[str, object] = {}


def kept(name):
    """A pipeline that many tests use as it is."""
    if name not in _kept:
        _kept[name] = stock_pipeline() if name == "stock" else DOORS[name]()
    return _kept[name]


@pytest.fixture(params=DOORS)
def door(request):
    """Both ways to a pipeline on a paged model."""
    return request.param


def same_as_stock(door, inputs, **kwargs):
    """Calls a pipeline with `inputs()` and compares with stock Transformers."""
    kwargs = {**GREEDY, **kwargs}
    expected, got = (kept(name)(inputs(), **kwargs) for name in ("stock", door))
    if not isinstance(inputs(), (str, list)):
        expected, got = list(expected), list(got)
    assert got == expected


# ---------------------------------------------------------------- the same results


class NoVowels(transformers.LogitsProcessor):
    """Forbids some tokens; sees the tokens of one row at a time, or of several."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 60:90] = -torch.inf
        return scores


class EndsAt(transformers.StoppingCriteria):
    """Ends a row at a number of tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 7)


INPUTS = {
    "a text": lambda: "the and",
    "a chat": lambda: CHAT,
    "a chat to be continued": lambda: PREFILLED,
    "texts": lambda: TEXTS,
    "chats": lambda: CHATS,
    "a generator of texts": lambda: (text for text in TEXTS),
    "a generator of chats": lambda: (chat for chat in CHATS),
    "a generator of messages": lambda: (message for message in PREFILLED),
    "a dataset": lambda: KeyDataset([{"text": text} for text in TEXTS], "text"),
    "a dataset of chats": lambda: KeyDataset([{"chat": chat} for chat in CHATS], "chat"),
}
SETTINGS = {
    "only new text": {"return_full_text": False},
    "full text": {"return_full_text": True},
    "token ids": {"return_tensors": True},
    "text": {"return_text": True},
    "a prefix": {"prefix": "the "},
    "a prefix within a length": {"prefix": "the ", "max_length": 28, "max_new_tokens": None},
    "long inputs": {"handle_long_generation": "hole"},
    "special tokens": {"skip_special_tokens": False},
    "tokenizer arguments": {"tokenizer_encode_kwargs": {"padding": "max_length", "max_length": 32}},
    "truncation": {"tokenizer_encode_kwargs": {"truncation": True, "max_length": 3}},
    "several ends": {"eos_token_id": [5, 40, 90, 130, 200]},
    "an end": {"stop_sequence": "e"},
    "no end before": {"eos_token_id": list(range(5, 150)), "min_new_tokens": 6},
    "a penalty": {"repetition_penalty": 1.4},
    "forbidden tokens": {"bad_words_ids": [[5], [9, 8]]},
    "forbidden n-grams": {"no_repeat_ngram_size": 1},
    "stop strings": {"stop_strings": ["e", "n"], "tokenizer": tiny_tokenizer()},
    "own processors": {"logits_processor": transformers.LogitsProcessorList([NoVowels()])},
    "own criteria": {"stopping_criteria": transformers.StoppingCriteriaList([EndsAt()])},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda row, tokens: list(range(30, 40 + len(tokens)))},
    "guidance": {"guidance_scale": 1.5},
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 3, "num_return_sequences": 2},
    "a time limit for each row": {"max_time": 1000.0},
    "a dictionary": {"return_dict_in_generate": True},
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_every_form_of_input(door, inputs, batch_size):
    same_as_stock(door, INPUTS[inputs], batch_size=batch_size)


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_setting(door, settings):
    same_as_stock(door, lambda: TEXTS, **SETTINGS[settings])


BY_GENERATE = ("tokenizer arguments", "beams", "several beams", "a time limit for each row", "a dictionary")


@pytest.mark.parametrize("settings", [name for name in SETTINGS if name not in BY_GENERATE])
def test_rows_are_requests_of_the_engine_whatever_is_set(settings, monkeypatch):
    pipe = kept("hf_paged")
    monkeypatch.setattr(pipe, "forward", None)
    assert not any(isinstance(row, RowFailedError) for row in pipe(TEXTS, **{**GREEDY, **SETTINGS[settings]}))


@pytest.mark.parametrize("settings", BY_GENERATE)
def test_other_rows_are_answered_by_generate_in_their_turn(settings, monkeypatch):
    pipe, calls = kept("hf_paged"), []
    forward = pipe.forward
    monkeypatch.setattr(pipe, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    for number, _ in enumerate(pipe(iter(TEXTS), **{**GREEDY, **SETTINGS[settings]})):
        assert len(calls) == number + 1


def test_more_answers_than_seats(door):
    pipe = DOORS[door](paged_config=PagedConfig(max_num_seqs=2))
    (answers,) = pipe(["the and"], num_return_sequences=5, do_sample=True, max_new_tokens=3)
    assert len(answers) == 5


def test_scores_come_with_the_texts(door):
    kwargs = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    for got, expected in zip(kept(door)(TEXTS, **kwargs), kept("stock")(TEXTS, **kwargs), strict=True):
        (got,), (expected,) = got, expected
        scores = torch.tensor(got.pop("scores")), torch.tensor(expected.pop("scores"))
        torch.testing.assert_close(*scores, atol=1e-4, rtol=0)  # as everywhere: operators sum in orders of their own
        assert got == expected


@pytest.mark.parametrize("continues", [True, False])
def test_the_last_message_is_continued_or_not(door, continues):
    same_as_stock(door, lambda: CHATS, continue_final_message=continues)
    same_as_stock(door, lambda: CHATS, continue_final_message=continues, return_full_text=False)


def test_batches_with_several_answers_are_not_mixed_up(door):
    """Reported as huggingface/transformers#15316."""
    settings = {"do_sample": True, "max_new_tokens": 5, "num_return_sequences": 3, "batch_size": 2}
    results = kept(door)(TEXTS, **settings)
    assert [len(answers) for answers in results] == [3] * len(TEXTS)
    for text, answers in zip(TEXTS, results, strict=True):
        assert all(answer["generated_text"].startswith(text) for answer in answers)
        assert len({answer["generated_text"] for answer in answers}) > 1
    same_as_stock(door, lambda: TEXTS, **{**settings, "do_sample": False, "num_beams": 3})


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)), ids=str)
def test_arguments_come_before_a_configuration_before_the_models_before_defaults(door, given, monkeypatch):
    """Reported as huggingface/transformers#47752."""
    in_call, in_config, in_model = given
    ends = [EOS, 40]
    sources = [
        (in_call, {"max_new_tokens": 3, "do_sample": False, "eos_token_id": ends}),
        (in_config, {"max_new_tokens": 5, "do_sample": True, "eos_token_id": EOS}),
        (in_model, {"max_new_tokens": 7, "do_sample": False, "eos_token_id": [EOS, 50]}),
        (True, {"max_new_tokens": 256, "do_sample": True, "eos_token_id": EOS}),
    ]
    first = next(values for is_given, values in sources if is_given)
    paged = model()
    if in_model:
        paged.generation_config.update(**sources[2][1])
    kwargs = dict(sources[0][1]) if in_call else {}
    if in_config:
        kwargs["generation_config"] = GenerationConfig(**sources[1][1])
    pipe = DOORS[door](paged)
    seen = []
    engine = pipe.model.engine
    add_request = engine.add_request
    monkeypatch.setattr(engine, "add_request", lambda *a, **k: seen.append(a[1]) or add_request(*a, **k))
    pipe(["the and"], **kwargs)
    (params,) = seen
    assert params.max_tokens == first["max_new_tokens"]
    assert (params.temperature > 0) == first["do_sample"]
    wanted = first["eos_token_id"]
    assert sorted(params.stop_token_ids) == sorted(wanted if isinstance(wanted, list) else [wanted])


@pytest.mark.parametrize("place", ["generation_config", "model", "call"])
def test_any_of_several_ends_stops(door, place):
    """Reported as huggingface/open-r1#663."""
    free = kept("stock")("the and", return_tensors=True, **GREEDY)[0]["generated_token_ids"]
    end = free[-4]
    paged, settings = model(), dict(GREEDY)
    if place == "model":
        paged.generation_config.eos_token_id = [EOS, end]
    elif place == "call":
        settings["eos_token_id"] = [EOS, end]
    else:
        settings = {"generation_config": GenerationConfig(**GREEDY, eos_token_id=[EOS, end])}
    for inputs in ("the and", ["the and"]):
        result = DOORS[door](copy.deepcopy(paged))(inputs, return_tensors=True, **settings)
        (answer,) = result if isinstance(inputs, str) else result[0]
        assert answer["generated_token_ids"] == free[: free.index(end, 2) + 1]


def test_settings_of_the_pipeline_hold_for_every_call_and_a_call_may_change_them(door):
    stock, paged = stock_pipeline(**GREEDY, return_full_text=False), DOORS[door](**GREEDY, return_full_text=False)
    assert paged(TEXTS) == stock(TEXTS)
    assert paged(TEXTS, max_new_tokens=3, return_full_text=True) == stock(
        TEXTS, max_new_tokens=3, return_full_text=True
    )
    assert paged(TEXTS) == stock(TEXTS)


def test_sampling_repeats_with_torchs_seed(door):
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(kept(door)(TEXTS, max_new_tokens=8, do_sample=True))
    assert runs[0] == runs[1] != runs[2]


def test_no_thread_is_left_behind_by_errors(door):
    pipe, before = DOORS[door](), threading.active_count()
    for bad, kwargs in (
        (CHAT, {"tokenizer_encode_kwargs": {"chat_template": "{{ raise_exception('no') }}"}}),
        ("the and", {"max_new_tokens": -3}),
        (3, {}),
    ):
        with pytest.raises(Exception):  # noqa: B017 - whatever Transformers raises
            pipe(bad, **kwargs)
    assert threading.active_count() == before
    assert_idle(pipe.model.engine)


def test_the_real_model_answers_as_stock(door, real_model_path, real_model, real_tokenizer):
    if "real stock" not in _kept:
        stock = transformers.AutoModelForCausalLM.from_pretrained(real_model_path, dtype=torch.float32)
        _kept["real stock"] = transformers.pipeline("text-generation", model=stock, tokenizer=real_tokenizer)
    make = transformers.pipeline if door == "transformers" else hf_paged.pipeline
    paged = make("text-generation", model=real_model, tokenizer=real_tokenizer)
    question = [{"role": "user", "content": "Name a colour."}]
    rows = [question, [*question, {"role": "assistant", "content": "My favourite is"}]]
    for inputs in (["The sea is", "Water boils at", "One, two, three,"], rows, rows[0]):
        settings = {"do_sample": False, "max_new_tokens": 8, "batch_size": 2}
        assert paged(inputs, **settings) == _kept["real stock"](inputs, **settings)


# ---------------------------------------------------------------- iterables of any length


def numbered(count):
    """Texts of different lengths, and how many of them were taken so far."""
    taken = []

    def rows():
        for number in range(count):
            taken.append(number)
            yield "the " * (number % 5) + str(number)

    return rows(), taken


def test_rows_run_together_in_order_and_are_drawn_as_places_get_free(monkeypatch):
    pipe = our_pipeline(paged_config=PagedConfig(max_num_seqs=4), max_in_flight=6)
    engine, most = pipe.model.engine, []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: most.append(len(engine.live.states)) or step())
    rows, taken = numbered(40)
    results = pipe(rows, **GREEDY, return_full_text=True)
    assert len(taken) == 1, "only the first row is looked at before the results are asked for"
    for number, (answer,) in enumerate(results):
        assert answer["generated_text"].startswith("the " * (number % 5) + str(number))
        assert len(taken) <= number + 6
    assert number == 39 and max(most) == 6
    assert engine.stats().peak_running == 4
    assert_idle(engine)


def test_nothing_is_kept_of_rows_that_were_handed_out():
    def alive():
        gc.collect()
        kinds = (RequestState, Request, torch.Tensor)
        return [sum(type(one) is kind for one in gc.get_objects()) for kind in kinds]

    pipe = our_pipeline(max_in_flight=8)
    before = alive()  # what other tests have left
    counts = [alive() for number, _ in enumerate(pipe(numbered(120)[0], **GREEDY)) if number in (30, 110)]
    assert counts[0][:2] == counts[1][:2]
    assert max(now - then for now, then in zip(counts[0][:2], before[:2], strict=True)) <= 8
    assert counts[1][2] <= counts[0][2] + 8


def test_a_call_may_have_its_own_bound():
    pipe = our_pipeline()
    rows, taken = numbered(30)
    next(pipe(rows, **GREEDY, max_in_flight=3))
    assert len(taken) == 3
    rows, taken = numbered(1000)
    next(pipe(rows, **GREEDY))
    assert len(taken) == 4 * pipe.model.engine.plan.max_num_seqs


@pytest.mark.parametrize("bound", [0, -1, True, 2.5, "3"])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(ConfigurationError, match="max_in_flight"):
        our_pipeline(max_in_flight=bound)
    with pytest.raises(ConfigurationError, match="max_in_flight"):
        kept("hf_paged")(TEXTS, max_in_flight=bound)


def test_results_have_a_length_where_the_inputs_have_one():
    from tqdm import tqdm

    pipe = kept("hf_paged")
    results = pipe(KeyDataset([{"text": text} for text in TEXTS], "text"), **GREEDY)
    assert len(results) == len(TEXTS) and tqdm(results, disable=True).total == len(TEXTS)
    assert list(results) == list(results) == pipe(TEXTS, **GREEDY), "each pass is a pass over the dataset"
    assert not hasattr(pipe(iter(TEXTS), **GREEDY), "__len__")


@pytest.mark.parametrize(
    "inputs",
    [tuple, iter, dict.fromkeys, lambda texts: map(str, texts), lambda texts: {"a": 1, **dict.fromkeys(texts)}.keys()],
)
def test_any_iterable_will_do(inputs):
    pipe = kept("hf_paged")
    given = inputs(TEXTS)
    if isinstance(given, dict):
        with pytest.raises(TypeError):
            pipe(given)
        return
    expected = pipe([str(text) for text in inputs(TEXTS)], **GREEDY)
    assert list(pipe(given, **GREEDY)) == expected


def test_nothing_gives_nothing():
    pipe = kept("hf_paged")
    assert pipe([]) == [] and list(pipe(iter([]))) == [] and list(pipe(text for text in ())) == []


def test_a_dataset_of_the_datasets_package():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": TEXTS, "chat": [CHAT, PREFILLED, CHAT, CHAT, PREFILLED]})
    ours, stock = kept("hf_paged"), kept("stock")
    assert list(ours(KeyDataset(data, "text"), **GREEDY)) == stock(TEXTS, **GREEDY)
    assert list(ours(KeyDataset(data, "chat"), **GREEDY)) == stock(list(data["chat"]), **GREEDY)
    assert list(ours(data["text"], **GREEDY)) == stock(TEXTS, **GREEDY)
    stream = data.to_iterable_dataset()
    assert list(ours((row["text"] for row in stream), **GREEDY)) == stock(TEXTS, **GREEDY)
    refused = list(ours(data, **GREEDY))
    assert all("KeyDataset" in str(row) for row in refused) and len(refused) == len(TEXTS)


# ---------------------------------------------------------------- bad rows

TOO_LONG = "z " * 600
BAD_ROWS = {
    "a number": (3, InvalidRequestError),
    "nothing": (None, InvalidRequestError),
    "bytes": (b"the", InvalidRequestError),
    "an empty chat": ([], InvalidRequestError),
    "a chat without contents": ([{"role": "user"}], InvalidRequestError),
    "an empty text": ("", ValueError),
    "a long text": (TOO_LONG, PromptTooLongError),
    "a chat that the template refuses": ([{"role": "villain", "content": "x"}], Exception),
    "a text that the tokenizer refuses": ("\ud800", Exception),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_bad_row_is_an_error_in_its_place(bad):
    row, kind = BAD_ROWS[bad]
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'villain' %}{{ raise_exception('no villains') }}{% endif %}"
        + tokenizer.chat_template.split("%}", 1)[1].replace("message.", "m.")
    )
    pipe = hf_paged.pipeline("text-generation", model=model(), tokenizer=tokenizer)
    good = pipe(TEXTS, **GREEDY)
    for results in (
        pipe([*TEXTS[:2], row, *TEXTS[2:]], **GREEDY),
        list(pipe(iter([*TEXTS[:2], row, *TEXTS[2:]]), **GREEDY)),
    ):
        error = results.pop(2)
        assert results == good
        assert isinstance(error, RowFailedError) and error.index == 2
        assert isinstance(error.cause, kind) and error.__cause__ is error.cause
        assert str(error.cause) in str(error) and "Row 2" in str(error)
    assert_idle(pipe.model.engine)


def test_a_token_outside_of_the_vocabulary_fails_its_row_alone():
    pipe = our_pipeline(model(vocab_size=VOCAB_SIZE - 15))  # the tokenizer's last tokens are too many for the model
    results = pipe(["x", "the", "y"], **GREEDY)
    assert isinstance(results[1].cause, InvalidTokenError)
    assert results[0] == pipe("x", **GREEDY) and results[2] == pipe("y", **GREEDY)


def test_a_failing_step_fails_its_rows():
    pipe, calls = our_pipeline(max_in_flight=1), itertools.count()

    def fail_once(*_):
        if next(calls) == 12:
            raise RuntimeError("the device is gone")

    pipe.model.model.layers[0].register_forward_pre_hook(fail_once)
    results = pipe(TEXTS, **GREEDY)
    assert [isinstance(row, RowFailedError) for row in results] == [False, True, False, False, False]
    assert "the device is gone" in str(results[1])


def test_an_error_object_survives_pickle():
    error = pickle.loads(pickle.dumps(RowFailedError(3, ValueError("x"))))
    assert error.index == 3 and str(error) == str(RowFailedError(3, ValueError("x")))


def test_failed_rows_do_not_keep_what_they_were_made_of():
    class Text(str):
        pass

    pipe = kept("hf_paged")
    text = Text("z " * 600)
    gone = weakref.ref(text)
    errors = [pipe([text], **GREEDY)[0]]
    del text
    gc.collect()
    assert isinstance(errors[0], RowFailedError) and gone() is None


@pytest.mark.parametrize("settings", [{"max_new_tokens": -2}, {"nonsense": 3}, {"handle_long_generation": "x"}])
def test_settings_that_suit_no_row_are_refused_at_once(settings):
    rows, taken = numbered(5)
    with pytest.raises(ValueError):
        kept("stock")(TEXTS, **settings)
    with pytest.raises(ValueError):
        kept("hf_paged")(rows, **settings)
    assert len(taken) <= 1


# ---------------------------------------------------------------- ends of an iteration


def test_an_iterator_that_is_let_go_ends_what_is_in_flight():
    pipe = our_pipeline(max_in_flight=8)
    rows, _ = numbered(50)
    results = pipe(rows, **GREEDY)
    for number, _ in enumerate(results):
        if number == 2:
            break
    assert pipe.model.engine.has_unfinished
    del results
    assert_idle(pipe.model.engine)
    rows, _ = numbered(50)
    results = pipe(rows, **GREEDY)
    next(results)
    results.close()
    assert_idle(pipe.model.engine)
    assert list(results) == []


def test_what_the_inputs_raise_comes_after_the_results_before_it():
    def rows():
        yield from TEXTS[:3]
        raise OSError("the disk is gone")

    pipe, got = kept("hf_paged"), []
    with pytest.raises(OSError, match="the disk is gone"):
        for result in pipe(rows(), **GREEDY):
            got.append(result)
    assert got == pipe(TEXTS[:3], **GREEDY)
    assert_idle(pipe.model.engine)


def test_a_closed_engine_ends_the_iteration():
    pipe = our_pipeline(max_in_flight=2)
    results = pipe(numbered(50)[0], **GREEDY)
    next(results)
    pipe.model.engine.close()
    with pytest.raises(EngineClosedError):
        list(results)


def test_a_request_that_somebody_aborts_is_an_error_in_its_place():
    pipe = our_pipeline(max_in_flight=3, paged_config=PagedConfig(max_num_seqs=1))
    results = pipe(iter(TEXTS), **GREEDY)
    first = next(results)
    pipe.model.engine.abort_all()
    rest = list(results)
    assert [isinstance(row, RowFailedError) for row in rest] == [True, True, False, False]
    assert isinstance(rest[0].cause, RequestAbortedError)
    assert [first, *rest[2:]] == pipe([TEXTS[0], *TEXTS[3:]], **GREEDY)


def test_a_short_queue_is_waited_for():
    pipe = our_pipeline(paged_config=PagedConfig(max_queue_size=1, max_num_seqs=4))
    assert pipe(TEXTS, **GREEDY) == kept("stock")(TEXTS, **GREEDY)
    assert pipe.model.engine.stats().peak_running > 1
    others = [pipe.model.engine.add_request([5, 6, 7])]
    assert pipe(TEXTS, **GREEDY) == kept("stock")(TEXTS, **GREEDY)
    pipe.model.engine.abort_all(others)


def test_iterations_and_other_calls_overlap():
    pipe, expected = our_pipeline(max_in_flight=3), kept("stock")(TEXTS, **GREEDY)
    first, second = pipe(iter(TEXTS), **GREEDY), pipe(iter(TEXTS), **GREEDY)
    pairs = []
    for pair in zip(first, second, strict=True):
        pairs.append(pair)
        assert pipe(TEXTS[0], **GREEDY) == expected[0]
    assert pairs == [(row, row) for row in expected]
    results = {}

    def run(name):
        results[name] = pipe(TEXTS, **GREEDY)

    threads = [threading.Thread(target=run, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(3), expected)


# ---------------------------------------------------------------- models


def test_a_model_may_be_a_name(tmp_path):
    model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pipe = hf_paged.pipeline(model=str(tmp_path), dtype=torch.float32, paged_config=PagedConfig(max_num_seqs=3))
    assert pipe(TEXTS, **GREEDY) == kept("stock")(TEXTS, **GREEDY)
    assert pipe.model.engine.plan.max_num_seqs == 3
    named = hf_paged.pipeline("text-generation", tmp_path, tokenizer=str(tmp_path), model_kwargs={"dtype": "bfloat16"})
    assert named.model.dtype == torch.bfloat16
    assert hf_paged.pipeline(model=tmp_path, torch_dtype=torch.float16).model.dtype == torch.float16


def test_a_model_that_is_paged_stays_as_it_is():
    paged = AutoPagedModelForCausalLM.from_model(model(), paged_config=PagedConfig(max_num_seqs=5))
    engine = paged.engine
    assert our_pipeline(paged).model.engine is engine


def test_a_model_that_the_engine_cannot_run_answers_row_by_row():
    config = transformers.MambaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0, eos_token_id=EOS
    )
    torch.manual_seed(0)
    mamba = transformers.MambaForCausalLM(config).eval()
    expected = stock_pipeline(copy.deepcopy(mamba))(TEXTS, **GREEDY)
    pipe = our_pipeline(mamba)
    assert pipe(TEXTS, **GREEDY) == expected
    rows, taken = numbered(10)
    next(pipe(rows, **GREEDY))
    assert len(taken) == 1


def test_adapters():
    peft = pytest.importorskip("peft")

    def tuned(config):
        torch.manual_seed(3)
        return peft.get_peft_model(model(), config).eval()

    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    soft = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    plain = kept("stock")(TEXTS, **GREEDY)
    for config in (lora, soft):
        expected = stock_pipeline(tuned(config))(TEXTS, **GREEDY)
        pipe = our_pipeline(tuned(config))
        assert pipe(TEXTS, **GREEDY) == expected != plain
        if config is lora:
            assert pipe.model.get_base_model().engine.stats().num_generated_tokens > 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"task": "translation"}, NotSupportedError),
        ({"model": None}, ConfigurationError),
        ({"tokenizer": None}, ConfigurationError),
        ({"paged_config": {"max_num_seqs": 3}}, ConfigurationError),
    ],
)
def test_arguments_that_make_no_pipeline_are_refused(arguments, error):
    arguments = {"task": "text-generation", "model": model(), "tokenizer": tiny_tokenizer(), **arguments}
    with pytest.raises(error):
        hf_paged.pipeline(**arguments)


def test_the_name_stays_a_function_when_the_module_is_imported():
    import hf_paged.pipelines

    assert callable(hf_paged.pipeline) and hf_paged.pipeline is hf_paged.pipelines.pipeline
