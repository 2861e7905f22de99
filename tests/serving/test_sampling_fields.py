"""Every field of a request reaches the sampler, or is refused by name; what is not given is the model's own default."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_paged import DeadlineExceededError, SamplingParams
from hf_paged.serving.protocol import common
from hf_paged.serving.protocol.openai import ChatCompletionRequest, CompletionRequest
from hf_paged.serving.service import Prompt, RequestContext
from tests.serving.servers import chat

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VALUES = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": -3,
    "stop": ["zz"],
    "stop_token_ids": [5],
    "bad_words": ["bad"],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "max_tokens": 6,
    "skip_special_tokens": False,
    "logit_bias": {"7": 1.5},
    "allowed_token_ids": [7, 8, 9],
    "prompt_logprobs": 1,
}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hello", "max_tokens": 4, **fields}


def text(client: Any, **fields: Any) -> str:
    response = client.post(COMPLETIONS, json=completion(**fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.fixture
def submitted(client, monkeypatch):
    """The parameters and contexts with which requests reach the engine."""
    service = client.app.state.service
    submit, seen = type(service).submit, []

    def record(self, prompt, params, context, **options):
        seen.append((params, context))
        return submit(self, prompt, params, context, **options)

    monkeypatch.setattr(type(service), "submit", record)
    return seen


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_reach_the_engine_and_others_stay_open(client, submitted, path):
    body = chat() if path == CHAT else completion()
    assert client.post(path, json=body | VALUES).status_code == 200
    assert client.post(path, json=body).status_code == 200
    (full, _), (bare, _) = submitted
    expected = VALUES | {"stop": ("zz",), "stop_token_ids": (5,), "bad_words": ("bad",), "logit_bias": {7: 1.5}}
    expected["allowed_token_ids"] = (7, 8, 9)
    for name, value in expected.items():
        assert getattr(full, name) == value, name
    # All others come from the model's generation configuration when the request is added.
    assert not bare.explicit & {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "n"}


def test_the_context_of_a_request_comes_from_its_body(client, submitted):
    body = chat(priority=-4, cache_salt="s", request_id="r-1", request_timeout=30)
    assert client.post(CHAT, json=body).status_code == 200
    [(_, context)] = submitted
    assert (context.request_id, context.priority, context.cache_salt) == ("chatcmpl-r-1", -4, "s")
    assert context.deadline == 30


@pytest.mark.parametrize(("path", "model"), [(CHAT, ChatCompletionRequest), (COMPLETIONS, CompletionRequest)])
def test_null_is_the_default_of_every_optional_field(client, path, model):
    body = chat() if path == CHAT else completion()
    nothing = {name: None for name, field in model.model_fields.items() if not field.is_required()}
    del nothing["prompt" if path == COMPLETIONS else "tools"]
    response = client.post(path, json=nothing | {"messages": body.get("messages"), "prompt": body.get("prompt")})
    assert response.status_code == 200, response.text
    for name in nothing:
        model.model_validate(body | {name: None})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": "two"}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 10**300}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"191222": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [600]}, "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [600]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 601}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 2**31}, "min_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**70}, "prompt"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": "a\r\nb"}, "request_id"),
        ({"priority": 2**40}, "priority"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"stream_options": 5}, "stream_options"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(client, fields, param):
    response = client.post(COMPLETIONS, json=completion(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and f"`{param}" in error["message"] and len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(client, value):
    for name in ("temperature", "top_p", "presence_penalty", "repetition_penalty", "min_p", "request_timeout"):
        body = json.dumps(completion(**{name: 0})).replace(f'"{name}": 0', f'"{name}": {value}')
        response = client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and response.json()["error"]["param"] in (name, None)


def test_numbers_may_be_texts_and_whole_floats_but_not_truth_values(client, submitted):
    for one in ("1", 1.0):
        response = client.post(COMPLETIONS, json=completion(min_tokens=one, n=one, priority=one, top_k=one))
        assert response.status_code == 200, response.text
        response = client.post(CHAT, json=chat(max_completion_tokens=one, logprobs=True, top_logprobs=one))
        assert response.status_code == 200, response.text
        assert client.post("/v1/responses", json={"input": "x", "max_output_tokens": one}).status_code == 200
    assert {params.min_tokens for params, _ in submitted[::3]} == {1}


@pytest.mark.parametrize(
    "name",
    [
        *(name for name, value in VALUES.items() if isinstance(value, (int, float)) and not isinstance(value, bool)),
        *("best_of", "priority", "request_timeout", "truncate_prompt_tokens"),
    ],
)
def test_truth_values_are_no_numbers(client, name):
    error = client.post(COMPLETIONS, json=completion(**{name: True})).json()["error"]
    assert error["param"] == name and "a number is needed, not True" in error["message"]


def test_more_answers_than_can_run_at_a_time_are_refused(make_client):
    client = make_client(max_num_seqs=3, max_logprobs=2)
    assert client.post(COMPLETIONS, json=completion(n=3)).status_code == 200
    error = client.post(COMPLETIONS, json=completion(n=4)).json()["error"]
    assert error["param"] == "n" and "3" in error["message"]
    assert client.post(COMPLETIONS, json=completion(logprobs=2)).status_code == 200
    assert client.post(COMPLETIONS, json=completion(logprobs=3)).json()["error"]["param"] == "logprobs"
    assert client.post(CHAT, json=chat(logprobs=True, top_logprobs=3)).json()["error"]["param"] == "top_logprobs"


def test_three_spellings_of_no_top_k_are_one(client):
    texts = {text(client, top_k=value, seed=3, max_tokens=12) for value in (0, -1, None)}
    assert len(texts) == 1 and texts != {text(client, top_k=1, max_tokens=12)}


def test_top_k_of_one_and_no_temperature_are_greedy(client):
    assert len({text(client, top_k=1, temperature=2, max_tokens=12) for _ in range(3)}) == 1
    assert text(client, top_k=1, temperature=2, max_tokens=12) == text(client, temperature=0, max_tokens=12)


def test_defaults_are_those_of_the_models_generation_configuration(client, monkeypatch):
    config = client.app.state.service.engine.model.generation_config
    plain = text(client, temperature=0, max_tokens=40, ignore_eos=True, presence_penalty=0)
    monkeypatch.setattr(config, "repetition_penalty", 1.9)
    penalized = text(client, temperature=0, max_tokens=40, ignore_eos=True)
    assert penalized == text(client, temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.9) != plain
    assert text(client, temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.0) == plain
    monkeypatch.setattr(config, "max_new_tokens", 5)
    body = chat(max_tokens=None, ignore_eos=True)
    assert client.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 5
    for path, limit in ((CHAT, 9), (CHAT, 10**6), (COMPLETIONS, 9), (COMPLETIONS, None)):
        given = (chat() if path == CHAT else completion()) | {"max_tokens": limit, "ignore_eos": True}
        assert client.post(path, json=given).json()["usage"]["completion_tokens"] == 5, "it is a cap, as in vLLM"
    assert client.post(CHAT, json=body | {"max_tokens": 2}).json()["usage"]["completion_tokens"] == 2


def test_biases_name_tokens_by_strings(client):
    tokens = client.app.state.service.tokenizer("x")["input_ids"]
    assert text(client, logit_bias={str(tokens[0]): 100}, temperature=0) == "xxxx"


@pytest.mark.parametrize("stop", ["xx", ["never", "xx"]])
def test_stop_strings_end_answers_before_themselves(client, stop):
    token = client.app.state.service.tokenizer("x")["input_ids"][0]
    body = completion(stop=stop, logit_bias={str(token): 100}, temperature=0, max_tokens=9)
    [choice] = client.post(COMPLETIONS, json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "xx")
    [choice] = client.post(COMPLETIONS, json=body | {"include_stop_str_in_output": True}).json()["choices"]
    assert choice["text"] == "xx"


def test_a_request_may_ask_for_less_time_than_there_is(client):
    response = client.post(COMPLETIONS, json=completion(request_timeout=1e-6, max_tokens=4000, ignore_eos=True))
    assert response.status_code == 408 and response.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_time_that_a_grammar_takes_counts(client, monkeypatch, path):
    monkeypatch.setattr(type(client.app.state.service.engine.engine.grammars), "submit", lambda *_: Future())
    fields = {"request_timeout": 0.05, "structured_outputs": {"regex": "never compiled"}}
    response = client.post(path, json=(chat() if path == CHAT else completion()) | fields)
    assert response.status_code == 408 and "0.05 s" in response.json()["error"]["message"]


def test_time_before_the_engine_has_a_request_counts(client, submitted):
    context = RequestContext("x", deadline=10.0, arrived=time.monotonic() - 11)
    service = client.app.state.service

    async def late():
        async for _ in service.submit(Prompt([5]), SamplingParams(max_tokens=1900, ignore_eos=True), context):
            pass

    with pytest.raises(DeadlineExceededError, match="within 10 s"):
        client.portal.call(late)


def test_unknown_fields_of_objects_within_are_noted_too(client, caplog, monkeypatch):
    monkeypatch.setattr(common, "_noted", set())
    caplog.set_level(logging.INFO, logger=common.__name__)
    options = {"include_usag": True}
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}, "x": 1}}
    response = client.post(CHAT, json=chat(stream=True, stream_options=options, response_format=form))
    assert response.status_code == 200
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "StreamOptions" in told[0] and "`include_usage`" in told[0] and "'x'" in told[1]


def test_unknown_fields_have_no_effect_and_are_noted_once(client, caplog, monkeypatch):
    monkeypatch.setattr(common, "_noted", set())
    caplog.set_level(logging.INFO, logger=common.__name__)
    for _ in range(3):
        assert text(client, temprature=3, temperature=0, litellm_call={"x": 1}) == text(client, temperature=0)
    told = sorted(record.getMessage() for record in caplog.records)
    assert len(told) == 2 and "'litellm_call'" in told[0] and "did its sender mean `temperature`?" in told[1]
    for i in range(2000):
        common._note_unknown_field(CompletionRequest, f"x{i}\n")
    assert len(common._noted) <= 1000 and "\n" not in caplog.records[-1].getMessage()


_NUMBERS = st.one_of(st.integers(-3, 700), st.floats(-3, 3), st.sampled_from([2**31, -(2**31), 2**64, 0, 1]))
_ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=4,
)


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    likely=st.dictionaries(st.sampled_from(sorted(VALUES)), _NUMBERS, max_size=5),
    odd=st.dictionaries(st.sampled_from(sorted(ChatCompletionRequest.model_fields)), _ANY, max_size=2),
    names=st.lists(st.sampled_from(sorted(VALUES)), max_size=8),
)
def test_no_combination_of_fields_breaks_the_server(client, likely, odd, names):
    fields = {name: VALUES[name] for name in names} | likely | odd
    for path, body in ((CHAT, chat(max_tokens=3)), (COMPLETIONS, completion(max_tokens=3))):
        response = client.post(path, json=body | {"stream": False} | fields)
        assert response.status_code in (200, 400, 404, 408), response.text
