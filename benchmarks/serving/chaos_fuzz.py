"""Requests of all kinds, right ones and wrong ones, with parameters crossed at random."""

from __future__ import annotations

import random
from typing import Any

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize",
    "/v1/messages/count_tokens",
)  # fmt: skip
TEXT = (
    "one two red green why how tell me a story about the sea and 3 small boats <|im_end|> \u00e9 \u6f22 \U0001f600 \x00"
)
WORDS = TEXT.split(" ")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# The first of each are right, most of the rest are wrong; fields that are not named keep their defaults.
VALUES: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1.0, 2.0, -1, 1e30, "hot", None],
    "top_p": [1.0, 0.5, 1e-9, 0, 1.5, None],
    "top_k": [0, 1, 20, -1, 10**9, 1.5, "x"],
    "min_p": [0.0, 0.2, 1.0, -0.1, 2],
    "frequency_penalty": [0, 1.0, -2, 3, "x"],
    "presence_penalty": [0, 1.0, -2, 1e9],
    "repetition_penalty": [1.0, 1.3, 0.5, 0, -1, 1e30],
    "n": [1, 2, 4, 0, -3, 10**9, "2", None],
    "seed": [0, 7, -1, 2**63, "x", None],
    "stop": ["the", ["a", "b"], [], [""], ["x"] * 50, 5, None],
    "stop_token_ids": [[2], [], [-1], [2**31], ["x"]],
    "logit_bias": [{"5": 10}, {"5": -100}, {"-1": 3}, {"999999999": 1}, {"x": 1}, [1], None],
    "logprobs": [1, 3, True, False, -1, 10**6, None],
    "top_logprobs": [0, 2, 20, 21, -1],
    "prompt_logprobs": [0, 2, -1, 10**6],
    "min_tokens": [0, 3, 2**31, -1],
    "ignore_eos": [True, False, "x"],
    "echo": [True, False],
    "bad_words": [["the"], [], [""], ["x"] * 1000],
    "allowed_token_ids": [[5, 6, 7], [], [-1], [2**31]],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True],
    "truncate_prompt_tokens": [4, 0, -1, 10**9],
    "priority": [0, 5, -5, "x"],
    "cache_salt": ["a", "", "x" * 2000, 5],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 7}}},
        {"type": "xml"},
    ],
    "structured_outputs": [{"choice": ["yes", "no"]}, {"regex": "[ab]{3}"}, {"regex": "("}, {"grammar": "a ::="}, {}],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], [], [{}], 5],
    "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "g"}}],
    "chat_template_kwargs": [{}, {"a": 1}, 5],
    "stream_options": [{"include_usage": True}, {}, 5],
    "return_token_ids": [True],
    "user": ["me", 5],
    "unheard_of": [{"a": [1]}],
}  # fmt: skip


def random_request(source: random.Random, model: str, wildness: float = 0.3) -> tuple[str, dict[str, Any]]:
    """Returns a path and a body.

    Args:
        source (`random.Random`):
            Chooses.
        model (`str`):
            The model's name.
        wildness (`float`, defaults to 0.3):
            How often a field gets a value that may be wrong, and another number of requests is as wrong as can be.
    """
    path = source.choices(PATHS, (8, 8, 3, 3, 1, 1, 1))[0]
    body = _required(source, path, model)
    names = source.sample(list(VALUES), source.choice((0, 1, 2, 4, 8)))
    for name in names:
        values = VALUES[name]
        body[name] = source.choice(values) if source.random() < wildness else values[0]
    if source.random() < 0.5:
        body["stream"] = True
    if source.random() < wildness / 4:
        body[source.choice(list(body))] = source.choice((None, [], {}, "x", -1, 2**70, [[[]]]))
    return path, body


def _required(source: random.Random, path: str, model: str) -> dict[str, Any]:
    text = " ".join(source.choices(WORDS, k=source.choice((1, 3, 20, 100))))
    most = source.choice((1, 4, 16, 48))
    messages = [{"role": "user", "content": text}]
    kinds: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": source.choice((text, [text, "two"], [5, 6, 7])), "max_tokens": most},
        "/v1/chat/completions": {"messages": messages, "max_tokens": most},
        "/v1/responses": {"input": text, "max_output_tokens": most},
        "/v1/messages": {"messages": messages, "max_tokens": most},
        "/v1/messages/count_tokens": {"messages": messages},
        "/tokenize": {"prompt": text},
        "/detokenize": {"tokens": [5, 6, 7]},
    }
    return {"model": model, **kinds[path]}
