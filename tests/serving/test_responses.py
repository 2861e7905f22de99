"""`/v1/responses`: conversations become chats, pieces become items and events, and OpenAI's client reads them."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest

from hf_paged.serving.errors import ApiError
from hf_paged.serving.events import ChoiceEnd, ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart, Usage
from hf_paged.serving.parser_choice import RequestParsers
from hf_paged.serving.protocol.response_object import new_response
from hf_paged.serving.protocol.responses import ResponsesRequest, chat_fields, chat_messages
from hf_paged.serving.protocol.translation import as_chat
from hf_paged.serving.response_events import ResponseBuilder
from hf_paged.serving.tool_choice import plan_tools
from tests.serving.pieces import COLOR, PAINT, PIECES, USAGE, refusal_of
from tests.serving.servers import wait_until

TOOL = {"type": "function", **PAINT, "parameters": COLOR}


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "hi", **fields})


# ------------------------------------------------------------------ what is asked for


def test_a_text_is_what_the_user_says_and_instructions_come_before_it():
    assert chat_messages(request(instructions="Be brief.")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_instructions_and_the_system_messages_after_them_are_one():
    items = [
        {"role": "developer", "content": "Rhyme."},
        {"role": "system", "content": [{"type": "input_text", "text": "In French."}]},
        {"role": "user", "content": "hi"},
    ]
    assert chat_messages(request(instructions="Be brief.", input=items))[0] == {
        "role": "system",
        "content": "Be brief.\n\nRhyme.\n\nIn French.",
    }
    assert chat_messages(request(input=items))[0]["content"] == "Rhyme.\n\nIn French."


def test_what_the_assistant_thought_said_and_called_is_one_message():
    items = [
        {"role": "user", "content": "Paint it."},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Which?"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Sure.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "paint", "arguments": '{"color": "red"}'},
        {"type": "function_call", "call_id": "b", "name": "paint", "arguments": '{"color": "blue"}'},
        {"type": "function_call_output", "call_id": "a", "output": "wet"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "dry"}]},
        {"role": "user", "content": "And?"},
    ]
    messages = chat_messages(request(input=items))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assistant = messages[1]
    assert assistant["reasoning_content"] == "Which?"
    assert assistant["content"] == [{"type": "text", "text": "Sure."}]
    assert [call["id"] for call in assistant["tool_calls"]] == ["a", "b"]
    assert assistant["tool_calls"][0]["function"] == {"name": "paint", "arguments": '{"color": "red"}'}
    assert [message["tool_call_id"] for message in messages[2:4]] == ["a", "b"]


def test_messages_of_the_assistant_in_a_row_are_one():
    items = [
        {"role": "assistant", "content": text} for text in ("Hm.", [{"type": "output_text", "text": "So."}], "Yes.")
    ]
    (message,) = chat_messages(request(input=items))
    assert [part["text"] for part in message["content"]] == ["Hm.", "So.", "Yes."]
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    assert len(chat_messages(request(input=[items[0], call, items[2]]))) == 2


def test_an_output_of_a_call_that_was_not_sent_is_refused():
    body = request(input=[{"type": "function_call_output", "call_id": "lost", "output": "x"}])
    with pytest.raises(ApiError, match=r"'lost'.*this server keeps no responses") as raised:
        as_chat(body, chat_fields)
    assert raised.value.status == 400


def test_fields_get_their_names_in_chats():
    chat = as_chat(
        request(
            max_output_tokens=7,
            temperature=0.5,
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
            tools=[TOOL],
            tool_choice={"type": "function", "name": "paint"},
            parallel_tool_calls=False,
            include=["message.output_text.logprobs", "reasoning.encrypted_content"],
            top_logprobs=3,
            top_k=5,
            seed=1,
            cache_salt="mine",
            structured_outputs=None,
        ),
        chat_fields,
    )
    assert (chat.max_completion_tokens, chat.temperature, chat.reasoning_effort) == (7, 0.5, "low")
    assert chat.response_format.json_schema.schema_ == {"type": "object"}
    function = {name: TOOL[name] for name in ("name", "description", "parameters")}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "paint"}}
    assert chat.parallel_tool_calls is False
    assert (chat.logprobs, chat.top_logprobs) == (True, 3)
    assert (chat.top_k, chat.seed, chat.cache_salt) == (5, 1, "mine")


def test_allowed_tools_are_those_that_the_plan_shows():
    other = {**TOOL, "name": "scrape"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "scrape"}]}
    chat = as_chat(request(tools=[TOOL, other], tool_choice=choice), chat_fields)
    plan = plan_tools(chat.tools, chat.tool_choice)
    assert (plan.choice, [*plan.functions], plan.forbidden) == ("required", ["scrape"], {"paint"})


def test_a_plain_json_object_and_plain_text_are_asked_for():
    assert as_chat(request(text={"format": {"type": "json_object"}}), chat_fields).response_format.type == "json_object"
    assert as_chat(request(text={"verbosity": "low"}), chat_fields).response_format is None


def test_the_response_repeats_what_was_asked_for_as_openai_s_types_say():
    from openai.types.responses import Response

    body = request(
        instructions="Be brief.",
        text={"format": {"type": "json_schema", "schema": {"type": "object"}}, "verbosity": "low"},
        tools=[TOOL],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "paint"}]},
        reasoning={"effort": "low"},
        metadata={"a": "b"},
        temperature=0.5,
    )
    response = new_response(body, "resp_1", "tiny", 5)
    Response.model_validate(response)
    assert response["tools"][0] == {**TOOL, "strict": None}
    assert response["text"]["format"]["name"] == "output"
    assert response["store"] is False and response["metadata"] == {"a": "b"}


def test_null_means_not_given():
    fields = {name: None for name in ResponsesRequest.model_fields if name != "input"}
    chat = as_chat(request(**fields), chat_fields)
    assert chat.messages[0].content == "hi"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": 3}, "input", "list"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "function_call_output"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "'robot'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "input[0].content[0]",
            "takes text only",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]", "no `text`"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id", "missing"),
        ({"background": True}, "background", "not offered"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"conversation": "conv_1"}, "conversation", "keeps no responses"),
        ({"prompt": {"id": "p"}}, "prompt", "`instructions`"),
        ({"max_tokens": 5}, "max_tokens", "`max_output_tokens`"),
        ({"n": 2}, "n", "single answers"),
        ({"response_format": {"type": "text"}}, "response_format", "`text.format`"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0"),
        ({"max_output_tokens": "x"}, "max_output_tokens", "integer"),
        ({"max_output_tokens": True}, "max_output_tokens", "number"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "16"),
        ({"truncation": "middle"}, "truncation", "'auto'"),
        ({"truncation": "auto"}, "truncation", "not offered"),
    ],
)
def test_what_cannot_be_answered_is_told_with_its_place(fields, param, message):
    error = refusal_of(request, fields)
    assert error.param == param
    assert message in error.message


# ------------------------------------------------------------------ what is told


def build(*pieces: Any, usage: Usage = USAGE) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of an answer as they are when they are told, and the response."""
    builder = ResponseBuilder(new_response(request(), "resp_1", "tiny", 5))
    told = [json.dumps(event) for event in builder.begin()]
    for piece in pieces:
        told += [json.dumps(event) for event in builder.add(piece)]
    told += [json.dumps(event) for event in builder.end(usage)]
    return [json.loads(event) for event in told], builder.response


