"""Chats in OpenAI's form: every reply is what the official client expects, and what the engine says offline."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hf_paged import SamplingParams
from hf_paged.errors import QueueFullError
from tests.serving.events import assert_alike, events_of, joined_chat
from tests.serving.servers import chat, wait_until

PATH = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 6}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome \\u00e9\\n"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def answer(client: Any, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    return response.json()


def stream(client: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = client.post(PATH, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    chunks = events_of(response.text)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return chunks


def refusal(client: Any, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    response = client.post(PATH, json=body)
    assert response.status_code == status, response.text
    return response.json()["error"]


def forced(text: str, **fields: Any) -> dict[str, Any]:
    """A request that the tiny model has to answer with this text."""
    return chat(structured_outputs={"choice": [text]}, max_tokens=400, **fields)


# ------------------------------------------------------------------ the answer


def test_an_answer_has_the_tokens_that_the_engine_gives_offline(client):
    service = client.app.state.service
    reply = answer(client, chat(max_tokens=20, temperature=0, return_token_ids=True))
    prompt = service.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_dict=False
    )
    [output] = service.engine.engine.generate([prompt], SamplingParams(max_tokens=20, temperature=0))
    assert reply["prompt_token_ids"] == prompt
    assert reply["choices"][0]["token_ids"] == output.outputs[0].token_ids
    assert reply["choices"][0]["message"]["content"] == output.outputs[0].text
    assert reply["model"] == "tiny" and reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop_token_ids": list(range(300))}, {"logprobs": True}])
def test_a_stream_joined_is_the_whole_answer(client, fields):
    body = chat(max_tokens=24, seed=3, return_token_ids=True, **fields)
    whole, chunks = answer(client, body), stream(client, {**body, "stream_options": {"include_usage": True}})
    choices = joined_chat(chunks)
    for choice in whole["choices"]:
        told = choices[choice["index"]]
        assert told["content"] == choice["message"]["content"]
        assert told["token_ids"] == choice["token_ids"]
        assert (told["finish_reason"], told["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        assert_alike(told["logprobs"], (choice["logprobs"] or {}).get("content") or [])
    counted = whole["usage"] | {"prompt_tokens_details": None}
    assert chunks[-1]["usage"] | {"prompt_tokens_details": None} == counted
    assert counted["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])


def test_answers_of_one_request_differ_and_are_repeatable(client):
    body = chat(n=4, temperature=1, seed=7, max_tokens=12)
    first, second = ([choice["message"]["content"] for choice in answer(client, body)["choices"]] for _ in range(2))
    assert first == second and len(set(first)) > 1


@pytest.mark.parametrize("value", [None, False, True])
def test_special_tokens_are_shown_only_if_asked_for(client, value):
    fields = {} if value is None else {"skip_special_tokens": value}
    body = chat(max_tokens=6, logit_bias={"1": 100}, temperature=0, **fields)  # <|user|>
    shown = answer(client, body)["choices"][0]["message"]["content"]
    assert shown == ("<|user|>" * 6 if value is False else "")
    assert joined_chat(stream(client, body))[0]["content"] == shown


def test_the_answer_fills_the_context_if_no_limit_is_given(client):
    service = client.app.state.service
    body = chat(max_tokens=None, ignore_eos=True, truncate_prompt_tokens=3)
    limit = service.max_model_len
    content = " ".join(["x"] * (limit // 2 - 20))
    reply = answer(client, {**body, "truncate_prompt_tokens": None, "messages": [{"role": "user", "content": content}]})
    usage = reply["usage"]
    assert usage["total_tokens"] == limit and reply["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_counts_before_max_tokens(client):
    assert answer(client, chat(max_tokens=9, max_completion_tokens=3))["usage"]["completion_tokens"] == 3


def test_cached_tokens_are_told_and_salts_keep_prompts_apart(client):
    def cached(**fields: Any) -> int:
        body = chat("many words " * 40, max_tokens=1, **fields)
        return answer(client, body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == cached() == 0


@pytest.mark.parametrize("content", ["One,", [{"type": "text", "text": "One,"}]])
def test_a_message_that_is_continued_can_be_repeated_before_its_continuation(client, content):
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": content}]
    body = chat(messages=messages, add_generation_prompt=False, temperature=0)
    plain = answer(client, body)["choices"][0]["message"]["content"]
    assert answer(client, body | {"echo": True})["choices"][0]["message"]["content"] == "One," + plain
    assert joined_chat(stream(client, body | {"echo": True}))[0]["content"] == "One," + plain
    messages.append({"role": "user", "content": "Go on."})
    assert not answer(client, body | {"echo": True})["choices"][0]["message"]["content"].startswith("Go on.")


def test_requests_with_the_same_id_may_run_at_the_same_time(client):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        body = chat(request_id="same", max_tokens=60, ignore_eos=True)
        replies = list(pool.map(lambda _: client.post(PATH, json=body), range(4)))
    assert [reply.status_code for reply in replies] == [200] * 4
    assert {reply.json()["id"] for reply in replies} == {"chatcmpl-same"}


def test_the_id_is_that_of_the_body_before_that_of_the_header(client):
    def reply(body: dict[str, Any]) -> str:
        return client.post(PATH, json=body, headers={"X-Request-Id": "from-header"}).json()["id"]

    assert reply(chat(request_id="from-body")) == "chatcmpl-from-body"
    assert reply(chat()) == "chatcmpl-from-header"


# ------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("top", [None, 0, 5])
def test_logprobs_have_the_form_of_chats(client, top):
    body = chat(max_tokens=8, temperature=0, logprobs=True, return_token_ids=True)
    choice = answer(client, {**body, "top_logprobs": top})["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) == 8
    for entry in content:
        assert len(entry["top_logprobs"]) == (top or 0)
        values = [best["logprob"] for best in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        if top:
            assert values[0] == entry["logprob"], "the greedy token is the best one"
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]


def test_bytes_of_characters_of_several_tokens_are_exact(client):
    text = "\u6f22\u5b57 \U0001f44d\U0001f3fd \u0e01\u0e33"
    choice = answer(client, forced(text, logprobs=True))["choices"][0]
    assert choice["message"]["content"] == text
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content if entry["token"] != "<|end|>") == text.encode()
    assert any(entry["token"] == "\ufffd" for entry in content), "some token is part of a character"
    assert "\ufffd" not in joined_chat(stream(client, forced(text)))[0]["content"]


def test_tokens_may_be_named_by_their_ids(client):
    body = chat(logprobs=True, top_logprobs=1, temperature=0, return_token_ids=True, return_tokens_as_token_ids=True)
    choice = answer(client, body)["choices"][0]
    named = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert named == [f"token_id:{token}" for token in choice["token_ids"]]


def test_logprobs_of_the_prompt_have_its_length_and_begin_with_none(client):
    body = chat(prompt_logprobs=2, max_tokens=1, return_token_ids=True)
    reply = answer(client, body)
    entries = reply["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(reply["prompt_token_ids"])
    for token, entry in zip(reply["prompt_token_ids"][1:], entries[1:], strict=True):
        assert entry[str(token)].keys() == {"logprob", "rank", "decoded_token"} and len(entry) in (2, 3)
    assert_alike(stream(client, body)[0]["prompt_logprobs"], entries)


# ------------------------------------------------------------------ forms of answers

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
)
def test_answers_follow_a_schema(client, fields):
    choice = answer(client, chat(max_tokens=200, seed=1, **fields))["choices"][0]
    value = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert list(value) == ["name", "age"] and 0 <= value["age"] <= 99 and len(value["name"]) <= 8


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "a{3}"}}, {"aaa"}),
        ({"guided_regex": "a{3}"}, {"aaa"}),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, {"ab"}),
        ({"guided_grammar": 'root ::= "a" "b"'}, {"ab"}),
        ({"response_format": {"type": "json_object"}, "max_tokens": 1}, None),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_answers_have_the_form_that_was_asked_for(client, fields, texts):
    choice = answer(client, chat(**fields))["choices"][0]
    assert texts is None or choice["message"]["content"] in texts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs"),
        ({"guided_json": "not json"}, "guided_json"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_grammar": "nonsense"}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_forms_that_make_no_sense_are_refused_by_name(client, fields, param):
    error = refusal(client, chat(**fields))
    assert error["param"] == param and error["message"]
    assert refusal(client, chat(**fields, stream=True)) == error, "before a stream begins"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs"),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
    ],
)
def test_a_form_that_cannot_follow_reasoning_is_refused_by_name(make_client, fields, param):
    error = refusal(make_client(reasoning_parser="think"), chat(**fields))
    assert error["param"] == param and f"`{param}" in error["message"] and "reasoning" in error["message"]


def test_a_form_that_would_wait_too_long_is_refused_and_counted(client, monkeypatch):
    service = client.app.state.service

    def full(*args: Any) -> None:
        raise QueueFullError("256 grammars wait to be compiled; try again later.")

    monkeypatch.setattr(service.engine.engine.grammars, "submit", full)
    before = service.metrics.rejections["grammars"]
    assert refusal(client, forced("Yes."), 503)["code"] == "queue_full"
    assert service.metrics.rejections["grammars"] == before + 1


# ------------------------------------------------------------------ tools and reasoning


@pytest.fixture(scope="module")
def agent(make_client):
    """A client of a server that lets the model call tools and think."""
    return make_client(enable_auto_tool_choice=True, tool_call_parser="hermes")


@pytest.mark.parametrize("text", [CALL, "Let me see. " + CALL, CALL + "\n" + OTHER_CALL, "No call <tool_call at all"])
def test_calls_are_the_same_streamed_and_whole(agent, text):
    body = forced(text, tools=TOOLS)
    [choice] = answer(agent, body)["choices"]
    told = joined_chat(stream(agent, body))[0]
    expected = text.count("</tool_call>")
    calls = choice["message"].get("tool_calls", [])
    assert len(calls) == expected
    assert choice["finish_reason"] == told["finish_reason"] == ("tool_calls" if expected else "stop")
    assert [call["function"] for call in calls] == [call["function"] for call in told["calls"]]
    assert told["content"] == (choice["message"]["content"] or "")
    if expected:
        assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Rome \u00e9\n"}
        assert len({call["id"] for call in calls}) == len({call["id"] for call in told["calls"]}) == expected
        assert choice["message"]["content"] == ("Let me see. " if text.startswith("Let") else None)
    else:
        assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]


def test_one_call_is_all_there_is_without_parallel_calls(agent):
    [choice] = answer(agent, forced(CALL + "\n" + OTHER_CALL, tools=TOOLS, parallel_tool_calls=False))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


@pytest.mark.parametrize("stream_it", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_can_be_forced_on_servers_without_a_parser(client, choice, stream_it):
    body = chat(max_tokens=300, tools=TOOLS, tool_choice=choice, seed=5)
    if stream_it:
        told = joined_chat(stream(client, body))[0]
        calls, reason = told["calls"], told["finish_reason"]
        assert told["content"] == ""
    else:
        [whole] = answer(client, body)["choices"]
        calls, reason = whole["message"]["tool_calls"], whole["finish_reason"]
        assert whole["message"]["content"] is None
    assert reason == ("tool_calls" if choice != "required" or calls else "length")
    for call in calls:
        assert call["type"] == "function" and call["id"]
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    if choice != "required":
        assert [call["function"]["name"] for call in calls] == ["get_weather"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_are_not_allowed_are_neither_shown_nor_called(agent, mode):
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    fields = {"max_tokens": 1} if mode == "required" else {}
    body = {**forced(CALL), "tools": TOOLS, "tool_choice": choice, **fields}
    alone = {**body, "tools": TOOLS[1:], "tool_choice": mode}
    assert answer(agent, body)["usage"]["prompt_tokens"] == answer(agent, alone)["usage"]["prompt_tokens"]
    if mode == "auto":
        message = answer(agent, body)["choices"][0]["message"]
        assert message["content"] == CALL and "tool_calls" not in message
        [call] = answer(agent, {**body, **forced(OTHER_CALL)})["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "now"


@pytest.mark.parametrize("call", [CALL, None])
def test_a_model_that_must_answer_in_a_form_may_call_all_the_same(agent, call):
    """Whichever of the two the model begins with."""
    schema = {"json_schema": {"schema": {"enum": ["yes"]}}, "type": "json_schema"}
    start = agent.app.state.service.tokenizer((call or '"')[0])["input_ids"][0]
    body = chat(max_tokens=12, tools=TOOLS, response_format=schema, logit_bias={str(start): 100} if call else None)
    message = answer(agent, body)["choices"][0]["message"]
    if call:
        assert message["content"].startswith("<tool_call>")
    body["logit_bias"] = {str(start): 100}
    if not call:
        assert answer(agent, body)["choices"][0]["message"]["content"] == '"yes"'


def test_a_form_beside_calls_that_have_no_mark_is_refused(make_client):
    client = make_client(enable_auto_tool_choice=True, tool_call_parser="pythonic")
    error = refusal(client, chat(tools=TOOLS, response_format={"type": "json_object"}))
    assert error["param"] == "response_format" and "`tool_choice`" in error["message"]
    assert answer(client, chat(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"}))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_form_that_makes_no_sense_is_refused_beside_forced_calls(client, choice):
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
    error = refusal(client, chat(tools=TOOLS, tool_choice=choice, response_format=schema))
    assert error["param"] == "response_format.json_schema.schema"


def test_the_markup_of_calls_is_text_where_tools_are_not_to_be_called(agent):
    [choice] = answer(agent, forced(CALL, tools=TOOLS, tool_choice="none"))["choices"]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


def test_letting_the_model_choose_needs_a_server_that_was_told_how_it_calls(client):
    error = refusal(client, chat(tools=TOOLS))
    assert error["param"] == "tool_choice" and "--enable-auto-tool-choice" in error["message"]
    assert answer(client, chat(tools=[], tool_choice="auto"))["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def thinker(make_client):
    """A client of a server whose model thinks. What it is forced to say is not put behind free thinking."""
    from hf_paged.serving.parser_choice import RequestParsers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestParsers, "constrain", lambda self, params, tokenizer, **_: params)
        yield make_client(reasoning_parser="think", enable_auto_tool_choice=True, tool_call_parser="hermes")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nWell, so.\n</think>\n\nYes.", "Well, so.", "Yes."),
        ("Yes.", None, "Yes."),
        ("<think>endless", "endless", ""),
    ],
)
def test_reasoning_has_a_field_of_its_own(thinker, text, reasoning, content):
    body = forced(text, return_token_ids=True)
    reply = answer(thinker, body)
    [choice] = reply["choices"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content") == reasoning
    assert message["content"] == content and choice["finish_reason"] == "stop"
    told = joined_chat(stream(thinker, body))[0]
    assert (told.get("reasoning"), told["content"]) == (reasoning, content)
    spent = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (spent > 0) == (reasoning is not None) and spent <= len(choice["token_ids"])


def test_reasoning_can_be_left_out(thinker):
    body = forced("<think>Well.</think>Yes.", include_reasoning=False)
    message = answer(thinker, body)["choices"][0]["message"]
    assert "reasoning" not in message and message["content"] == "Yes."
    assert "reasoning" not in joined_chat(stream(thinker, body))[0]


def test_tokens_of_reasoning_that_is_left_out_are_not_shown_either(thinker):
    tokenizer = thinker.app.state.service.tokenizer
    body = forced("<think>Well.</think>\n\nYes.", return_token_ids=True, logprobs=True)
    assert len(answer(thinker, body)["choices"][0]["token_ids"]) > 10
    body["include_reasoning"] = False
    choice = answer(thinker, body)["choices"][0]
    assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == "Yes."
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert joined_chat(stream(thinker, body))[0]["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize("content", ["<think>Well,", [{"type": "text", "text": "<think>Well,"}]])
def test_reasoning_that_is_continued_is_reasoning(thinker, content):
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content}]
    body = forced("so.</think>Yes.", messages=messages, continue_final_message=True, add_generation_prompt=False)
    message = answer(thinker, body)["choices"][0]["message"]
    assert message["reasoning"] == "so." and message["content"] == "Yes."


def test_calls_follow_reasoning(thinker):
    body = forced("<think>I look.</think>" + CALL, tools=TOOLS)
    [choice] = answer(thinker, body)["choices"]
    assert choice["message"]["reasoning"] == "I look." and choice["finish_reason"] == "tool_calls"
    told = joined_chat(stream(thinker, body))[0]
    assert told["calls"][0]["function"] == choice["message"]["tool_calls"][0]["function"]


# ------------------------------------------------------------------ what is refused


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(client):
    limit = client.app.state.service.max_model_len
    prompt = answer(client, chat())["usage"]["prompt_tokens"]
    error = refusal(client, chat(max_tokens=limit - prompt + 1))
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert all(str(number) in error["message"] for number in (limit, prompt, limit - prompt + 1))
    error = refusal(client, chat("x " * limit, max_tokens=None))
    assert error["code"] == "context_length_exceeded" and str(limit) in error["message"]
    error = refusal(client, chat("x" * 3_000_000, max_tokens=None, stream=True))
    assert error["code"] == "context_length_exceeded" and "at least" in error["message"]
    assert answer(client, chat("x " * limit, max_tokens=4, truncate_prompt_tokens=10))["usage"]["prompt_tokens"] == 10
    usage = answer(client, chat("x " * limit, max_tokens=4, truncate_prompt_tokens=-1))["usage"]
    assert usage["prompt_tokens"] == limit - 4


def test_a_thousand_bad_messages_get_a_short_answer(client):
    body = {"model": "tiny", "messages": [{"role": 5, "content": {"x": "y" * 100}}] * 1000}
    response = client.post(PATH, json=body)
    assert response.status_code == 400 and len(response.content) < 2000
    assert response.json()["error"]["param"].startswith("messages[0]")


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"messages": []}, "messages", 400),
        ({"messages": None}, "messages", 400),
        ({"messages": "hi"}, "messages", 400),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", 400),
        ({"model": "other"}, "model", 404),
        ({"functions": [{"name": "f"}]}, "functions", 400),
        ({"modalities": ["text", "audio"]}, "modalities", 400),
        ({"audio": {"voice": "x"}}, "audio", 400),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt", 400),
        ({"top_logprobs": 3}, "top_logprobs", 400),
        ({"max_tokens": 0}, "max_tokens", 400),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(client, fields, param, status):
    error = refusal(client, {**chat(), **fields}, status)
    assert error["param"] == param and f"`{param}`" in error["message"] and error["type"] == "invalid_request_error"


# ------------------------------------------------------------------ clients that leave


def test_a_client_that_does_not_wait_for_its_answer_frees_everything(server):
    with server.connect() as connection:
        body = json.dumps(chat(max_tokens=None, ignore_eos=True)).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        engine = server.service.engine
        wait_until(lambda: engine.num_running == 1)
    wait_until(lambda: engine.num_running == 0 and not engine.engine.has_unfinished)
    assert engine.engine.live.block_manager.num_blocks_held == 0


@pytest.mark.slow
def test_the_real_model_answers_as_it_does_offline(real_model, real_tokenizer):
    from starlette.testclient import TestClient

    from hf_paged import LLM
    from hf_paged.serving.app import make_app
    from hf_paged.serving.loading import make_service
    from hf_paged.serving.settings import ServerSettings

    messages = [{"role": "user", "content": "Name three colours, and a dish from Japan in Japanese."}]
    params = SamplingParams(max_tokens=40, temperature=0)
    [offline] = LLM(real_model, real_tokenizer).chat(messages, params, use_tqdm=False)
    service = make_service(real_model, real_tokenizer, ServerSettings(model="x", disable_log_stats=True), ("tiny",))
    try:
        with TestClient(make_app(service)) as real:
            body = chat(messages=messages, max_tokens=40, temperature=0, return_token_ids=True)
            [choice] = answer(real, body)["choices"]
            assert choice["token_ids"] == offline.outputs[0].token_ids
            assert choice["message"]["content"] == offline.outputs[0].text
            told = joined_chat(stream(real, body))[0]
            assert told["content"] == offline.outputs[0].text and "<|im" not in told["content"]
            shown = answer(real, body | {"skip_special_tokens": False, "logit_bias": {"1": 100}, "max_tokens": 2})
            assert shown["choices"][0]["message"]["content"].startswith("<|im_start|>")
    finally:
        service.close()
