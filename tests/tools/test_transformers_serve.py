"""`transformers serve` on the paged engine: concurrent clients get what each would get alone."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time
import urllib.error
import urllib.request
from typing import Annotated

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged import PagedConfig, compat
from hf_paged.cli import main
from hf_paged.errors import ConfigurationError, MissingDependencyError
from hf_paged.tools import transformers_serve
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(compat.serve_command() is None, reason="the packages of `transformers serve`")

QUESTIONS = ["One, two,", "def add(a, b):", "The capital", "Once", "Red, green,", "2 + 2 =", "Hello", "Why?"]


Name = Annotated[str | None, typer.Argument()]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Client:
    """Speaks to a server that runs in this process."""

    def __init__(self, model: str, **options):
        self.port, self.model = free_port(), model
        self.server = transformers_serve.make_server(
            model, PagedConfig(num_blocks=300, max_num_seqs=8), host="127.0.0.1", port=self.port, **options
        )
        end = time.monotonic() + 30
        while not self.server.server.started:
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.02)

    def post(self, path: str, body: dict) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps({"model": self.model, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()

    def chat(self, question: str, **options) -> dict:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 12, **options}
        return json.loads(self.post("/v1/chat/completions", body))

    def text(self, question: str, **options) -> str:
        return self.chat(question, **options)["choices"][0]["message"]["content"]

    def stream(self, question: str, **options) -> str:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 12, "stream": True, **options}
        lines = self.post("/v1/chat/completions", body).decode().splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert not any("error" in chunk for chunk in chunks)
        return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])

    def error(self, question: str, **options) -> tuple[int, dict]:
        with pytest.raises(urllib.error.HTTPError) as raised:
            self.chat(question, **options)
        return raised.value.code, json.loads(raised.value.read())

    @property
    def paged_model(self):
        (timed,) = self.server._model_manager.loaded_models.values()
        return timed.model


@pytest.fixture(scope="module")
def client(tiny_checkpoint):  # noqa: F811
    client = Client(str(tiny_checkpoint), dtype="float32", log_level="error")
    yield client
    client.server.kill_server()


@pytest.fixture(scope="module")
def stock(tiny_checkpoint):  # noqa: F811
    """What Transformers' `generate` answers to a question."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)

    def answer(question: str, **options) -> str:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False, tokenizer=tokenizer, **options)
        return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


def test_eight_clients_at_once_get_what_each_gets_alone(client, stock):
    expected = [stock(question) for question in QUESTIONS]
    engine = client.paged_model.engine
    assert [client.text(question) for question in QUESTIONS] == expected
    engine.reset_stats()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(client.text, QUESTIONS)) == expected
        assert list(pool.map(client.stream, QUESTIONS)) == expected
    stats = engine.stats()
    assert stats.num_finished == 16 and stats.peak_running > 1, "the requests did not run on the engine together"
    assert not engine.has_unfinished


def test_each_request_has_settings_of_its_own(client, stock):
    """Transformers' server samples every request with the settings of its first one."""
    stop = stock(QUESTIONS[0])[3:5]
    cases = [
        ({"frequency_penalty": 0.6}, {"repetition_penalty": 1.6}),
        ({"stop": stop}, {"stop_strings": stop}),
        ({"logit_bias": {"70": 100}}, {"sequence_bias": {(70,): 100.0}}),
        ({"temperature": 0.0}, {}),
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda case: client.text(QUESTIONS[0], **case[0]), cases))
    assert texts == [stock(QUESTIONS[0], **options) for _, options in cases]
    assert len(set(texts)) >= 3
    beams = json.dumps({"max_new_tokens": 12, "num_beams": 3, "eos_token_id": 0, "pad_token_id": 0})
    body = client.chat(QUESTIONS[0], generation_config=beams)
    assert body["choices"][0]["message"]["content"] == stock(QUESTIONS[0], num_beams=3)