def event_classes() -> dict[str, Any]:
    from openai.types.responses import ResponseStreamEvent

    union = typing.get_args(ResponseStreamEvent)[0]
    return {typing.get_args(kind.model_fields["type"].annotation)[0]: kind for kind in typing.get_args(union)}


MIXED = (*PIECES, ToolCallArguments(0, 1, "{}"), ChoiceEnd(0, "tool_calls"))


def test_events_come_in_openai_s_order():
    events, _ = build(*MIXED)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_every_event_and_the_response_are_what_openai_s_types_say():
    classes = event_classes()
    events, response = build(*MIXED)
    for event in events:
        classes[event["type"]].model_validate(event)
    assert events[-1]["response"] == response


def test_deltas_add_up_to_what_the_done_events_and_the_response_say():
    events, response = build(*MIXED)
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    assert list(texts.values()) == ["Let me see.", "\nBoth walls.", '{"color": "red"}', "{}"]
    done = [event.get("text", event.get("arguments")) for event in events if "text" in event or "arguments" in event]
    assert done == list(texts.values())
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == response["output"]
    assert [item["id"] for item in items] == list(texts)
    assert [item["status"] for item in items] == ["completed"] * 4


def test_items_begin_empty():
    events, _ = build(*MIXED)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 4
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], "", ""]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == events[1]["response"]["output"] == []


