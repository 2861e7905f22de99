"""A server that answers, refuses, breaks off or is not there."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hf_paged.cli import main
from hf_paged.errors import ConfigurationError, EngineError, InvalidRequestError
from hf_paged.tools.terminal.remote import KEY_VARIABLES, RemoteServer

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
        self.world.setdefault("got", []).append((self.path, self.headers.get("Authorization")))
        self._answer(self.world.get("models", (200, MODELS)))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.world.setdefault("asked", []).append((self.path, body, self.headers.get("Authorization")))
        self._answer(self.world["answer"])

    def _answer(self, answer: Any) -> None:
        status, body, *headers = answer
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if not isinstance(body, list):
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())
            return
        for chunk in body:
            self.wfile.write(
                b": a comment\n\n" + f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n".encode()
            )


@contextlib.contextmanager
def serving() -> Iterator[dict[str, Any]]:
    world: dict[str, Any] = {"answer": (200, [*CHUNKS, "[DONE]"])}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Handler,), {"world": world}))
    world["url"] = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield world
    server.shutdown()
    server.server_close()


@pytest.fixture
def world() -> Iterator[dict[str, Any]]:
    with serving() as world:
        yield world


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


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


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://host", "http://", "http://[::1", "http://127.0.0.1:abc", "http://a b", "http://a\n.b/"],
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigurationError, match="`--base-url` must be an http or https URL"):
        RemoteServer(url)


@pytest.mark.parametrize(
    "url", ["http://me:secret@host", "me:secret@host", "http://me:secret@[::1", "http://a@/secret@h"]
)
def test_a_password_in_a_url_is_refused_and_not_shown(url):
    with pytest.raises(ConfigurationError, match="user or a password") as refused:
        RemoteServer(url)
    assert "secret" not in str(refused.value)


def test_a_redirect_is_told_and_neither_key_nor_question_follows_it(world, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving() as other:
        world["models"] = 302, {}, ("Location", other["url"] + "/v1/models")
        with pytest.raises(ConfigurationError, match=f"answers 302 and sends to {other['url']}.*`--base-url`"):
            RemoteServer(world["url"])
        del world["models"]
        for status in (301, 307, 308):
            world["answer"] = status, {}, ("Location", other["url"] + "/v1/chat/completions")
            with pytest.raises(ConfigurationError, match=f"answers {status}"):
                RemoteServer(world["url"]).chat([{"role": "user", "content": "Hi"}], {}, len)
        assert not other.get("got") and not other.get("asked")


def test_a_key_is_sent_without_the_space_around_it(world, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " \n")
    monkeypatch.setenv("HF_PAGED_API_KEY", "secret\n")
    RemoteServer(world["url"])
    assert world["got"][0] == ("/v1/models", "Bearer secret")


@pytest.mark.parametrize("key", ["sec\nret", "secr€t", "sec\x7fret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"^`--api-key` is no key") as refused:
        RemoteServer("http://127.0.0.1:1", api_key=key)
    assert key[:3] not in str(refused.value)
    monkeypatch.setenv("HF_PAGED_API_KEY", key)
    with pytest.raises(ConfigurationError, match="^HF_PAGED_API_KEY is no key"):
        RemoteServer("http://127.0.0.1:1")


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
        ((200, {"data": "text"}), "as OpenAI does"),
        ((200, {"data": [{"name": "first"}]}), "as OpenAI does"),
        ((200, "[" * 100_000), "as OpenAI does"),
        ((404, {}), "name the MODEL"),
        ((401, {"error": {"message": "no key"}}), "wants a key .no key.; set OPENAI_API_KEY"),
    ],
)
def test_a_server_without_models_is_told(world, models, message):
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
        ((200, ["[" * 60_000]), EngineError, "not JSON"),
        ((503, {"detail": "busy"}, ("Retry-After", "7")), EngineError, r"busy.* \(Retry-After: 7\)"),
        ((500, "[" * 100_000), EngineError, "answers 500: Internal Server Error"),
    ],
)
def test_an_answer_that_is_none_is_an_error(world, answer, kind, message):
    world["answer"] = answer
    with pytest.raises(kind, match=message):
        RemoteServer(world["url"]).chat([{"role": "user", "content": "Hi"}], {}, len)


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (5, "an event is 5"),
        (None, "an event is None"),
        ({"choices": 5}, "`choices` is 5"),
        ({"choices": ["a"]}, "is 'a'"),
        ({"choices": [{"delta": "a"}]}, "`delta` is 'a'"),
        ({"choices": [{"delta": {"content": ["a"]}}]}, r"`content` is \['a'\]"),
        ({"choices": [{"text": {"a": 1}}]}, "`text` is {'a': 1}"),
        ({"choices": [{"text": "a", "finish_reason": 1}]}, "`finish_reason` is 1"),
        ({"choices": [{"text": "a\ud800"}]}, "a text is "),
        ({"choices": [], "usage": [1]}, r"`usage` is \[1\]"),
        ({"choices": [], "usage": {"completion_tokens": "two"}}, "`completion_tokens` is 'two'"),
        ({"choices": [], "usage": {"prompt_tokens_details": 3}}, "`prompt_tokens_details` is 3"),
    ],
)
def test_an_event_that_is_not_openais_is_an_error_that_shows_it(world, event, what):
    world["answer"] = (200, [*CHUNKS[:3], event, "[DONE]"])
    pieces: list[str] = []
    with pytest.raises(EngineError, match=f"did not answer as OpenAI does: .*{what}"):
        RemoteServer(world["url"]).chat([{"role": "user", "content": "Hi"}], {}, pieces.append)
    assert pieces == ["Grö", "ße"]


def test_what_writing_raises_is_not_taken_for_the_servers_error(world):
    def write(text: str) -> None:
        raise TypeError(text)

    with pytest.raises(TypeError, match="Grö"):
        RemoteServer(world["url"]).chat([{"role": "user", "content": "Hi"}], {}, write)


def test_an_error_begins_a_line_of_its_own(world, capsys):
    world["answer"] = (200, CHUNKS[:2])
    with pytest.raises(SystemExit) as ended:
        main(["complete", "--base-url", world["url"], "Hi"])
    captured = capsys.readouterr()
    assert ended.value.code == 1 and captured.out == "Grö\n" and captured.err.startswith("hf-paged: http://")