def test_sampled_texts_are_repeated_by_their_seed(client):
    config = json.dumps({"do_sample": True, "temperature": 1.0, "max_new_tokens": 12, "eos_token_id": 0})
    texts = [client.text("Hello", generation_config=config, seed=seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_other_endpoints(client):
    completion = json.loads(client.post("/v1/completions", {"prompt": "One, two,", "max_tokens": 5}))
    assert completion["usage"]["completion_tokens"] == 5
    body = json.loads(client.post("/v1/responses", {"input": "One, two,", "max_output_tokens": 5, "stream": False}))
    assert body["status"] == "completed" and body["usage"]["output_tokens"] == 5
    with urllib.request.urlopen(f"http://127.0.0.1:{client.port}/health") as response:
        assert json.loads(response.read()) == {"status": "ok"}


def test_wrong_request_is_the_clients_fault(client):
    code, body = client.error("word " * 9000)
    assert code == 400 and "max_model_len" in body["error"]["message"]
    code, body = client.error("Hello", generation_config=json.dumps({"output_attentions": True}))
    assert code == 400 and "output_attentions" in body["error"]["message"]
    config = json.dumps({"do_sample": True, "temperature": -1.0})
    assert client.error("Hello", generation_config=config)[0] == 400
    assert client.error("Hello", logit_bias={"100000": 3})[0] == 400
    assert client.text("Hello")


def test_clients_that_leave_free_their_seats(client):
    """raullenchai/Rapid-MLX#1759: disconnects leaked running slots until the server answered nobody."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2000, "stream": True}
    body["generation_config"] = json.dumps({"max_new_tokens": 2000, "eos_token_id": -1})
    data = json.dumps({"model": client.model, **body}).encode()
    for _ in range(12):
        request = urllib.request.Request(
            f"http://127.0.0.1:{client.port}/v1/chat/completions", data, {"Content-Type": "application/json"}
        )
        response = urllib.request.urlopen(request, timeout=60)
        response.readline()
        response.close()
    assert client.text("Hello")
    end = time.monotonic() + 30
    while client.paged_model.engine.has_unfinished:
        assert time.monotonic() < end, "requests of clients that left are still running"
        time.sleep(0.05)


def test_model_that_the_engine_cannot_run_is_served_by_transformers(caplog):
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    assert transformers_serve._page(model, PagedConfig()) is model
    assert "served by Transformers alone" in caplog.text


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(compat, "serve_command", lambda: None)
    with pytest.raises(MissingDependencyError, match=r"openai.*hf-paged\[transformers-serve\]"):
        transformers_serve.serve([])


@pytest.mark.parametrize("text", ["{", "[1]", '{"blocks": 3}', '{"num_blocks": 0}'])
def test_wrong_settings_of_the_engine(text):
    with pytest.raises(ConfigurationError):
        transformers_serve.serve(["model"], text)


def test_command_line_passes_everything_on(monkeypatch):
    seen = []

    class Serve:
        def __init__(self, force_model: Name = None, continuous_batching: bool = False, port: int = 8000):
            seen.append((force_model, continuous_batching, port))

    monkeypatch.setattr(compat, "serve_command", lambda: Serve)
    for arguments in (["m", "--port", "9"], ["--no-continuous-batching"], ["m", "--paged-config", '{"num_blocks": 9}']):
        with pytest.raises(SystemExit) as ended:
            main(["transformers-serve", *arguments])
        assert not ended.value.code
    assert seen == [("m", True, 9), (None, False, 8000), ("m", True, 8000)]


@pytest.mark.parametrize(
    "field",
    [
        {"max_tokens": "x"},
        {"temperature": "a"},
        {"stop": 5},
        {"seed": "x"},
        {"logit_bias": [1]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"3": "x"}},
        {"generation_config": "{"},
        {"generation_config": "[1]"},
        {"messages": []},
        {"messages": 5},
        {"messages": None},
    ],
    ids=str,
)
def test_field_that_makes_no_sense_is_the_clients_fault(client, field):
    code, body = client.error("Hello", **field)
    assert code == 400 and body["error"]["type"] == "invalid_request_error", body


def test_client_that_leaves_before_its_answer_frees_its_seat(client):
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    body["generation_config"] = json.dumps({"max_new_tokens": 7000, "eos_token_id": -1})
    data = json.dumps({"model": client.model, **body}).encode()
    engine = client.paged_model.engine
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
            wait_until(lambda: engine.has_unfinished)
        steps = engine.stats().num_steps
        wait_until(lambda: not engine.has_unfinished)
        assert engine.stats().num_steps - steps < 3000, "the request was answered to its end"
    assert client.text("Hello")


def wait_until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
