"""`/v1/messages`: Anthropic's conversations become chats, and pieces become blocks and events."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest

from hf_paged.serving.errors import ApiError, overloaded
from hf_paged.serving.events import ChoiceEnd, ContentDelta, ToolCallArguments, ToolCallStart, Usage
from hf_paged.serving.message_events import MessageBuilder
from hf_paged.serving.protocol.anthropic import (
    CountTokensRequest,
    MessagesRequest,
    anthropic_error,
    chat_fields,
    chat_messages,
)
from hf_paged.serving.protocol.translation import as_chat
from tests.serving.pieces import COLOR, PAINT, PIECES, USAGE, refusal_of

TOOL = {**PAINT, "input_schema": COLOR}
HELLO = [{"role": "user", "content": "hi"}]


def request(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"max_tokens": 9, "messages": HELLO, **fields})


# ------------------------------------------------------------------ what is asked for


def test_the_system_prompt_comes_first_as_text_or_blocks():
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert chat_messages(request(system="Be brief.")) == expected
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    assert chat_messages(request(system=[cached])) == expected
    assert chat_messages(request(messages=[{"role": "system", "content": "Be brief."}, *HELLO])) == expected


def test_turns_of_one_role_in_a_row_are_one():
    turns = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "there"}]}]
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    assert chat_messages(request(messages=turns)) == [{"role": "user", "content": parts}]


def test_calls_and_their_results_become_messages_of_the_assistant_and_the_tool():
    turns = [
        {"role": "user", "content": "Paint it."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Which?", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Sure."},
                {"type": "tool_use", "id": "a", "name": "paint", "input": {"color": "red"}},
                {"type": "tool_use", "id": "b", "name": "paint", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "wet"},
                {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    user, assistant, first, second, last = chat_messages(request(messages=turns))
    assert user == {"role": "user", "content": "Paint it."}
    assert assistant["content"] == "Sure." and assistant["reasoning_content"] == "Which?"
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"color": "red"}, {}]
    assert first == {"role": "tool", "tool_call_id": "a", "content": "wet"}
    assert second == {"role": "tool", "tool_call_id": "b", "content": ""}
    assert last == {"role": "user", "content": "And?"}
    as_chat(request(messages=turns), chat_fields)


def test_the_beginning_of_an_answer_is_continued():
    chat = as_chat(request(messages=[*HELLO, {"role": "assistant", "content": "I am"}]), chat_fields)
    assert chat.continue_final_message is True
    assert as_chat(request(), chat_fields).continue_final_message is None


def test_fields_get_their_names_in_chats():
    chat = as_chat(
        request(
            stop_sequences=["X"],
            temperature=0.5,
            top_k=5,
            seed=1,
            metadata={"user_id": "u"},
            tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}],
            tool_choice={"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
            output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        ),
        chat_fields,
    )
    assert (chat.answer_limit, chat.stop, chat.temperature, chat.top_k, chat.seed) == (9, ["X"], 0.5, 5, 1)
    function = {"name": "paint", "description": "Paints a wall.", "parameters": TOOL["input_schema"]}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "paint"}}
    assert chat.parallel_tool_calls is False
    assert chat.reasoning_effort == "low"
    assert chat.response_format.json_schema.schema_ == {"type": "object"}


@pytest.mark.parametrize(("theirs", "ours"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_choices_of_tools_have_other_names(theirs, ours):
    assert as_chat(request(tools=[TOOL], tool_choice={"type": theirs}), chat_fields).tool_choice == ours


@pytest.mark.parametrize(
    ("thinking", "thinks", "shown"),
    [
        (None, False, "hidden"),
        ({"type": "disabled"}, False, "hidden"),
        ({"type": "enabled", "budget_tokens": 1024}, True, "shown"),
        ({"type": "adaptive"}, True, "shown"),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, True, "omitted"),
    ],
)
def test_models_think_if_they_are_asked_to(thinking, thinks, shown):
    body = request(thinking=thinking)
    assert body.shown_thinking == shown
    assert as_chat(body, chat_fields).chat_template_kwargs == {"enable_thinking": thinks}


def test_null_means_not_given():
    fields = {name: None for name in MessagesRequest.model_fields if name not in ("messages", "max_tokens")}
    assert as_chat(request(**fields), chat_fields).messages[0].content == "hi"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_tokens": True}, "max_tokens", "number"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'tool'"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "file:/x"}}]}
                ]
            },
            "messages[0].content[0]",
            "takes text only",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 1}]}
                ]
            },
            "messages[0].content[0].input",
            "dictionary",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "'custom'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
        ({"stop": ["x"]}, "stop", "`stop_sequences`"),
        ({"n": 2}, "n", "single answers"),
        ({"system": [{"type": "image"}]}, "system[0].type", "'text'"),
    ],
)
def test_what_cannot_be_answered_is_told_with_its_place(fields, param, message):
    error = refusal_of(request, fields)
    assert error.param == param
    assert message in error.message


CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}], "no such `tool_use`"),
        ([{"role": "user", "content": CALL["content"]}], "only the assistant"),
        ([*HELLO, CALL], "result of that call"),
        ([{"role": "user", "content": []}], "nothing to answer"),
    ],
)
def test_conversations_that_make_no_sense_are_refused(turns, message):
    with pytest.raises(ApiError, match=message) as raised:
        as_chat(request(messages=turns), chat_fields)
    assert raised.value.status == 400


def test_tokens_are_counted_without_max_tokens():
    assert as_chat(CountTokensRequest.model_validate({"messages": HELLO}), chat_fields).answer_limit is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ApiError(400, "x"), "invalid_request_error"),
        (ApiError(422, "x"), "invalid_request_error"),
        (ApiError(401, "x"), "authentication_error"),
        (ApiError(404, "x"), "not_found_error"),
        (ApiError(413, "x"), "request_too_large"),
        (ApiError(500, "x"), "api_error"),
        (overloaded("x"), "overloaded_error"),
    ],
)
def test_errors_have_anthropic_s_form(error, kind):
    assert anthropic_error(error) == {"type": "error", "error": {"type": kind, "message": "x"}}


# ------------------------------------------------------------------ what is told


def build(*pieces: Any, thinking: str = "shown") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of an answer as they are when they are told, and the message."""
    builder = MessageBuilder("msg_1", "tiny", thinking)
    told = [json.dumps(event) for event in builder.begin(Usage(prompt_tokens=5, cached_tokens=2))]
    for piece in pieces:
        told += [json.dumps(event) for event in builder.add(piece)]
    told += [json.dumps(event) for event in builder.end(USAGE)]
    return [json.loads(event) for event in told], builder.message


