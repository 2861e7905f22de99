"""`langchain-openai` against a server that is named in the environment."""

from __future__ import annotations

import os

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

COMMON = {
    "base_url": os.environ["BASE_URL"],
    "api_key": os.environ["API_KEY"],
    "model": os.environ["MODEL"],
    "temperature": 0,
    "max_retries": 0,
}
chat = ChatOpenAI(max_tokens=24, stream_usage=True, **COMMON)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


class City(BaseModel):
    city: str = Field(max_length=20)


@tool(args_schema=City)
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def invoke_and_stream() -> None:
    answer = chat.invoke("Name three colours.")
    assert answer.content and answer.usage_metadata["output_tokens"] <= 24
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    pieces = list(chat.stream("Name three colours."))
    assert len(pieces) > 2 and "".join(piece.content for piece in pieces) == answer.content
    assert (
        sum(p.usage_metadata["output_tokens"] for p in pieces if p.usage_metadata)
        == answer.usage_metadata["output_tokens"]
    )
    assert [a.content for a in chat.batch(["Name three colours."] * 3)] == [answer.content] * 3
    probable = chat.bind(logprobs=True, top_logprobs=2).invoke("Name three colours.")
    assert probable.response_metadata["logprobs"]["content"]


def structured() -> None:
    longer = ChatOpenAI(max_tokens=80, **COMMON)
    for method in ("json_schema", "function_calling"):
        person = longer.with_structured_output(Person, method=method).invoke("Anna is 31 years old.")
        assert isinstance(person, Person), (method, person)


def tools() -> None:
    longer = ChatOpenAI(max_tokens=80, **COMMON)
    for choice in ("any", "get_weather"):
        answer = longer.bind_tools([get_weather], tool_choice=choice, strict=True).invoke(
            "What is the weather in Paris?"
        )
        (call,) = answer.tool_calls
        assert call["name"] == "get_weather" and set(call["args"]) == {"city"}
    gathered = None
    for piece in longer.bind_tools([get_weather], tool_choice="any", strict=True).stream(
        "What is the weather in Paris?"
    ):
        gathered = piece if gathered is None else gathered + piece
    assert gathered.tool_calls[0]["args"] == call["args"]
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    final = chat.invoke([HumanMessage("What is the weather in Paris?"), answer, result])
    assert final.content


def completions() -> None:
    model = OpenAI(max_tokens=6, **COMMON)
    text = model.invoke("One, two, three,")
    assert text and "".join(model.stream("One, two, three,")) == text


def errors() -> None:
    try:
        ChatOpenAI(**{**COMMON, "temperature": -1}).invoke("Hello")
    except openai.BadRequestError as error:
        assert error.body["param"] == "temperature"
    else:
        raise AssertionError("a negative temperature was accepted")


for check in (invoke_and_stream, structured, tools, completions, errors):
    check()
    print(check.__name__, "ok", flush=True)
