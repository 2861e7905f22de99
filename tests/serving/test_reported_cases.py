"""What users of other servers reported, asked of this one over HTTP. Where a report is public, its test names it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import time
from typing import Any

import httpx
import pytest

from hf_paged.serving.service import RequestContext
from tests.serving.attacks import CHAT, COMPLETIONS, Target, assert_well, bystander, hang_up
from tests.serving.events import events_of
from tests.serving.servers import chat, wait_until
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def target(tiny_checkpoint):  # noqa: F811
    """A server that is not asked for much else."""
    with Target(tiny_checkpoint, max_model_len=2048) as target:
        yield target


@pytest.fixture(scope="module")
def openai(target):
    """The official client."""
    module = pytest.importorskip("openai")
    return module.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hello", "max_tokens": 6, **fields}


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    return response.json()["error"]


# ---------------------------------------------------------------------- refusals


def test_a_refusal_for_length_has_the_three_numbers(target):
    """vllm-project/vllm#33418: the message spoke of a context of 3 tokens."""
    message = error_of(target.send(COMPLETIONS, completion(prompt=[5] * 8, max_tokens=2045)))["message"]
    assert all(number in message for number in ("2048", " 8 ", "2045"))
    response = target.send(COMPLETIONS, completion(prompt=[5] * 8, max_tokens=2040, stop_token_ids=list(range(600))))
    assert response.status_code == 200, "it fits exactly"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_long_prompt_without_max_tokens_is_refused_for_its_length(target, path):
    """vllm-project/vllm#4667: "max_tokens must be at least 1, got -186"."""
    body = {"messages": [{"role": "user", "content": "x y " * 3000}]} if path == CHAT else {"prompt": [5] * 3000}
    error = error_of(target.send(path, body))
    assert error["code"] == "context_length_exceeded" and "2048" in error["message"]
    assert "-" not in error["message"], "no negative number"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [[]]}),
        (COMPLETIONS, {"prompt": [""]}),
        (COMPLETIONS, {"prompt": ["Hello", ""]}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": None}),
        (CHAT, {}),
    ],
)
def test_empty_prompts_are_refused(target, path, body):
    """vllm-project/vllm#7283: one killed the server of a model whose tokenizer adds no first token."""
    assert error_of(target.send(path, body))["message"]
    assert_well(target)


@pytest.mark.parametrize("value", [0.5, 1.3, 2])
def test_repetition_penalties_are_taken(target, value):
    """vllm-project/vllm#28307: a request took the engine down."""
    assert target.send(COMPLETIONS, completion(repetition_penalty=value)).status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "NaN", "Infinity", '"1"', "1e-320", "1e308", "[1]"])
def test_repetition_penalties_that_are_none_are_refused(target, value):
    body = json.dumps(completion(repetition_penalty=0)).replace(
        '"repetition_penalty": 0', f'"repetition_penalty": {value}'
    )
    response = target.send(COMPLETIONS, body.encode())
    # A text that is a number is taken as one, as by OpenAI's other servers.
    assert response.status_code == (200 if value == '"1"' else 400), response.text
    assert_well(target)


@pytest.mark.parametrize("seconds", [1e-320, 1e-9])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_is_over_before_the_first_token_is_told(target, seconds, stream, monkeypatch):
    """With everything else that is only known with the first token."""
    monkeypatch.setattr(RequestContext, "before_deadline", lambda self: contextlib.nullcontext())
    body = completion(
        request_timeout=seconds, echo=True, logprobs=2, prompt_logprobs=1, return_token_ids=True, max_tokens=300
    )
    response = target.send(COMPLETIONS, {**body, "stream": stream, "ignore_eos": True})
    if stream:
        assert events_of(response.text)[-1]["error"]["code"] == "deadline_exceeded"
    else:
        assert response.status_code == 408 and response.json()["error"]["code"] == "deadline_exceeded"
    assert_well(target)


# ---------------------------------------------------------------------- answers


def test_fields_beyond_openais_reach_the_sampler_through_its_client(openai):
    """vllm-project/vllm#2754, #17075: `top_k` was dropped on the way."""

    def text(**extra: Any) -> str:
        answer = openai.completions.create(model="tiny", prompt="Hello", max_tokens=12, temperature=2, extra_body=extra)
        return answer.choices[0].text

    assert len({text(top_k=1) for _ in range(3)}) == 1
    assert len({text(min_p=1.0) for _ in range(3)}) == 1
    assert len({text() for _ in range(3)}) > 1


def test_answers_of_a_prompt_differ_and_come_again_with_the_seed(target):
    """vllm-project/vllm#10852: they were all the same."""
    body = completion(n=4, temperature=1, seed=7, max_tokens=12)
    first, second = ([c["text"] for c in target.send(COMPLETIONS, body).json()["choices"]] for _ in range(2))
    assert first == second and len(set(first)) == 4


