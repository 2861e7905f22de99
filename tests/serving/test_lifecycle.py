"""From the start of a process to its end: signals, draining, a dead engine, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest

from hf_paged.serving import lifecycle
from hf_paged.serving.lifecycle import ENGINE_DIED, ended_anyway
from tests.serving.servers import chat, wait_until

LONG = {"max_tokens": 3000, "ignore_eos": True, "stream": True}


def read_stream(url, body, into, started=None):
    with (
        contextlib.suppress(httpx.RemoteProtocolError),  # the server was stopped at once
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            into.append(line)
            if started is not None:
                started.set()


def start_stream(url, **fields):
    """A stream that is read in a thread; returns when its first piece has come."""
    lines, started = [], threading.Event()
    thread = threading.Thread(target=read_stream, args=(url, chat(**{**LONG, **fields}), lines, started), daemon=True)
    thread.start()
    assert started.wait(60)
    return thread, lines


def pieces(lines):
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


# ---------------------------------------------------------------------- a thread of this process


def test_draining_lets_what_runs_end_and_takes_nothing_new(make_server):
    server = make_server()
    thread, lines = start_stream(server.url, max_tokens=2000)
    with server.client() as client:
        server.server.stop(timeout=60)
        answer = client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        assert answer.headers["retry-after"] == "5"
        assert answer.headers["connection"] == "close"
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200, "it is about the engine, which runs"
        assert client.get("/metrics").status_code == 200
        assert client.get("/load").json() == {"server_load": 1}
    thread.join(60)
    assert lines[-2:] == ["data: [DONE]", ""]
    assert pieces(lines)[-1]["choices"][0]["finish_reason"] == "length"
    server.thread.join(60)
    assert not server.thread.is_alive()
    assert server.server.exit_code == 0


def test_without_time_what_runs_is_told_that_it_was_aborted(make_server):
    server = make_server()
    thread, lines = start_stream(server.url)
    whole: list[httpx.Response] = []

    def ask():
        with server.client() as client:
            whole.append(client.post("/v1/chat/completions", json=chat(**{**LONG, "stream": False})))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    wait_until(lambda: server.service.engine.num_running == 2)
    server.server.stop(timeout=0)
    for ending in (thread, asking, server.thread):
        ending.join(60)
    error = pieces(lines)[-1]["error"]
    assert "shutting down" in error["message"]
    assert whole[0].status_code == 503
    assert "shutting down" in whole[0].json()["error"]["message"]
    blocks = server.service.engine.engine.live.block_manager
    wait_until(lambda: blocks.num_blocks_held == 0)


def test_clients_that_neither_send_nor_read_do_not_keep_the_server(make_server, monkeypatch, caplog):
    monkeypatch.setattr(lifecycle, "_GOODBYE_SECONDS", 1)
    server = make_server()
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = json.dumps(chat(**LONG, logprobs=True, top_logprobs=20)).encode()
    wish = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    with server.connect() as sends, server.connect() as reads:
        reads.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reads.sendall(wish % len(body) + body)
        sends.sendall(wish % len(body) + body[:-1])
        wait_until(lambda: server.app.state.work.num_running == 2)
        wait_until(lambda: any(c.flow.write_paused for c in server.server.server_state.connections))
        server.server.stop(timeout=0)
        assert sends.recv(4096).startswith(b"HTTP/1.1 503 ")
        server.thread.join(60)
    assert not server.thread.is_alive()
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]


def test_a_dead_engine_is_told_by_health_and_ends_the_server(make_server):
    server = make_server()
    thread, lines = start_stream(server.url)
    engine = server.service.engine

    def die() -> None:
        raise SystemExit("the thread is killed")

    engine.engine.post(die)
    with server.client() as client:
        wait_until(lambda: client.get("/health").status_code == 503, timeout=5)
        assert "SystemExit" in client.get("/health").json()["message"]
        assert client.get("/ready").status_code == 503
        assert client.post("/v1/chat/completions", json=chat()).status_code == 503
    thread.join(60)
    assert "error" in pieces(lines)[-1], "nobody is left waiting"
    server.thread.join(60)
    assert not server.thread.is_alive()
    assert server.server.exit_code == ENGINE_DIED


def test_a_step_that_does_not_end_makes_health_fail_and_a_late_end_heals_it(make_server):
    server = make_server(stall_timeout=0.3)
    go_on = threading.Event()
    thread, lines = start_stream(server.url, max_tokens=1000)
    server.service.engine.engine.post(lambda: go_on.wait(30))
    with server.client() as client:
        wait_until(lambda: client.get("/health").status_code == 503, timeout=10)
        assert "takes longer than 0.3 s" in client.get("/health").json()["message"]
        go_on.set()
        thread.join(60)
        assert lines[-2] == "data: [DONE]"
        assert client.get("/health").status_code == 200


def test_an_engine_that_hangs_does_not_keep_the_process(monkeypatch, capfd):
    left = queue.Queue()
    monkeypatch.setattr(os, "_exit", left.put)
    with ended_anyway(ENGINE_DIED, seconds=0.05):
        assert left.get(timeout=10) == ENGINE_DIED
    assert "did not end within 0.05 s" in capfd.readouterr().err
    with ended_anyway(ENGINE_DIED, seconds=0.05):
        pass
    time.sleep(0.2)
    assert left.empty()


# ---------------------------------------------------------------------- a process


@pytest.mark.slow
def test_a_signal_drains_and_ends_with_zero_and_leaves_nothing_behind(start_process):
    process = start_process("--shutdown-timeout", "60", "--trust-request-chat-template").wait_until_ready()
    with httpx.Client(base_url=process.url, timeout=60) as client:
        for fields in ({"chat_template": "{{ messages[0].content }}"}, {"structured_outputs": {"regex": "[ab]{3}"}}):
            assert client.post("/v1/chat/completions", json=chat(**fields)).status_code == 200
    children = psutil.Process(process.process.pid).children(recursive=True)
    assert children, "templates of requests are rendered by a process of their own"
    thread, lines = start_stream(process.url, max_tokens=1500)
    process.signal(signal.SIGTERM)
    with httpx.Client(base_url=process.url, timeout=10) as client:
        wait_until(lambda: client.get("/ready").status_code == 503)
        assert client.post("/v1/chat/completions", json=chat()).status_code == 503
    thread.join(60)
    assert lines[-2] == "data: [DONE]"
    assert process.wait() == 0
    assert "Traceback" not in process.stderr
    assert "Stopped." in process.stderr
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_without_time_ends_at_once_and_quietly(start_process, number):
    process = start_process().wait_until_ready()
    thread, lines = start_stream(process.url)
    sent = time.monotonic()
    process.signal(number)
    assert process.wait() == 0
    assert time.monotonic() - sent < 10
    thread.join(10)
    assert "shutting down" in pieces(lines)[-1]["error"]["message"]
    assert "Traceback" not in process.stderr
    assert "ERROR" not in process.stderr


@pytest.mark.slow
def test_a_second_signal_does_not_wait(start_process):
    process = start_process("--shutdown-timeout", "600", "--trust-request-chat-template").wait_until_ready()
    endless = {"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"}
    threading.Thread(target=read_stream, args=(process.url, chat(**endless), []), daemon=True).start()
    wait_until(lambda: psutil.Process(process.process.pid).children())
    children = psutil.Process(process.process.pid).children()
    start_stream(process.url)
    process.signal(signal.SIGTERM)
    wait_until(lambda: "a second signal stops at once" in process.stderr)
    assert process.process.poll() is None
    sent = time.monotonic()
    process.signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    assert time.monotonic() - sent < 5
    assert "Traceback" not in process.stderr
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.slow
def test_a_signal_while_loading_ends_the_process(start_process):
    process = start_process()
    wait_until(lambda: "Loading" in process.stderr)
    process.signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert "stopped while starting" in process.stderr
    assert "Traceback" not in process.stderr
