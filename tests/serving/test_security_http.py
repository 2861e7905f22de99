"""HTTP that is made to hurt: keys, hosts, headers, connections. Nobody else notices."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from typing import Any

import httpx
import pytest

from tests.serving.attacks import CHAT, COMPLETIONS, REFUSED, Target, assert_well, attack, bystander, hang_up
from tests.serving.observed import numbers_of
from tests.serving.servers import chat
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401 - a fixture

KEY = "sk-right"


@pytest.fixture(scope="module")
def target(tiny_checkpoint):  # noqa: F811
    """A server whose clients may not take long."""
    with Target(tiny_checkpoint, read_timeout=5.0) as target:
        yield target


# ---------------------------------------------------------------------- keys


@pytest.fixture(scope="module")
def locked(tiny_checkpoint):  # noqa: F811
    """A server that needs a key."""
    with Target(tiny_checkpoint, api_key=(KEY,)) as target:
        yield target


def test_no_route_works_without_a_key_whatever_host_is_named_cve_2026_48746_cve_2025_59425(locked):
    paths = {path.replace("{", "").replace("}", "") for path in locked.app.openapi()["paths"]}
    tries = [
        (method, path, host)
        for path in sorted(
            paths
            | {
                "/docs",
                "/openapi.json",
                "/redoc",
                "/",
                "/engine/events",
                "/engine/",
                "/nothing",
                "/health/",
                "//health",
            }
        )
        for method in ("GET", "POST", "HEAD", "DELETE", "OPTIONS")
        for host in ("127.0.0.1", "evil.example/health?", "localhost:80#/health", "[::1]/ready")
    ]
    with httpx.Client(base_url=locked.url, timeout=30, verify=False) as nobody, bystander(locked):
        for method, path, host in tries:
            wrong = {"Host": host, "Authorization": f"Bearer {KEY[:-1]}", "X-Forwarded-Host": "/health"}
            answer = nobody.request(method, f"{locked.url}{path}", headers=wrong)
            if path in ("/health", "/ready", "/"):  # the last is a page without anything of the server's
                assert answer.status_code in (200, 405)
            else:
                assert answer.status_code == 401, f"{method} {path} {host}: {answer.status_code}"
            assert KEY not in answer.text
    assert_well(locked)


def test_keys_are_compared_in_constant_time_cve_2025_59425(locked, monkeypatch):
    from hf_paged.serving.middleware import keys

    compared = []
    compare = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    with httpx.Client(base_url=locked.url, timeout=30, verify=False) as client:
        for key in ("s", "sk-righ", "sk-right", "x" * 5000):
            client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert len(compared) == 4 and set(compared) == {(32, 32)}, "digests, which are all of one length"


# ---------------------------------------------------------------------- metrics


def test_metrics_do_not_grow_with_what_is_asked_for_pysec_2026_4325(target):
    source = random.Random(4)

    def series() -> int:
        return len(numbers_of(target.send("/metrics", b"", method="GET").text))

    def ask(count: int) -> None:
        for _ in range(count):
            word = "".join(source.choices("abcdefghijklmnop", k=9))
            method = source.choice(["GET", "POST", "PUT", "OPTIONS", word.upper()])
            path = source.choice(
                [f"/{word}", f"/v1/models/{word}", COMPLETIONS, f"{COMPLETIONS}?{word}", f"/{word}/health"]
            )
            model = {"model": word, "user": word, "request_id": word, "prompt": "a", word: word}
            assert target.send(path, model, method=method, headers={"User-Agent": word}).status_code in REFUSED

    assert_well(target)  # so that its routes are known already
    with bystander(target):
        ask(150)
        series()
        before = series()
        ask(450)
    assert_well(target)
    assert series() == before


# ---------------------------------------------------------------------- headers


def test_headers_without_end_are_refused_cve_2025_48956(target):
    def with_headers(headers: dict[str, str]) -> Any:
        return lambda: target.send(CHAT, chat(), headers=headers)

    answers = attack(
        target,
        [
            with_headers({"X-Large": "x" * (5 << 20)}),
            with_headers({f"X-{i}": "x" for i in range(1000)}),
            with_headers({"x" * 70_000: "x"}),
            with_headers({"Cookie": "a=b;" * 20_000}),
            lambda: target.send(CHAT + "?" + "x" * 60_000, chat(), headers={"X": "y" * 20_000}),
        ],
        seconds=2,
    )
    assert {answer.status_code for answer in answers} == {431}


def test_request_ids_are_harmless_in_logs_and_answers_cve_2025_48956(tiny_checkpoint, caplog):  # noqa: F811
    with Target(tiny_checkpoint, enable_request_id_headers=True) as target:
        for given in (b"a%0d%0aSet-Cookie: x", b"\xff\xfe", b"a" * 5000, b"../../etc", b"a b"):
            raw = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: " + given + b"\r\n\r\n"
            answer = target.raw(raw)
            assert answer.startswith(b"HTTP/1.1 200 OK") and given not in answer
            assert b"\x1b" not in answer and b"Set-Cookie" not in answer
        bodies = [chat(request_id=name) for name in ("a\r\nb", "\x1b[31m", "a" * 129, "", "../x", "\u202e", 5, ["a"])]
        attack(target, [(CHAT, body) for body in bodies])
        injected = target.raw(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\r\nX-Injected: \r\n b\r\n\r\n")
        assert injected.startswith(b"HTTP/1.1 400 ")
        assert_well(target)
    assert "\x1b" not in caplog.text


# ---------------------------------------------------------------------- connections

BODY = json.dumps(chat()).encode()
START = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
WHOLE = START + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
BROKEN = {
    "body shorter than its length": WHOLE[:-9],
    "body longer than its length": WHOLE + b"{}" + LAST,
    "chunks that break off": CHUNKED + b"40\r\n" + BODY[:20],
    "chunk that is too long": CHUNKED + b"FFFFFFFFFFFFFFFFFF\r\n",
    "chunk without a length": CHUNKED + b"-1\r\n",
    "two lengths": START + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "length and chunks": START + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + WHOLE,
    "length beyond all numbers": START + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n",
    "signed length": START + b"Content-Length: +4\r\n\r\n{}",
    "unknown encoding": START + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "folded header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c\r\n\r\n",
    "zero byte in a header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: b\0c\r\n\r\n",
    "header that is no text": b"GET /v1/models HTTP/1.1\r\nHost: \xff\r\ntraceparent: \xff\r\n\r\n" + LAST,
    "path that is no text": b"GET /v1/models/%ff%00%0d%0aX:%20y HTTP/1.1\r\nHost: x\r\n\r\n" + LAST,
    "half an escape": b"GET /v1/models/%zz%2 HTTP/1.1\r\nHost: x\r\n\r\n" + LAST,
    "whole address": b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: x\r\n\r\n" + LAST,
    "connect": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "trace": b"TRACE /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: secret\r\n\r\n" + LAST,
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "expectation": START + b"Expect: 200-maybe\r\n" + WHOLE[len(START):] + LAST,
    "many at once": WHOLE * 12 + LAST,
    "nonsense behind a request": WHOLE + b"GARBAGE\r\n\r\n" + WHOLE,
}  # fmt: skip


def test_broken_http_touches_nobody_else(target):
    with bystander(target):
        for name, data in BROKEN.items():
            breaks_off = name in ("body shorter than its length", "chunks that break off")
            answer = target.raw(data, end=breaks_off)
            heads = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
            assert all(head in (b"100", b"200", b"400", b"404", b"405", b"408") for head in heads), (name, answer[:300])
            assert heads or breaks_off, name
            assert b"\r\nX: y" not in answer and b"secret" not in answer, name
    assert_well(target)


def test_a_body_behind_an_offer_of_another_protocol_is_no_request_of_its_own(target):
    """Java's client offers HTTP/2 with its first request; the parser dropped the body and read it as the next one."""
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    for content, status in ((BODY, b"200"), (smuggled, b"400")):
        head = START + offer + b"Upgrade: h2c\r\n" + f"Content-Length: {len(content)}\r\n\r\n".encode()
        answers = re.findall(rb"HTTP/1\.1 (\d+) ", target.raw(head + content + LAST))
        assert answers == [status, b"404"]
        with target.connect() as connection:  # the header in two pieces, which is not recognised in time
            cut = head.index(b"Upgrade: h2c") + 3
            connection.sendall(head[:cut])
            time.sleep(0.1)
            connection.sendall(head[cut:] + content)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        assert re.findall(rb"HTTP/1\.1 (\d+) ", answer) in ([b"400"], [status])
    assert_well(target)