def test_the_usage_is_complete():
    _, response = build(ContentDelta(0, "Yes."), ChoiceEnd(0, "stop"))
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 11,
    }


def test_an_answer_that_was_cut_is_incomplete_and_so_is_its_last_item():
    events, response = build(ReasoningDelta(0, "Hm"), ContentDelta(0, "Ye"), ChoiceEnd(0, "length"))
    assert events[-1]["type"] == "response.incomplete"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_an_empty_answer_is_an_empty_message():
    events, response = build(ChoiceEnd(0, "stop"))
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["output"][0]["content"][0]["text"] == ""
    assert "response.output_text.delta" not in [event["type"] for event in events]


def test_white_space_between_calls_is_no_message_and_white_space_alone_is_one():
    _, response = build(
        ContentDelta(0, "\n"), ToolCallStart(0, 0, "a", "f"), ContentDelta(0, "\n"), ChoiceEnd(0, "tool_calls")
    )
    assert [item["type"] for item in response["output"]] == ["function_call"]
    _, response = build(ContentDelta(0, "\n"), ContentDelta(0, " "), ChoiceEnd(0, "stop"))
    assert response["output"][0]["content"][0]["text"] == "\n "


def test_logprobs_go_with_the_text_of_their_tokens():
    builder = ResponseBuilder(
        new_response(request(), "resp_1", "tiny", 5), lambda delta: [{"token": token} for token in delta.token_ids]
    )
    pieces = [
        ContentDelta(0, "", [1]),  # a part of a character
        ContentDelta(0, "é", [2]),
        ContentDelta(0, "t", [3]),
        ContentDelta(0, "", [4]),  # what ends it
        ChoiceEnd(0, "stop"),
    ]
    events = [event for piece in pieces for event in builder.add(piece)] + builder.end(USAGE)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [[{"token": 1}, {"token": 2}], [{"token": 3}]]
    all_of_them = [{"token": token} for token in (1, 2, 3, 4)]
    assert builder.response["output"][0]["content"][0]["logprobs"] == all_of_them


def test_a_failure_ends_the_stream_with_what_there_was():
    builder = ResponseBuilder(new_response(request(), "resp_1", "tiny", 5))
    builder.begin()
    builder.add(ContentDelta(0, "Ye"))
    (event,) = builder.fail(ApiError(500, "The step failed.", type="server_error"))
    event_classes()["response.failed"].model_validate(event)
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "server_error", "message": "The step failed."}
    assert event["response"]["output"][0]["status"] == "incomplete"


# ------------------------------------------------------------------ over HTTP


@pytest.fixture(scope="module")
def openai_client(server):
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


GREEDY = {"model": "tiny", "input": "Hello", "temperature": 0, "max_output_tokens": 12}


