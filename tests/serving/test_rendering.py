"""Conversations become prompts as Transformers makes them; templates and messages that misbehave get a 400."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from hf_paged.serving import rendering
from tests.serving.servers import chat

PATH = "/v1/chat/completions"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SHOWING = "{{ messages | tojson }}{{ tools | tojson if tools else '' }}{{ documents | tojson if documents else '' }}"


@pytest.fixture
def template(client):
    """Sets the chat template of the server's tokenizer."""
    tokenizer = client.app.state.service.tokenizer
    before = tokenizer.chat_template

    def use(text: str | None) -> None:
        tokenizer.chat_template = text

    yield use
    tokenizer.chat_template = before


def prompt(client: Any, messages: Any, **fields: Any) -> str:
    """The text of the prompt that a conversation becomes."""
    tokens = client.post("/tokenize", json={"messages": messages, **fields})
    assert tokens.status_code == 200, tokens.text
    return client.post("/detokenize", json={"tokens": tokens.json()["tokens"]}).json()["prompt"]


def refusal(client: Any, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json=chat(**fields))
    assert response.status_code == 400, response.text
    return response.json()["error"]


# ------------------------------------------------------------------ what templates get


def test_prompts_are_those_of_transformers(client):
    tokenizer = client.app.state.service.tokenizer
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <|end|> there"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Nothing."},
    ]
    for fields in ({}, {"add_generation_prompt": False}):
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=fields.get("add_generation_prompt", True), return_dict=False
        )
        assert client.post("/tokenize", json={"messages": messages, **fields}).json()["tokens"] == expected
    body = chat(messages=messages, return_token_ids=True, max_tokens=1)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert client.post(PATH, json=body).json()["prompt_token_ids"] == expected


def test_the_last_message_can_be_continued(client, template):
    template(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    continued = prompt(client, messages, continue_final_message=True)
    assert continued == "[user]Count.<|end|>[assistant]One, two,"
    assert prompt(client, messages) == continued + "<|end|>[assistant]"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"content": "a\nb"},
        ),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"content": "a"}),
        ({"role": "user", "content": "a", "name": "Ann"}, {"content": "a", "name": "Ann"}),
        ({"role": "user", "content": ""}, {"content": ""}),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "tool", "content": "a", "tool_call_id": "7"}, {"content": "a", "tool_call_id": "7"}),
        ({"role": "assistant", "content": None, "refusal": "no"}, {"content": "no", "refusal": "no"}),
        ({"role": "assistant", "content": "a", "audio": None}, {"content": "a"}),
        (
            {"role": "assistant", "content": "a", "reasoning": "hm"},
            {"content": "a", "reasoning_content": "hm"},
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}],
            },
            {
                "content": "",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}],
            },
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "not json"}}]},
            {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "not json"}}]},
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 20_000}}]},
            {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "[" * 20_000}}]},
        ),
    ],
)
def test_messages_reach_the_template_as_it_expects_them(client, template, message, expected):
    template("{{ messages | tojson(sort_keys=True) }}")
    [shown] = json.loads(prompt(client, [message]))
    shown.pop("thinking", None)  # newer Transformers give the reasoning under this name, too
    assert shown == {"role": message["role"]} | expected


def test_a_template_that_knows_developers_gets_them(client, template):
    template("{{ messages[0].role }}{# developer #}")
    assert prompt(client, [{"role": "developer", "content": "a"}]) == "developer"


def test_roles_are_those_that_the_template_names(client, template):
    template("{% if messages[0].role == 'ipython' %}python{% endif %}")
    assert prompt(client, [{"role": "ipython", "content": "a"}]) == "python"
    error = refusal(client, messages=[{"role": "user|>", "content": "a"}])
    assert error["param"] == "messages[0].role"


def test_tools_and_documents_reach_the_template(client, template):
    template(SHOWING)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    shown = prompt(client, [{"role": "user", "content": "a"}], tools=tools, documents=[{"title": "t", "text": "x"}])
    assert '"name": "f"' in shown and '"title": "t"' in shown


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "input_image", "image_url": "http://127.0.0.1:9/x.png"},
    ],
)
def test_whatever_is_not_text_is_refused_and_not_fetched(client, part, monkeypatch):
    import socket

    def never(*arguments: Any) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(socket.socket, "connect", never)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    text = {"type": "text", "text": "What is this?"}
    error = refusal(client, messages=[{"role": "user", "content": [text, part]}])
    assert error["param"] == "messages[0].content[1].type" and part["type"] in error["message"]


# ------------------------------------------------------------------ arguments of templates


def test_arguments_that_a_template_mentions_reach_it(client, template):
    template("{{ messages[0].content }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}")
    messages = [{"role": "user", "content": "a"}]
    assert prompt(client, messages) == "a"
    assert prompt(client, messages, chat_template_kwargs={"enable_thinking": False, "other": 1}) == "aFalse"
    body = chat(messages=messages, reasoning_effort="none", return_token_ids=True, max_tokens=1)
    tokens = client.post(PATH, json=body).json()["prompt_token_ids"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "aFalse"


def test_the_operator_sets_arguments_that_requests_may_change(make_client):
    client = make_client(default_chat_template_kwargs={"mood": "good"})
    client.app.state.service.tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}"
    messages = [{"role": "user", "content": "a"}]
    assert prompt(client, messages) == "agood"
    assert prompt(client, messages, chat_template_kwargs={"mood": "bad"}) == "abad"


