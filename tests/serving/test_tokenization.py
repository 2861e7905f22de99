"""Texts, conversations and tokens, there and back."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("text", ["Hello world", "\u6f22\u5b57 \U0001f44d", "<|end|> and <|user|>", "  a\n\tb  "])
def test_texts_become_the_tokens_of_the_tokenizer_and_back(client, text):
    service = client.app.state.service
    reply = client.post("/tokenize", json={"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    tokens = service.tokenizer(text)["input_ids"]
    assert reply == {
        "count": len(tokens),
        "max_model_len": service.max_model_len,
        "tokens": tokens,
        "token_strs": service.tokenizer.convert_ids_to_tokens(tokens),
    }
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_empty_texts_have_no_tokens(client):
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_the_tokenizers_own_special_tokens_can_be_left_out(client, monkeypatch):
    tokenizer = client.app.state.service.tokenizer
    monkeypatch.setattr(
        type(tokenizer),
        "__call__",
        lambda self, text, add_special_tokens=True, **_: {"input_ids": [int(add_special_tokens)]},
    )
    assert client.post("/tokenize", json={"prompt": "x"}).json()["tokens"] == [1]
    assert client.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()["tokens"] == [0]


def test_texts_that_no_prompt_may_have_are_counted_too(client):
    limit = client.app.state.service.max_model_len
    reply = client.post("/tokenize", json={"prompt": "x y " * 50 * limit}).json()
    assert reply["count"] == len(reply["tokens"]) > reply["max_model_len"] == limit
    messages = [{"role": "user", "content": "x"}] * (limit + 1)
    assert client.post("/tokenize", json={"messages": messages}).json()["count"] > limit


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", 400),
        ("/tokenize", {"prompt": 5}, "prompt", 400),
        ("/tokenize", {"messages": []}, "messages", 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", 404),
        ("/detokenize", {}, "tokens", 400),
        ("/detokenize", {"tokens": "abc"}, "tokens", 400),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", 400),
        ("/detokenize", {"tokens": [600]}, "tokens", 400),
        ("/detokenize", {"tokens": [2**40]}, "tokens[0]", 400),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model", 404),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(client, path, body, param, status):
    response = client.post(path, json=body)
    assert response.status_code == status and response.json()["error"]["param"] == param


def test_clients_can_build_prompts_themselves(client):
    tokenizer = client.app.state.service.tokenizer
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|end|>" and info["eos_token_id"] == tokenizer.eos_token_id
    assert info["chat_template"] == tokenizer.chat_template
    assert info["vocab_size"] == len(tokenizer) and info["bos_token"] is None
