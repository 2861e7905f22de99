"""Completions in OpenAI's form: texts and token ids, echoed prompts with the scores that evaluation tools read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from openai.types import Completion

from hf_paged import SamplingParams
from hf_paged.errors import DeadlineExceededError, RequestAbortedError
from tests.serving.events import assert_alike, events_of, joined_completion
from tests.serving.servers import wait_until

PATH = "/v1/completions"


def completion(prompt: Any = "Hello world", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}


def answer(client: Any, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    if not body.get("echo"):  # the client's types know no missing log-probability, which a first token has
        Completion.model_validate(response.json(), strict=True)
    return response.json()


def stream(client: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = client.post(PATH, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return events_of(response.text)


def refusal(client: Any, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    response = client.post(PATH, json=body)
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_an_answer_has_the_tokens_that_the_engine_gives_offline(client):
    service = client.app.state.service
    tokens = service.tokenizer("Hello world")["input_ids"]
    [output] = service.engine.engine.generate([tokens], SamplingParams(max_tokens=20, temperature=0))
    reply = answer(client, completion(max_tokens=20, return_token_ids=True))
    [choice] = reply["choices"]
    assert choice["text"] == output.outputs[0].text and choice["token_ids"] == output.outputs[0].token_ids
    assert choice["prompt_token_ids"] == tokens
    assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    assert answer(client, completion(tokens, max_tokens=20))["choices"][0]["text"] == choice["text"]


def test_sixteen_tokens_are_the_default(client):
    reply = answer(client, completion(max_tokens=None, ignore_eos=True))
    assert reply["usage"]["completion_tokens"] == 16 and reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompts", [["Hello", "a longer text", "x"], [[74, 75], [80], [81, 82, 83]]])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1, "seed": 4}, {"logprobs": 2}, {"echo": True}])
def test_several_prompts_are_answered_in_order(client, prompts, fields):
    fields = {"ignore_eos": True, **fields}
    reply = answer(client, completion(prompts, **fields))
    n = fields.get("n", 1)
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(prompts) * n))
    for place, prompt in enumerate(prompts):
        alone = answer(client, completion(prompt, **fields))["choices"]
        told = [choice["text"] for choice in reply["choices"][place * n : (place + 1) * n]]
        assert told == [choice["text"] for choice in alone]
    assert reply["usage"]["completion_tokens"] == 8 * len(prompts) * n
    chunks = stream(client, completion(prompts, stream_options={"include_usage": True}, **fields))
    for index, whole in joined_completion(chunks).items():
        assert_alike(whole, {name: reply["choices"][index][name] for name in whole})
    assert chunks[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in chunks[:-1])
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == reply["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == reply["usage"]["prompt_tokens"]


def _model_logprobs(client: Any, tokens: list[int]) -> torch.Tensor:
    model = client.app.state.service.engine.model
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echoed_prompt_has_the_log_probabilities_of_the_model(client, max_tokens):
    reply = answer(client, completion(max_tokens=max_tokens, echo=True, logprobs=2, return_token_ids=True))
    [choice] = reply["choices"]
    tokens = [*choice["prompt_token_ids"], *choice["token_ids"]]
    logprobs = choice["logprobs"]
    assert len(choice["token_ids"]) == reply["usage"]["completion_tokens"] == max_tokens
    assert {len(values) for values in logprobs.values()} == {len(tokens)}
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = _model_logprobs(client, tokens)
    for place, token in enumerate(tokens[1:], 1):
        value = logprobs["token_logprobs"][place]
        assert math.isclose(value, expected[place - 1, token], abs_tol=1e-4)
        top = logprobs["top_logprobs"][place]
        assert top[logprobs["tokens"][place]] == value and len(top) in (2, 3)
        assert math.isclose(max(top.values()), expected[place - 1].max(), abs_tol=1e-4)
    assert choice["text"] == "".join(logprobs["tokens"])
    for text, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][start:].startswith(text)


def test_no_chunk_is_without_news(client):
    body = completion(structured_outputs={"choice": ["\u6f22\u5b57"]}, max_tokens=50)
    *texts, last = [chunk["choices"][0] for chunk in stream(client, body)]
    assert [choice["text"] for choice in texts] + [last["text"]] in (["\u6f22", "\u5b57", ""], ["\u6f22", "\u5b57"])
    assert last["finish_reason"] == "stop" and not any(choice["finish_reason"] for choice in texts)


def test_a_streamed_echo_is_the_whole_one(client):
    body = completion(echo=True, logprobs=1)
    [choice] = answer(client, body)["choices"]
    told = joined_completion(stream(client, body))[0]
    assert_alike(told, {name: choice[name] for name in told})
    assert told["text"].startswith("Hello world")


def test_an_echo_without_answer_needs_no_log_probabilities(client):
    reply = answer(client, completion(max_tokens=0, echo=True))
    assert reply["choices"][0]["text"] == "Hello world" and reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    assert answer(client, completion([42, 491, 81], max_tokens=0, echo=True))["choices"][0]["text"] == "Hello"
    assert joined_completion(stream(client, completion(max_tokens=0, echo=True)))[0]["text"] == "Hello world"


def test_log_probabilities_are_numbers_even_of_what_cannot_come(client):
    body = completion(echo=True, logprobs=5, top_k=1, allowed_token_ids=[90, 91], logit_bias={"90": -100})
    for value in answer(client, body)["choices"][0]["logprobs"]["token_logprobs"][1:]:
        assert math.isfinite(value)


def test_offsets_count_characters_where_tokens_are_parts_of_them(client):
    prompt = "a\u6f22b\U0001f44dc"
    [choice] = answer(client, completion(prompt, echo=True, logprobs=0, max_tokens=0))["choices"]
    logprobs = choice["logprobs"]
    for text, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if text != "\ufffd":
            assert prompt[start:].startswith(text)
    starts = logprobs["text_offset"]
    assert starts == sorted(starts) and starts[0] == 0 and max(starts) < len(prompt)


def test_offsets_count_special_tokens_that_stand_in_the_prompt(client):
    prompt = "<|end|>a<|end|>b"
    [choice] = answer(client, completion(prompt, echo=True, logprobs=0, max_tokens=0))["choices"]
    assert choice["text"] == prompt and choice["logprobs"]["text_offset"] == [0, 7, 8, 15]
    token_ids = client.app.state.service.tokenizer(prompt)["input_ids"]
    [choice] = answer(client, completion(token_ids, echo=True, logprobs=0, max_tokens=0))["choices"]
    assert choice["text"] == "ab" and choice["logprobs"]["text_offset"] == [0, 0, 1, 1]


def test_an_evaluation_tool_reads_the_score_of_a_continuation(client):
    tokenizer = client.app.state.service.tokenizer
    context, whole = tokenizer("The weather")["input_ids"], tokenizer("The weather today")["input_ids"]
    assert whole[: len(context)] == context
    body = completion([whole], max_tokens=1, echo=True, logprobs=1, seed=1234)
    [choice] = answer(client, body)["choices"]
    scores = choice["logprobs"]["token_logprobs"][len(context) : -1]
    tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
    expected = _model_logprobs(client, whole)
    total = sum(float(expected[i - 1, whole[i]]) for i in range(len(context), len(whole)))
    assert math.isclose(sum(scores), total, abs_tol=1e-3)
    greedy = all(int(expected[i - 1].argmax()) == whole[i] for i in range(len(context), len(whole)))
    assert all(score == max(top.values()) for score, top in zip(scores, tops, strict=True)) == greedy


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["x"] * 100_000}, "prompt"),
        ({"prompt": ["x"] * 1000, "n": 8}, "prompt"),
        ({"prompt": [[1, "x"]]}, "prompt[0][1]"),
        ({"prompt": ["One, two,", [1, 2]]}, "prompt"),
        ({"prompt": [1, "two"]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": [600]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
        ({"max_tokens": 10**6}, "prompt"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(client, fields, param):
    error = refusal(client, completion() | fields)
    assert error["param"] == param and f"`{param}" in error["message"] and len(error["message"]) < 500
    assert client.post(PATH, json=completion()).status_code == 200


def test_a_list_of_texts_and_token_ids_is_told_what_is_taken(client):
    message = refusal(client, completion(["One, two,", [1, 2]]))["message"]
    assert message.startswith("`prompt` is a text, token ids, a list of texts or") and "one kind" in message


def test_one_wrong_prompt_of_several_starts_none(client):
    service = client.app.state.service
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "submit", None)
        error = refusal(client, completion([[1, 2, 3], [600]]))
    assert "Prompt 1 of 2" in error["message"] and error["param"] == "prompt"


@pytest.mark.parametrize(("value", "count"), [(False, None), (None, None), (True, 1), (0, 0)])
def test_log_probabilities_may_be_asked_for_as_in_chats(client, value, count):
    [choice] = answer(client, completion(logprobs=value, max_tokens=2))["choices"]
    assert (choice["logprobs"] is None) == (count is None)


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 4}, {"echo": True, "logprobs": 4}])
def test_log_probabilities_of_prompts_are_not_multiplied_without_bound(client, monkeypatch, fields):
    from hf_paged.serving import sampling

    count = len(client.app.state.service.tokenizer("Hello world")["input_ids"])
    monkeypatch.setattr(sampling, "MAX_PROMPT_LOGPROBS", 3 * count * 5)
    assert len(answer(client, completion(n=3, temperature=1, **fields))["choices"]) == 3
    for wrong in ({"n": 4, "temperature": 1}, {"prompt": ["Hello world"] * 4}):
        error = refusal(client, completion(**{**fields, **wrong}))
        assert error["param"] == "prompt_logprobs"
        assert str(4 * count * 5) in error["message"] and str(3 * count * 5) in error["message"]


def test_the_first_prompt_that_fails_ends_the_others(client, monkeypatch):
    service = client.app.state.service
    submit, streams = type(service).submit, []

    def failing(self, prompt, *args, **options):
        streams.append(submit(self, prompt, *args, **options))
        if len(streams) == 2:
            streams[1].abort(DeadlineExceededError("The second one failed."))
        return streams[-1]

    monkeypatch.setattr(type(service), "submit", failing)
    error = refusal(client, completion(["Hello", "you", "there"], max_tokens=1900, ignore_eos=True), 408)
    assert error["message"] == "The second one failed."
    wait_until(lambda: all(isinstance(stream.error, RequestAbortedError) for stream in streams[::2]))


def test_best_of_as_many_as_are_wanted_is_what_n_says(client):
    assert len(answer(client, completion(n=2, best_of=2, temperature=1))["choices"]) == 2


def test_prompts_are_cut_to_their_ends(client):
    text = "one two three four five six seven eight nine ten " * 30
    tokens = client.app.state.service.tokenizer(text)["input_ids"]
    for prompt in (text, tokens):
        body = completion(prompt, truncate_prompt_tokens=7, return_token_ids=True)
        assert answer(client, body)["choices"][0]["prompt_token_ids"] == tokens[-7:]


def test_more_prompts_than_can_ever_wait_are_no_reason_to_try_again(make_client):
    client = make_client(max_num_seqs=2, max_num_queued_reqs=1)
    assert len(answer(client, completion(["a"] * 3, max_tokens=1))["choices"]) == 3
    error = refusal(client, completion(["a"] * 4, max_tokens=1))
    assert error["param"] == "prompt" and "--max-num-queued-reqs" in error["message"]


def test_an_echo_of_a_prompt_that_was_cut_is_what_was_left(client):
    text = "one two three four five six seven eight nine ten " * 3
    tokenizer = client.app.state.service.tokenizer
    tokens = tokenizer(text)["input_ids"]
    for prompt in (text, tokens):
        body = completion(prompt, truncate_prompt_tokens=7, echo=True, logprobs=0, max_tokens=0)
        [choice] = answer(client, body)["choices"]
        assert choice["text"] == tokenizer.decode(tokens[-7:]) == "".join(choice["logprobs"]["tokens"])


def test_answers_take_a_form(client):
    [choice] = answer(client, completion(structured_outputs={"choice": ["maybe"]}))["choices"]
    assert choice["text"] == "maybe" and choice["finish_reason"] == "stop"