def test_scores_are_json_whatever_is_ruled_out(target):
    """vllm-project/vllm#10234: -inf cannot be written."""
    body = completion(echo=True, logprobs=5, top_k=1, prompt_logprobs=3, allowed_token_ids=[5, 6])
    response = target.send(COMPLETIONS, body)
    assert response.status_code == 200
    json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(
    ("n", "limit"), itertools.product([1, 2], [{"max_tokens": 7, "ignore_eos": True}, {"stop": "e"}])
)
def test_token_counts_are_those_of_the_tokens(target, n, limit):
    """vllm-project/vllm#8625: the count at the end of a stream was another one."""
    body = {**completion(n=n, seed=1, max_tokens=30, return_token_ids=True), **limit}
    whole = target.send(COMPLETIONS, body).json()
    counted = sum(len(choice["token_ids"]) for choice in whole["choices"])
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of(target.send(COMPLETIONS, stream).text)
    streamed = sum(len(choice["token_ids"]) for chunk in chunks for choice in chunk["choices"])
    assert whole["usage"]["completion_tokens"] == counted == streamed == last["usage"]["completion_tokens"]
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)


def test_the_official_client_sees_the_counts_once(openai):
    """ggml-org/llama.cpp#15443, sgl-project/sglang#954."""
    stream = openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert last.choices == [] and last.usage.completion_tokens <= 8
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


CALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 0},
        {"logprobs": True, "top_logprobs": 5},
        {"tools": [CALL], "tool_choice": "none"},
        {"tools": [CALL], "tool_choice": "required", "max_tokens": 60},
        {"tools": [CALL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [CALL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "max_tokens": 1},
        {"response_format": {"type": "json_object"}, "max_tokens": 1},
        {"max_tokens": 1},
        {"stop": ["a", "e", "i", "o", " "]},
    ],
)
def test_every_answer_is_what_the_official_clients_types_say(target, fields):
    """JamePeng/llama-cpp-python#113, abetlen/llama-cpp-python#1314, vllm-project/vllm#4795."""
    types = pytest.importorskip("openai.types.chat")
    whole = target.send(CHAT, chat(**{"seed": 1, **fields}))
    assert whole.status_code == 200, whole.text
    answer = types.ChatCompletion.model_validate(whole.json(), strict=True)
    for choice in answer.choices:
        assert choice.finish_reason != "tool_calls" or choice.message.tool_calls
        for entry in (choice.logprobs.content or ()) if choice.logprobs else ():
            assert bytes(entry.bytes).decode("utf-8", "replace") and entry.logprob <= 0
            assert len(entry.top_logprobs) == fields.get("top_logprobs", 0)
    for chunk in events_of(target.send(CHAT, chat(**{"seed": 1, **fields, "stream": True})).text):
        types.ChatCompletionChunk.model_validate(chunk, strict=True)


# ---------------------------------------------------------------------- others at the same time


def test_sixty_clients_that_vanish_leave_all_seats_free(tiny_checkpoint):  # noqa: F811
    """raullenchai/Rapid-MLX#1759: the server went on accepting and answered nobody."""
    with Target(tiny_checkpoint, max_num_seqs=4) as target:
        body = json.dumps(chat(stream=True, max_tokens=3000, ignore_eos=True)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        for i in range(60):
            with target.connect() as connection:
                connection.sendall(head.encode() + body)
                if i % 3 == 0:
                    assert connection.recv(64).startswith(b"HTTP/1.1 200")
                if i % 2:
                    hang_up(connection)
        started = time.monotonic()
        assert target.next_answer() == target.next
        assert time.monotonic() - started < 5
        assert_well(target)
        wait_until(lambda: target.service.engine.num_running == target.service.engine.num_waiting == 0)


def test_answers_do_not_change_while_others_come_and_go(target):
    """kekzl/imp#1314: they did, with 45 others and in a storm of aborts."""

    def another(i: int) -> None:
        target.send(
            COMPLETIONS, completion(prompt=f"Number {i}", max_tokens=10 + i % 30, temperature=i % 3, n=1 + i % 2)
        )

    def leave(i: int) -> None:
        with target.client() as client, client.stream("POST", CHAT, json=chat(f"{i}", stream=True, max_tokens=900)):
            pass

    with bystander(target), concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(another, range(45)))
        list(pool.map(leave, range(40)))
    assert_well(target)


def test_scores_of_equal_requests_are_equal(target):
    """vllm-project/vllm#7779."""
    body = completion(
        prompt="The same prompt each time, and longer than a block of the cache. " * 2, logprobs=5, temperature=0
    )
    answers = [target.send(COMPLETIONS, body).json()["choices"][0] for _ in range(20)]
    assert all(answer == answers[0] for answer in answers)