MIXED = (*PIECES, ChoiceEnd(0, "tool_calls"))


def test_events_come_in_anthropic_s_order():
    events, message = build(*MIXED)
    block = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == [
        "message_start",
        *block * 3,
        *("content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert [event["index"] for event in events if "index" in event] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "\nBoth walls."},
        {"type": "tool_use", "id": "call_a", "name": "paint", "input": {"color": "red"}},
        {"type": "tool_use", "id": "call_b", "name": "paint", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


def test_blocks_begin_empty():
    events, _ = build(*MIXED)
    assert [event["content_block"] for event in events if event["type"] == "content_block_start"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_a", "name": "paint", "input": {}},
        {"type": "tool_use", "id": "call_b", "name": "paint", "input": {}},
    ]


def test_cached_tokens_are_counted_beside_the_input():
    events, message = build(ContentDelta(0, "Yes."), ChoiceEnd(0, "stop"))
    start = events[0]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"], start["output_tokens"]) == (3, 2, 0)
    end = events[-2]["usage"]
    assert (end["input_tokens"], end["cache_read_input_tokens"], end["output_tokens"]) == (3, 2, 6)
    assert end["output_tokens_details"] == {"thinking_tokens": 1}
    assert message["usage"] == end


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (ChoiceEnd(0, "stop"), "end_turn", None),
        (ChoiceEnd(0, "stop", 2), "end_turn", None),
        (ChoiceEnd(0, "stop", "STOP"), "stop_sequence", "STOP"),
        (ChoiceEnd(0, "length"), "max_tokens", None),
    ],
)
def test_why_it_stopped_is_told(end, reason, sequence):
    events, message = build(ContentDelta(0, "Yes."), end)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_thinking_is_shown_only_if_it_was_asked_for():
    _, message = build(*MIXED, thinking="hidden")
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"]
    events, message = build(*MIXED, thinking="omitted")
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert "thinking_delta" not in json.dumps(events)


def test_an_empty_answer_has_no_blocks_and_white_space_alone_is_text():
    assert build(ChoiceEnd(0, "stop"))[1]["content"] == []
    message = build(ContentDelta(0, "\n"), ContentDelta(0, " "), ChoiceEnd(0, "stop"))[1]
    assert message["content"] == [{"type": "text", "text": "\n "}]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"color": "red", "coats": [1, 2', {"color": "red", "coats": [1, 2]}),
        ('{"color": "re', {"color": "re"}),
        ('{"col', {}),
        ("", {}),
        ("[1]", {}),
        ("oops", {}),
    ],
)
def test_arguments_that_were_cut_are_an_object_all_the_same(arguments, parsed):
    _, message = build(ToolCallStart(0, 0, "a", "f"), ToolCallArguments(0, 0, arguments), ChoiceEnd(0, "length"))
    assert message["content"][0]["input"] == parsed
    assert message["stop_reason"] == "max_tokens"


