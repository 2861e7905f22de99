"""A server that answers, refuses, breaks off or is not there."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hf_paged.errors import ConfigurationError, EngineError, InvalidRequestError
from hf_paged.tools.terminal.remote import RemoteServer

MODELS = {"data": [{"id": "first", "max_model_len": 64}, {"id": "second"}]}
CHUNKS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "Grö"}}]},
    {"choices": [{"delta": {"content": "ße"}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    },
]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the test's `world` says."""

    world: dict[str, Any]

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(self.world.get("models", (200, MODELS)))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.world.setdefault("asked", []).append((self.path, body, self.headers.get("Authorization")))
        self._answer(self.world["answer"])

    def _answer(self, answer: Any) -> None:
        status, body = answer
        self.send_response(status)
        self.end_headers()
        if isinstance(body, dict):
            self.wfile.write(json.dumps(body).encode())
            return
        for chunk in body:
            self.wfile.write(
                b": a comment\n\n" + f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n".encode()
            )


@pytest.fixture
def world() -> Iterator[dict[str, Any]]:
    world: dict[str, Any] = {"answer": (200, [*CHUNKS, "[DONE]"])}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Handler,), {"world": world}))
    world["url"] = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield world
    server.shutdown()
    server.server_close()


def test_an_answer_streams_and_is_counted(world, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    server = RemoteServer(world["url"] + "/v1/")
    assert (server.name, server.max_model_len) == ("first", 64)
    pieces: list[str] = []
    answer = server.chat([{"role": "user", "content": "Hi"}], {"temperature": 0, "max_tokens": None}, pieces.append)
    assert pieces == ["Grö", "ße"] and answer.text == "Größe" and answer.finish_reason == "stop"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (7, 2, 4)
    path, body, key = world["asked"][0]
    assert path == "/v1/chat/completions" and key == "Bearer key"
    assert body["model"] == "first" and body["temperature"] == 0 and body["stream"] and "max_tokens" not in body


def test_a_text_is_continued_by_a_model_of_choice(world):
    world["answer"] = (200, [{"choices": [{"text": "b", "finish_reason": "length"}]}, "[DONE]"])
    server = RemoteServer(world["url"], "second", seed=1)
    answer = server.complete("a", {"max_tokens": 3}, len)
    assert answer.text == "b" and answer.finish_reason == "length" and answer.completion_tokens is None
    path, body, _ = world["asked"][0]
    assert path == "/v1/completions" and body["prompt"] == "a" and body["model"] == "second" and body["seed"] >= 0


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigurationError, match="--base-url"):
        RemoteServer(url)


def test_a_server_that_is_not_there_is_told_with_the_way_out():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigurationError, match="^No server answers at .*hf-paged serve"):
            RemoteServer(f"http://127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ((200, {"data": []}), "serves no model"),
        ((200, {}), "as OpenAI does"),
        ((404, {}), "name the MODEL"),
        ((401, {"error": {"message": "no key"}}), "wants a key .no key.; set OPENAI_API_KEY"),
    ],
)
def test_a_server_without_models_is_told(world, models, message, monkeypatch):
    for name in ("OPENAI_API_KEY", "HF_PAGED_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    world["models"] = models
    with pytest.raises(ConfigurationError, match=message):
        RemoteServer(world["url"])


def test_a_model_that_it_has_not_is_told_with_those_that_it_has(world):
    with pytest.raises(ConfigurationError, match="no model 'third'; it has first, second"):
        RemoteServer(world["url"], "third")


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((400, {"error": {"message": "too long"}}), InvalidRequestError, "answers 400: too long"),
        ((503, {"detail": "busy"}), EngineError, "answers 503: .*busy"),
        ((200, CHUNKS[:2]), EngineError, "before the answer was complete"),
        ((200, [CHUNKS[1], {"error": {"message": "the engine died"}}]), EngineError, "broke off: the engine died"),
        ((200, ["{oops"]), EngineError, "not JSON"),
    ],
)
def test_an_answer_that_is_none_is_an_error(world, answer, kind, message):
    world["answer"] = answer
    with pytest.raises(kind, match=message):
        RemoteServer(world["url"]).chat([{"role": "user", "content": "Hi"}], {}, len)