def test_every_method_on_every_route_is_answered(target):
    paths = {path.replace("{", "").replace("}", "") for path in target.app.openapi()["paths"]} | {"/", "/docs", "*"}
    with bystander(target):
        for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND", "M-SEARCH"):
            for path in sorted(paths):
                raw = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
                answer = target.raw(raw.encode())
                assert re.match(rb"HTTP/1\.1 (200|400|404|405|415) ", answer), (method, path, answer[:100])
                if method == "HEAD":
                    assert answer.endswith(b"\r\n\r\n"), "it has no body"
    assert_well(target)


def test_two_thousand_idle_connections_keep_nobody_out(target):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 6000:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 6000), hard))
    idle = []
    try:
        with bystander(target):
            for i in range(2000):
                idle.append(target.connect())
                if i % 2:
                    idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost:")
            assert target.next_answer() == target.next
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_well(target)


def test_readers_that_are_slow_or_vanish_hold_up_nobody(target):
    endless = json.dumps(chat(stream=True, max_tokens=3000, ignore_eos=True, logprobs=True, top_logprobs=20)).encode()
    wish = START + f"Content-Length: {len(endless)}\r\n\r\n".encode() + endless
    slow = []
    with bystander(target):
        for i in range(12):
            connection = target.connect()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(wish)
            if i % 3 == 0:
                slow.append(connection)  # and reads nothing
            else:
                hang_up(connection)
                connection.close()
        assert target.next_answer() == target.next
    for connection in slow:
        connection.close()
    assert_well(target)


def test_a_client_that_vanishes_takes_the_requests_with_it_that_it_sent_in_a_row(target, caplog):
    endless = json.dumps(chat(stream=True, max_tokens=3000, ignore_eos=True)).encode()
    wish = START + f"Content-Length: {len(endless)}\r\n\r\n".encode() + endless
    with target.connect() as connection:
        connection.sendall(wish * 3)
        assert connection.recv(100)
        hang_up(connection)
    assert_well(target)
    assert "Exception in ASGI application" not in caplog.text