def test_openai_s_client_gets_the_same_answer_whole_and_as_a_stream(openai_client):
    whole = openai_client.responses.create(**GREEDY)
    assert whole.status == "incomplete" and whole.usage.output_tokens == 12
    classes = event_classes()
    events = list(openai_client.responses.create(**GREEDY, stream=True))
    for event in events:
        classes[event.type].model_validate(event.model_dump(by_alias=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 12


def test_openai_s_stream_helper_ends_with_the_response(openai_client):
    schema = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}
    with openai_client.responses.stream(**GREEDY, text={"format": schema}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert json.loads(final.output_text) in ("yes", "no")


def test_a_named_tool_is_called_and_streamed_alike(openai_client):
    arguments = {
        **GREEDY,
        "max_output_tokens": 64,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "paint"},
    }
    (call,) = openai_client.responses.create(**arguments).output
    assert call.type == "function_call" and json.loads(call.arguments)["color"] in ("red", "blue")
    with openai_client.responses.stream(**arguments) as stream:
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)


def test_logprobs_are_there_if_they_are_included(openai_client):
    response = openai_client.responses.create(**GREEDY, include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = response.output[0].content
    assert len(part.logprobs) == 12
    assert len(part.logprobs[0].top_logprobs) == 2
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode("utf-8", "replace") == part.text


def test_a_conversation_goes_on_with_what_was_answered(openai_client):
    first = openai_client.responses.create(**GREEDY)
    said = [{"role": "user", "content": "Hello"}, *(item.model_dump() for item in first.output)]
    second = openai_client.responses.create(**{**GREEDY, "input": [*said, {"role": "user", "content": "And?"}]})
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_thinking_is_an_item_of_its_own(make_client):
    client = make_client(reasoning_parser="deepseek_r1")
    answer = client.post("/v1/responses", json={**GREEDY, "ignore_eos": True}).json()
    assert answer["status"] == "incomplete"
    assert [item["type"] for item in answer["output"]] == ["reasoning"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    stream = client.post("/v1/responses", json={**GREEDY, "ignore_eos": True, "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    text = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": text}]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_reasoning_are_not_those_of_the_text_behind_it(make_client, stream):
    client = make_client(reasoning_parser="deepseek_r1")
    fields = {"include": ["message.output_text.logprobs"], "max_output_tokens": 60, "stream": stream}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestParsers, "constrain", lambda self, params, tokenizer, **_: params)
        body = {**GREEDY, **fields, "structured_outputs": {"choice": ["Well.</think>\n\nYes."]}}
        answered = client.post("/v1/responses", json=body)
    response = answered.json() if not stream else json.loads(answered.text.splitlines()[-2].removeprefix("data: "))
    output = (response if not stream else response["response"])["output"]
    (part,) = output[-1]["content"]
    assert part["text"] == "Yes."
    text = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
    assert text.removesuffix("<|end|>").strip() == "Yes."


def test_errors_name_the_fields_of_this_api(server):
    with server.client() as client:
        answer = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 10**9})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "input" and error["code"] == "context_length_exceeded"
        assert "`max_output_tokens`" in error["message"] and "`max_tokens`" not in error["message"]
        answer = client.post("/v1/responses", json={"input": "x", "model": "other"})
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_a_deadline_ends_a_stream_with_a_failed_response(server):
    body = {"input": "x", "stream": True, "max_output_tokens": 4000, "ignore_eos": True, "request_timeout": 0.05}
    with server.client() as client:
        lines = client.post("/v1/responses", json=body).text.splitlines()
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["type"] == "response.failed"
    assert "0.05 s" in last["response"]["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server, stream):
    scheduler, finished = server.service.engine.engine.live.scheduler, server.service.metrics.finished
    num_aborted = finished["abort"]
    body = json.dumps({"input": "x", "max_output_tokens": 4000, "ignore_eos": True, "stream": stream})
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with server.connect() as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        wait_until(lambda: scheduler.num_running == 1)
    wait_until(lambda: finished["abort"] == num_aborted + 1)
    assert scheduler.num_running == 0
    assert server.service.metrics.kv_cache_usage == 0


def test_events_carry_their_type_as_the_name_of_the_event(server):
    with server.client() as client:
        answer = client.post("/v1/responses", json={**GREEDY, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