# ------------------------------------------------------------------ over HTTP

GREEDY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}


def read_events(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_the_answer_is_the_same_whole_and_as_a_stream(client):
    whole = client.post("/v1/messages", json=GREEDY).json()
    assert whole["type"] == "message" and whole["role"] == "assistant" and whole["model"] == "tiny"
    assert whole["stop_reason"] == "max_tokens" and whole["usage"]["output_tokens"] == 12
    answer = client.post("/v1/messages", json={**GREEDY, "stream": True}, headers={"anthropic-version": "2023-06-01"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = read_events(answer.text)
    assert [event["type"] for event in events[:3]] == ["message_start", "ping", "content_block_start"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert [{"type": "text", "text": text}] == whole["content"]
    usage = events[0]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == whole["usage"]["input_tokens"]


def test_a_stop_sequence_is_named(client):
    text = client.post("/v1/messages", json=GREEDY).json()["content"][0]["text"]
    stop = text[4:7]
    message = client.post("/v1/messages", json={**GREEDY, "stop_sequences": ["never", stop]}).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(block["text"] for block in message["content"]) == text[: text.index(stop)]


def test_any_tool_is_called(client):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {**GREEDY, "max_tokens": 64, "tools": [TOOL], "tool_choice": choice}
    message = client.post("/v1/messages", json=body).json()
    assert message["stop_reason"] == "tool_use"
    (block,) = message["content"]
    assert block["type"] == "tool_use" and block["name"] == "paint" and block["input"]["color"] in ("red", "blue")


def test_thinking_comes_in_blocks_of_its_own_or_not_at_all(make_client):
    client = make_client(reasoning_parser="deepseek_r1")
    hidden = client.post("/v1/messages", json={**GREEDY, "ignore_eos": True}).json()
    assert hidden["content"] == []
    thinking = {"type": "enabled", "budget_tokens": 1024}
    shown = client.post("/v1/messages", json={**GREEDY, "ignore_eos": True, "thinking": thinking}).json()
    (block,) = shown["content"]
    assert block["type"] == "thinking" and block["thinking"]
    for message in (hidden, shown):
        assert message["stop_reason"] == "max_tokens"
        assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] <= 12


def test_the_count_is_that_of_the_prompt(client):
    usage = client.post("/v1/messages", json={**GREEDY, "system": "Be brief."}).json()["usage"]
    counted = client.post("/v1/messages/count_tokens", json={**GREEDY, "system": "Be brief."}).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_what_no_prompt_may_have_is_counted_and_wrong_tools_are_refused(client):
    limit = client.app.state.service.max_model_len
    long = [{"role": "user", "content": "x y " * 50 * limit}]
    assert client.post("/v1/messages/count_tokens", json={"messages": long}).json()["input_tokens"] > limit
    for tool in ({**TOOL, "name": "a b"}, {**TOOL, "input_schema": {"type": "string"}}):
        body = {**GREEDY, "tools": [tool], "tool_choice": {"type": "any"}}
        counted, answered = (client.post(f"/v1/messages{end}", json=body) for end in ("/count_tokens", ""))
        assert counted.status_code == 400 and counted.json() == answered.json()


def test_any_tool_of_none_is_refused_in_words_of_this_api(client):
    error = client.post("/v1/messages", json={**GREEDY, "tool_choice": {"type": "any"}}).json()["error"]
    assert "`tools`" in error["message"] and "required" not in error["message"]


def test_answers_and_errors_carry_their_id_where_anthropic_s_clients_look_for_it(client):
    for body in (GREEDY, {**GREEDY, "stream": True}, {}):
        headers = client.post("/v1/messages", json=body, headers={"X-Request-Id": "abc"}).headers
        assert headers["request-id"] == "abc" and "x-request-id" not in headers
    assert "request-id" not in client.get("/health").headers


def test_a_cap_of_the_server_is_a_limit_like_the_client_s(client, monkeypatch):
    monkeypatch.setattr(client.app.state.service.engine.model.generation_config, "max_new_tokens", 3)
    message = client.post("/v1/messages", json={**GREEDY, "ignore_eos": True}).json()
    assert message["stop_reason"] == "max_tokens" and message["usage"]["output_tokens"] == 3


def test_an_answer_gets_what_room_there_is(client):
    limit = client.app.state.service.max_model_len
    long = [{"role": "user", "content": "a " * (limit - 40)}]
    prompt = client.post("/v1/messages/count_tokens", json={"messages": long}).json()["input_tokens"]
    assert limit - 100 < prompt < limit
    for max_tokens in (limit - 1, 10**6):
        body = {**GREEDY, "messages": long, "max_tokens": max_tokens, "ignore_eos": True}
        message = client.post("/v1/messages", json=body).json()
        assert message["stop_reason"] == "model_context_window_exceeded"
        assert message["usage"]["output_tokens"] == limit - prompt


def test_a_prompt_without_room_is_refused(client):
    limit = client.app.state.service.max_model_len
    answer = client.post("/v1/messages", json={**GREEDY, "messages": [{"role": "user", "content": "a " * limit}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_all_errors_have_anthropic_s_form(make_client):
    client = make_client(api_key=("secret",), max_body_mib=1)
    key = {"x-api-key": "secret"}
    cases = [
        (client.post("/v1/messages", json=GREEDY), 401, "authentication_error"),
        (client.post("/v1/messages", json={**GREEDY, "model": "other"}, headers=key), 404, "not_found_error"),
        (client.post("/v1/messages", json={"messages": HELLO}, headers=key), 400, "invalid_request_error"),
        (
            client.post("/v1/messages", content=b"{", headers={**key, "content-type": "application/json"}),
            400,
            "invalid_request_error",
        ),
        (client.post("/v1/messages", json={**GREEDY, "system": "x" * 2**20}, headers=key), 413, "request_too_large"),
    ]
    for answer, status, kind in cases:
        assert answer.status_code == status
        assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind
    assert client.post("/v1/messages", json=GREEDY, headers=key).status_code == 200


def test_a_deadline_ends_a_stream_with_an_error_event(client):
    body = {**GREEDY, "stream": True, "max_tokens": 4000, "ignore_eos": True, "request_timeout": 0.05}
    last = read_events(client.post("/v1/messages", json=body).text)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "timeout_error"


def test_anthropic_s_types_know_all_of_it():
    types = pytest.importorskip("anthropic").types
    union = typing.get_args(typing.get_args(types.RawMessageStreamEvent)[0])
    classes = {typing.get_args(kind.model_fields["type"].annotation)[0]: kind for kind in union}
    events, message = build(*MIXED)
    for event in events:
        classes[event["type"]].model_validate(event)
    types.Message.model_validate(message)


def test_anthropic_s_client_reads_streams(server):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        arguments = {"model": "tiny", "messages": GREEDY["messages"], "max_tokens": 12}
        extra = {"extra_body": {"temperature": 0}}
        whole = client.messages.create(**arguments, **extra)
        with client.messages.stream(**arguments, **extra) as stream:
            assert stream.get_final_message().content[0].text == whole.content[0].text
        assert client.messages.count_tokens(model="tiny", messages=GREEDY["messages"]).input_tokens > 0
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**arguments, "model": "other"})
