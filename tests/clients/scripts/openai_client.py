"""The `openai` package, 2.x and 3.x, against a server that is named in the environment."""

from __future__ import annotations

import asyncio
import json
import os

import openai
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], max_retries=0, timeout=120)
QUESTION = [{"role": "user", "content": "Name three colours."}]
GREEDY = {"model": MODEL, "temperature": 0, "seed": 1}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


def raises(kind, status: int, call, **fields) -> openai.APIStatusError:
    try:
        call(**fields)
    except kind as error:
        assert error.status_code == status, error
        return error
    raise AssertionError(f"{fields} raised nothing")


def models() -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and model.object == "model" and model.max_model_len > 0
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    answer = client.chat.completions.create(messages=QUESTION, max_tokens=24, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length") and answer.model == MODEL and answer.object == "chat.completion"
    usage = answer.usage
    assert 0 < usage.completion_tokens <= 24 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0
    again = client.chat.completions.create(messages=QUESTION, max_completion_tokens=24, **GREEDY)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0, "the same prompt was computed again"

    stream = client.chat.completions.create(
        messages=QUESTION, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == choice.finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == usage.completion_tokens
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks[:-1])

    with client.chat.completions.stream(messages=QUESTION, max_tokens=24, **GREEDY) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == choice.message.content


def several() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, temperature=1.0, seed=3, max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.logprobs.content and all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        assert all(token.logprob <= 0 for token in choice.logprobs.content)
        assert bytes(b for token in choice.logprobs.content for b in token.bytes or []).decode("utf-8", "replace")


def completions() -> None:
    answer = client.completions.create(prompt="One, two, three,", max_tokens=6, logprobs=2, echo=True, **GREEDY)
    (choice,) = answer.choices
    assert choice.text.startswith("One, two, three,") and choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens == len(choice.logprobs.text_offset)
    both = client.completions.create(prompt=["One, two,", "Red, green,"], max_tokens=5, **GREEDY)
    assert [choice.index for choice in both.choices] == [0, 1]
    ids = client.completions.create(prompt=[[504, 28], [19, 20, 21]], max_tokens=3, **GREEDY)
    assert len(ids.choices) == 2 and ids.usage.prompt_tokens == 5
    pieces = client.completions.create(prompt="One, two, three,", max_tokens=6, stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text.removeprefix("One, two, three,")
    stopped = client.completions.create(prompt="One, two, three,", max_tokens=40, stop=[","], **GREEDY)
    assert stopped.choices[0].finish_reason == "stop" and "," not in stopped.choices[0].text


def structured() -> None:
    schema = {"name": "person", "schema": Person.model_json_schema(), "strict": True}
    messages = [{"role": "user", "content": "Anna is 31 years old. Answer in JSON."}]
    answer = client.chat.completions.create(
        messages=messages, max_tokens=60, response_format={"type": "json_schema", "json_schema": schema}, **GREEDY
    )
    Person.model_validate_json(answer.choices[0].message.content)
    parsed = client.chat.completions.parse(messages=messages, max_tokens=60, response_format=Person, **GREEDY)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    free = client.chat.completions.create(
        messages=messages, max_tokens=60, response_format={"type": "json_object"}, **GREEDY
    )
    assert free.choices[0].finish_reason == "length" or json.loads(free.choices[0].message.content) is not None
    chosen = client.chat.completions.create(
        messages=messages, max_tokens=8, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}, **GREEDY
    )
    assert chosen.choices[0].message.content in ("yes", "no")


def tools() -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(
            messages=messages, tools=[WEATHER], tool_choice=choice, max_tokens=80, **GREEDY
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}
        assert call.id and call.type == "function"
    chunks = client.chat.completions.create(
        messages=messages, tools=[WEATHER], tool_choice=named, max_tokens=80, stream=True, **GREEDY
    )
    deltas = [d for chunk in chunks for c in chunk.choices for d in c.delta.tool_calls or ()]
    assert deltas[0].id and deltas[0].function.name == "get_weather"
    assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments
    history = [
        *messages,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"},
    ]
    answer = client.chat.completions.create(
        messages=history, tools=[WEATHER], tool_choice="none", max_tokens=20, **GREEDY
    )
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def responses() -> None:
    asked = {"model": MODEL, "input": "Name three colours.", "max_output_tokens": 16, "temperature": 0}
    answer = client.responses.create(**asked)
    assert answer.output_text and answer.usage.output_tokens <= 16
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == events[-1].response.output_text == answer.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def errors() -> None:
    create = client.chat.completions.create
    error = raises(openai.BadRequestError, 400, create, model=MODEL, messages=QUESTION, temperature=-1)
    assert error.body["param"] == "temperature" and "temperature" in error.body["message"]
    error = raises(openai.NotFoundError, 404, create, model="nobody", messages=QUESTION)
    assert error.body["code"] == "model_not_found"
    error = raises(openai.BadRequestError, 400, create, model=MODEL, messages=QUESTION, max_tokens=10**7)
    assert "max" in error.body["message"]
    stranger = client.with_options(api_key="wrong")
    raises(openai.AuthenticationError, 401, stranger.chat.completions.create, model=MODEL, messages=QUESTION)
    try:
        list(create(model=MODEL, messages=QUESTION, stream=True, extra_body={"n": 10**9}))
    except openai.APIStatusError as found:
        assert found.status_code in (400, 422)
    else:
        raise AssertionError("n of a thousand millions was accepted")


async def at_the_same_time() -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as many:
        jobs = (many.chat.completions.create(messages=QUESTION, max_tokens=12, **GREEDY) for _ in range(8))
        answers = await asyncio.gather(*jobs)
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert len({answer.id for answer in answers}) == 8


for check in (models, chat, several, completions, structured, tools, responses, errors):
    check()
    print(check.__name__, "ok", flush=True)
asyncio.run(at_the_same_time())
print("openai", openai.__version__, "ok")