@pytest.mark.parametrize(
    "name",
    ["tokenize", "chat_template", "conversation", "messages", "tools", "add_generation_prompt", "return_dict"]
    + ["continue_final_message", "eos_token", "raise_exception", "strftime_now", "_x", "__class__", "tokenizer_kwargs"],
)
def test_arguments_that_are_not_for_requests_are_refused(client, name):
    error = refusal(client, chat_template_kwargs={name: True})
    assert error["param"] == "chat_template_kwargs" and name in error["message"]


def test_documents_may_come_as_an_argument(client, template):
    template(SHOWING)
    shown = prompt(client, [{"role": "user", "content": "a"}], chat_template_kwargs={"documents": [{"text": "x"}]})
    assert '"text": "x"' in shown
    assert refusal(client, chat_template_kwargs={"documents": "x"})["param"] == "documents"


# ------------------------------------------------------------------ templates that misbehave


def test_a_model_without_template_says_so(client, template):
    template(None)
    error = refusal(client)
    assert error["code"] == "no_chat_template" and "--chat-template" in error["message"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{% if %}", "Expected"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ 'a' * 99999999999999 }}", "MemoryError"),
    ],
)
def test_what_a_template_refuses_is_told(client, template, text, told):
    template(text)
    error = refusal(client)
    assert error["code"] == "chat_template_error" and told in error["message"]


def test_an_empty_prompt_is_refused(client, template):
    template("{# nothing #}")
    assert refusal(client)["code"] == "empty_prompt"


def test_half_a_surrogate_pair_is_no_text(client):
    body = '{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
    response = client.post(PATH, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    body = body.replace('"messages"', '"chat_template_kwargs": {"add": "\\udfff"}, "messages"').replace("d800", "0041")
    assert client.post(PATH, content=body, headers={"Content-Type": "application/json"}).status_code in (200, 400)


def test_the_servers_template_ends_in_time(client, template, monkeypatch):
    monkeypatch.setattr(rendering, "TEMPLATE_SECONDS", 0.3)
    template(ENDLESS)
    start = time.monotonic()
    for _ in range(3):
        assert refusal(client)["code"] == "chat_template_timeout"
    assert time.monotonic() - start < 10
    template("{{ messages[0].content }}")
    for _ in range(3):
        assert client.post(PATH, json=chat(max_tokens=1)).status_code == 200


def test_settings_of_a_checkpoint_neither_cut_nor_pad_prompts(client):
    tokenizer = client.app.state.service.tokenizer
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    try:
        rendering.warm_up(tokenizer)
        assert backend.truncation is None and backend.padding is None
        reply = client.post(PATH, json=chat("one two three four five six", max_tokens=1))
        assert 8 < reply.json()["usage"]["prompt_tokens"] < 64
    finally:
        backend.no_truncation()
        backend.no_padding()


def test_more_messages_than_a_context_has_tokens_are_refused_unread(client):
    error = refusal(client, messages=[{"role": "user", "content": ""}] * 9000)
    assert error["code"] == "context_length_exceeded"


def test_a_prompt_of_one_token_is_told_in_the_singular(client):
    error = rendering.too_long(client.app.state.service, "prompt", 1, 9000)
    assert "`prompt` has 1 token and an answer of up to 9000" in error.message


def test_tools_that_the_template_leaves_out_are_told_of_once(client, template, caplog):
    rendering._warn_of_unseen_tools.cache_clear()
    tools = [{"type": "function", "function": {"name": "f"}}]
    template(SHOWING)
    prompt(client, chat()["messages"], tools=tools)
    assert "leaves out" not in caplog.text
    template("{{ messages[0].content }}")
    for _ in range(2):
        prompt(client, chat()["messages"], tools=tools)
    assert caplog.text.count("A request has `tools`, which the chat template leaves out") == 1


# ------------------------------------------------------------------ templates of requests


def test_templates_of_requests_are_off_by_default(client):
    error = refusal(client, chat_template="{{ 1 }}")
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
    response = client.post("/tokenize", json={"messages": chat()["messages"], "chat_template": "{{ 1 }}"})
    assert response.status_code == 400


def test_templates_of_requests_run_where_they_can_be_stopped(make_client, monkeypatch):
    client = make_client(trust_request_chat_template=True)
    messages = [{"role": "user", "content": "Hi"}]
    own = "{{ messages[0].content }}{{ eos_token }}"
    assert prompt(client, messages, chat_template=own) == "Hi<|end|>"
    process = rendering._PROCESSES[client.app.state.service]
    first = process._process
    assert prompt(client, messages, chat_template=own + "!") == "Hi<|end|>!"
    for hungry in (
        "{{ 'a' * 99999999999 }}",
        "{% set x = namespace(s='a') %}{% for i in range(40) %}{% set x.s = x.s + x.s %}{% endfor %}",
    ):
        assert refusal(client, chat_template=hungry)["code"] == "chat_template_error"
    assert process._process is first, "one process for all"
    monkeypatch.setattr(rendering, "TEMPLATE_SECONDS", 0.5)
    assert refusal(client, chat_template=ENDLESS)["code"] == "chat_template_timeout"
    assert first.returncode is not None
    monkeypatch.undo()
    assert "unsafe" in refusal(client, chat_template="{{ messages.pop() }}")["message"]
    assert prompt(client, messages, chat_template=own) == "Hi<|end|>"
    process.end()
