"""Every place in the body of every route gets every kind of JSON: nothing is answered with 5xx, and nobody waits."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving.attacks import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Target,
    assert_well,
    bystander,
    padded_checkpoint,
)
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401 - a fixture

EXPECTED = {200, 400, 404, 408}


@pytest.fixture(scope="module")
def target(tiny_checkpoint, tmp_path_factory):  # noqa: F811
    folder = padded_checkpoint(tiny_checkpoint, tmp_path_factory.mktemp("padded") / "model")
    # Answers that no field limits are short.
    settings: dict[str, Any] = {"max_model_len": 1024, "override_generation_config": {"max_new_tokens": 4}}
    with Target(folder, enable_auto_tool_choice=True, tool_call_parser="hermes", **settings) as target:
        yield target


class Raw(str):
    """JSON as it is written."""


ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, -(2**63), 2**64, 10**30, 1.5, -2.5, 1e-320, 1e308),
    *(Raw("1" * 400), Raw("-0"), Raw("-0.0"), Raw("1e400"), Raw("-1e400"), Raw("NaN"), Raw("Infinity")),
    *(
        "",
        "x",
        "1",
        "\u00b2",
        "null",
        "none",
        "auto",
        "\x00",
        "a\x00b",
        "\u202e\x1b[31m",
        "\ufffe\U0010ffff",
        "x" * 3000,
    ),
    *(Raw(r'"\ud800"'), Raw(r'"\udfff\ud800"'), "file:///etc/passwd", "__class__", "{{ 7*7 }}"),
    *([], [None], [[]], [[[[1]]]], ["x"], [1], [-1], [2**31], [1.5], [True], [{}], [5] * 50),
    *({}, {"": None}, {"a": 1}, {"type": "x"}, {"type": None}, {"type": {}}, {"$ref": "#"}, {"\x00": "\x00"}),
    *({"text": 1, "type": "text"}, {"\u00b2": 1}, {"1": None}, {"1": "x"}, Raw('{"a": 1, "a": "2"}')),
    *(Raw("[" * 120 + "]" * 120), Raw('{"a":' * 120 + "1" + "}" * 120)),
]
FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "strict": True,
}
SAMPLING: dict[str, Any] = {
    **{"model": "tiny", "max_tokens": 2, "stream": False, "stream_options": {"include_usage": True}},
    **{"min_tokens": 0, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.1},
    **{"frequency_penalty": 0.1, "repetition_penalty": 1.1, "seed": 1, "stop": ["zzzz"], "stop_token_ids": [5]},
    **{"include_stop_str_in_output": False, "ignore_eos": False, "bad_words": ["bad"], "logit_bias": {"7": 1.5}},
    **{"allowed_token_ids": list(range(9, 19)), "skip_special_tokens": True, "spaces_between_special_tokens": True},
    **{"truncate_prompt_tokens": 8, "use_beam_search": False, "add_special_tokens": True, "priority": 1},
    **{"return_tokens_as_token_ids": False, "request_id": "r", "request_timeout": 20.0, "cache_salt": "s", "user": "u"},
}
SAY = [{"role": "user", "content": "a"}]
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "name": "n", "content": [{"type": "text", "text": "x"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "y"},
]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "y"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "y"}], "is_error": False}
        ],
    },
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "a{1,3}"}, "b": {"type": "array", "items": {"minimum": 0}}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"x": {"enum": [1, "2"]}},
}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
OWN_TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}
# With every field of each route in one of them.
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {
        **SAMPLING, "n": 1, "best_of": 1, "messages": TURNS, "max_completion_tokens": 2, "logprobs": True,
        "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, "parallel_tool_calls": True,
        "reasoning_effort": "low", "include_reasoning": True, "add_generation_prompt": True,
        "continue_final_message": False, "documents": [{"a": "b"}], "chat_template_kwargs": {"a": 1},
        "modalities": ["text"], "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "verbosity": "low",
        "chat_template": None, "functions": None, "function_call": None, "audio": None, "echo": False,
    }),
    (CHAT, {"messages": SAY, "max_tokens": 2, "tools": [CHAT_TOOL], "tool_choice": NAMED}),
    (CHAT, {"messages": SAY, "max_tokens": 2, "tools": [CHAT_TOOL], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]},
    }}),
    (CHAT, {"messages": SAY, "max_tokens": 2, "response_format": {
        "type": "json_schema", "json_schema": {"name": "n", "description": "d", "strict": True, "schema": SCHEMA},
    }}),
    (COMPLETIONS, {
        **SAMPLING, "n": 1, "best_of": 1, "prompt": "hello", "logprobs": 2, "echo": True, "prompt_logprobs": 1,
        "return_token_ids": True, "suffix": "", "prompt_embeds": None,
    }),
    *[(COMPLETIONS, {"prompt": prompt, "max_tokens": 2}) for prompt in ([[5, 6], [7]], ["a", "b"])],
    *[
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2, name: form})
        for name, form in {
            "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a", "b"], "guided_grammar": 'start: "a"',
        }.items()
    ],
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2, "structured_outputs": {"structural_tag": TAG}}),
    ("/tokenize", {"model": "tiny", "prompt": "a", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {
        "messages": SAY, "add_generation_prompt": True, "continue_final_message": False, "chat_template": None,
        "chat_template_kwargs": {"a": 1}, "documents": [{"a": "b"}], "tools": [CHAT_TOOL],
    }),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6]}),
    (RESPONSES, {
        **{name: value for name, value in SAMPLING.items() if name != "max_tokens"}, "max_output_tokens": 2,
        "input": ITEMS, "instructions": "i", "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"], "top_logprobs": 2,
        "metadata": {"a": "b"}, "truncation": "disabled", "chat_template_kwargs": {"a": 1}, "background": False,
        "max_tool_calls": 3, "prompt_cache_key": "k", "store": False, "previous_response_id": None, "prompt": None,
    }),
    (RESPONSES, {"input": "a", "max_output_tokens": 2, "tools": [{"type": "function", **FUNCTION}], "tool_choice": {
        "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}],
    }}),
    (RESPONSES, {"input": "a", "max_output_tokens": 2, "text": {
        "format": {"type": "json_schema", "name": "n", "schema": SCHEMA},
    }}),
    (MESSAGES, {
        "model": "tiny", "max_tokens": 2, "system": [{"type": "text", "text": "s"}], "messages": BLOCKS,
        "tools": [OWN_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "stream": False,
        "stop_sequences": ["zz"], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"}, "service_tier": "auto", "cache_control": None,
    }),
    (MESSAGES, {
        "messages": SAY, "max_tokens": 2, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    }),
    (f"{MESSAGES}/count_tokens", {
        "model": "tiny", "messages": BLOCKS, "tools": [OWN_TOOL], "tool_choice": {"type": "any"},
    }),
]  # fmt: skip


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:50]:
        if not isinstance(key, int) or key < 4:
            yield from places(inner, (*place, key))


def replaced(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> bytes:
    """The body with something else in one place, as JSON."""
    body = copy.deepcopy(body)
    inner: Any = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = f"@{value}@" if isinstance(value, Raw) else value
    text = json.dumps(body)
    return (text.replace(json.dumps(f"@{value}@"), value) if isinstance(value, Raw) else text).encode()


def problem(answer: httpx.Response) -> str | None:
    """What is wrong with an answer to nonsense."""
    if answer.status_code not in EXPECTED:
        return f"{answer.status_code}: {answer.text[:300]}"
    if answer.status_code == 200:
        return None
    message = answer.json()["error"]["message"]
    if not message or len(answer.content) > 4096 or re.search(r"Traceback|pydantic_core|object at 0x", message):
        return f"is told {message[:300]!r}"
    return None


def check(target: Target, share: float, seed: int) -> int:
    """Sends so much of all there is. Returns how much it was."""
    source, count, found = random.Random(seed), 0, []
    for path, body in BODIES:
        assert target.send(path, body).status_code == 200, f"{path} {body!r:.200}"
        for place in places(body):
            for value in ODD_VALUES:
                if source.random() < share:
                    count += 1
                    wrong = problem(target.send(path, replaced(body, place, value)))
                    if wrong is not None:
                        found.append(f"{path} {place} = {value!r:.60} {wrong}")
    assert not found, "\n".join(found[:20])
    return count


def test_a_sample_of_all_fields_with_values_of_all_kinds(target):
    with bystander(target):
        assert check(target, share=0.03, seed=0) > 700
    assert_well(target)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_third_of_all_fields_with_values_of_all_kinds(target):
    with bystander(target):
        assert check(target, share=0.3, seed=1) > 7000
    assert_well(target)


@pytest.mark.parametrize("number", [2**64, 10**30, -(10**40)])
@pytest.mark.parametrize("stream", [False, True])
def test_numbers_of_any_size_come_back_as_they_were_sent(target, number, stream):
    schema = {"type": "object", "properties": {"a": {"enum": [number, float(2)]}}}
    fields = {"max_output_tokens": 2, "stream": stream, "max_tool_calls": abs(number)}
    answers = [
        target.send(RESPONSES, {"input": "a", **fields, "text": {"format": {"type": "json_schema", "schema": schema}}}),
        target.send(
            RESPONSES, {"input": "a", **fields, "tools": [{"type": "function", **FUNCTION, "parameters": schema}]}
        ),
    ]
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert str(number) in answer.text and str(abs(number)) in answer.text
