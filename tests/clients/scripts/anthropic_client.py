"""The `anthropic` package against a server that is named in the environment."""

from __future__ import annotations

import os

import anthropic

MODEL = os.environ["MODEL"]
# It adds `/v1` itself.
client = anthropic.Anthropic(base_url=os.environ["BASE_URL"].removesuffix("/v1"), api_key=os.environ["API_KEY"])
ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name three colours."}],
    "extra_body": {"temperature": 0},
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def messages() -> None:
    answer = client.messages.create(max_tokens=16, **ASKED)
    assert answer.type == "message" and answer.role == "assistant" and answer.model == MODEL
    assert answer.content[0].type == "text" and answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens") and 0 < answer.usage.output_tokens <= 16
    with client.messages.stream(max_tokens=16, **ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == answer.content[0].text and final.usage.output_tokens == answer.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    client.messages.create(max_tokens=4, system="You are a painter.", stop_sequences=["red"], **ASKED)


def tools() -> None:
    asked = {**ASKED, "tools": [WEATHER], "max_tokens": 80}
    alone = {"disable_parallel_tool_use": True}
    for choice in ({"type": "tool", "name": "get_weather", **alone}, {"type": "any", **alone}):
        answer = client.messages.create(tool_choice=choice, **asked)
        (call,) = (block for block in answer.content if block.type == "tool_use")
        assert call.name == "get_weather" and set(call.input) == {"city"} and answer.stop_reason == "tool_use"
    with client.messages.stream(tool_choice={"type": "any", **alone}, **asked) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]},
        {"role": "user", "content": [result]},
    ]
    client.messages.create(model=MODEL, messages=history, tools=[WEATHER], max_tokens=8)


def errors() -> None:
    for kind, fields in (
        (anthropic.BadRequestError, {"max_tokens": 4, "extra_body": {"temperature": -1}}),
        (anthropic.NotFoundError, {"max_tokens": 4, "model": "nobody"}),
    ):
        try:
            client.messages.create(**{**ASKED, **fields})
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"]
        else:
            raise AssertionError(f"{fields} was accepted")
    try:
        client.with_options(api_key="wrong").messages.create(max_tokens=4, **ASKED)
    except anthropic.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was accepted")


for check in (messages, tools, errors):
    check()
    print(check.__name__, "ok", flush=True)
