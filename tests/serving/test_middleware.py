"""What requests pass before a route sees them: keys, hosts, ids, bodies, limits of HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest

from hf_paged.serving.middleware.bodies import MAX_CONTAINERS, MAX_DEPTH, MAX_VALUES, check_json
from hf_paged.serving.middleware.keys import OPEN_PATHS
from tests.serving.servers import chat, wait_until

KEY = "sk-right"
BEARER = {"Authorization": f"Bearer {KEY}"}
ERROR_FIELDS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def guarded(make_client):
    """A client of an application with two keys."""
    return make_client(api_key=(KEY, "sk-other"), root_path="/prefix")


@pytest.fixture(scope="module")
def small_server(make_server):
    """A server with small limits."""
    return make_server(read_timeout=0.7, max_body_mib=1, timeout_keep_alive=30.0)


def assert_error(response, status, text="", code=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == ERROR_FIELDS
    assert text in error["message"]
    if code is not None:
        assert error["code"] == code


def routes(client):
    """Every path that the application has, with its methods and parameters filled in."""
    paths = client.app.openapi()["paths"]
    return [(method.upper(), path.replace("{", "").replace("}", "")) for path in paths for method in paths[path]]


# ---------------------------------------------------------------------- keys


def test_every_route_but_the_open_ones_needs_a_key(guarded):
    found = routes(guarded)
    assert len(found) > 10
    others = [("GET", path) for path in ("/docs", "/openapi.json", "/", "/engine/events", "/nothing")]
    for method, path in [*found, *others]:
        response = guarded.request(method, path)
        if path in OPEN_PATHS or path == "/":  # the page, on which a key can be typed in
            assert response.status_code == 200, path
        else:
            assert response.status_code == 401, f"{method} {path}"
            assert response.headers["www-authenticate"] == "Bearer"
    assert {"/health", "/ping", "/ready"} == OPEN_PATHS
    assert guarded.get("/ping").status_code == guarded.post("/ping").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/models", "/v1//models", "/V1/models", "/v1/models/", "/v1/%6dodels", "/%76%31/models", "/v1/./models"),
        *("/health/../v1/models", "/health/", "/health%2f..%2fv1/models", "/health;/v1/models", "/HEALTH", "//health"),
        *("/prefix/v1/models", "/prefix/prefix/health", "/v1/models?x=/health", "/v1/models#/health", "/health%00"),
    ],
)
def test_no_way_of_writing_a_path_gets_round_the_key(guarded, path):
    response = guarded.get(f"http://testserver{path}")  # whole: two slashes would begin a host
    assert response.status_code == 401, response.text


@pytest.mark.parametrize("host", ["x/health", "health", "a@b/health?", "evil.example:80/health#", "[::1]/health", ""])
def test_the_host_header_does_not_open_anything(guarded, host):
    assert guarded.get("/v1/models", headers={"Host": host}).status_code == 401
    assert guarded.get("/v1/models", headers={"Host": host, **BEARER}).status_code == 200
    assert guarded.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        BEARER,
        {"Authorization": "bearer sk-other"},
        {"x-api-key": KEY},
        {"X-Api-Key": "sk-other", "Authorization": "Basic x"},
    ],
)
def test_each_key_opens_in_either_header(guarded, headers):
    assert guarded.get("/v1/models", headers=headers).status_code == 200
    assert guarded.get("/prefix/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer sk-righ"},
        {"Authorization": "Bearer sk-right2"},
        {"Authorization": "Bearer SK-RIGHT"},
        {"Authorization": "Basic sk-right"},
        {"Authorization": "sk-right"},
        {"x-api-key": ""},
        {"x-api-key": "Bearer sk-right"},
        {"Cookie": "Authorization=Bearer sk-right"},
        {b"authorization": b"Bearer \xff\xfe"},
    ],
)
def test_wrong_keys_and_forms_do_not(guarded, headers):
    response = guarded.get("/v1/models", headers=headers)
    assert_error(response, 401, "needs a key", "invalid_api_key")
    assert KEY not in response.text


def test_a_refusal_has_the_form_of_the_api_that_was_called(guarded):
    error = guarded.post("/v1/messages", json={}).json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "authentication_error"


def test_keys_are_not_shown_by_any_route(guarded, caplog):
    for path in ("/server_info", "/metrics", "/openapi.json"):
        text = guarded.get(path, headers=BEARER).text
        assert KEY not in text and "sk-other" not in text
    assert KEY not in caplog.text


# ---------------------------------------------------------------------- web pages and host names


def preflight(client, origin):
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    return client.options("/v1/chat/completions", headers=headers)


def test_preflights_need_no_key_and_let_in_pages_of_this_machine(guarded):
    for origin in ("http://localhost:3000", "http://127.0.0.1", "https://[::1]:8080"):
        answer = preflight(guarded, origin)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
    for origin in ("http://evil.example", "http://localhost.evil.example", "http://127.0.0.1.evil.example", "null"):
        answer = preflight(guarded, origin)
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers
    assert guarded.options("/v1/chat/completions").status_code == 401, "without an origin it is no preflight"


def test_pages_may_read_errors_too(guarded):
    answer = guarded.get("/v1/models", headers={"Origin": "http://localhost:3000"})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"


def test_origins_and_hosts_are_those_that_were_given(make_client):
    client = make_client(allowed_origins=("https://chat.example",), allowed_hosts=("chat.example", "*.internal"))
    assert preflight(client, "https://chat.example").status_code == 200
    assert preflight(client, "http://localhost").status_code == 400
    for host, status in {
        "chat.example": 200,
        "CHAT.example:443": 200,
        "a.internal": 200,
        "internal": 421,
        "evil.example": 421,
        "chat.example.evil": 421,
        "[::1]:80": 421,
    }.items():
        answer = client.get("/health", headers={"Host": host, "Origin": "https://chat.example"})
        assert answer.status_code == status, host
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    answer = client.get("/health", headers={"Host": "chat.example", "Origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


# ---------------------------------------------------------------------- request ids


def test_harmless_ids_are_kept_and_others_replaced(make_client):
    client = make_client(enable_request_id_headers=True)
    for given in ("abc", "a" * 128, "01:F@x.y_z+1=2-3"):
        assert client.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"] == given
    for given in (
        "",
        "a" * 129,
        "a b",
        "a/../b",
        "\x1b[31mred",
        "a\tb",
        "-x",
        "é",
        "a;b",
        "<script>",
        "a\r\nSet-Cookie: x",
    ):
        answer = client.get("/health", headers={b"X-Request-Id": given.encode("latin-1")})
        assert answer.headers["x-request-id"] != given
        assert answer.headers["x-request-id"].isalnum()
        assert "set-cookie" not in answer.headers
    doubled = client.get("/health", headers=[("X-Request-Id", "a"), ("X-Request-Id", "b")])
    assert doubled.headers["x-request-id"] not in ("a", "b", "a, b")
    first, second = (client.get("/nothing").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_ids_are_not_answered_unless_asked_for(client):
    assert "x-request-id" not in client.get("/health", headers={"X-Request-Id": "abc"}).headers


# ---------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "The body is empty"),
        (b"{", "The body is not JSON: unexpected end of data at line 1, column 2."),
        (b'{"model":\n nope}', "at line 2, column"),
        (b'{"a": NaN}', "The body is not JSON"),
        (b'{"a": Infinity}', "The body is not JSON"),
        (b'{"a": "\\ud800"}', "The body is not JSON"),
        (b'{"a": "\xff"}', "The body is not UTF-8: byte 7 is 0xff."),
        (b"\xef\xbb\xbf{}", "The body is not JSON"),
        (b'{"a": 1}{"a": 1}', "The body is not JSON"),
        (b"[" * 100_000, "nested deeper than 128 levels"),
        (b"[" * 200 + b"]" * 200, "nested deeper than 128 levels"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "nested deeper than 128 levels"),
        (b"[" + b"[]," * MAX_CONTAINERS + b"[]]", "lists and objects"),
        (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", "values"),
        (b'["' + b'","' * (2 * MAX_VALUES) + b'"]', "quotation marks"),
        (b"[]", ""),
        (b"3", ""),
        (b"null", ""),
        (b'"text"', ""),
        (b'{"model": ' + b"1" * 5000 + b"}", ""),
    ],
)
def test_what_is_no_json_object_is_refused_with_the_place(client, body, text):
    started = time.monotonic()
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/responses"):
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert_error(answer, 400, text)
        assert len(answer.content) < 4096
    assert time.monotonic() - started < 8


def test_deep_and_long_json_within_the_limits_passes():
    check_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    check_json(b'{"a": "' + rb"[[{{\"" * 10_000 + b'"}')
    check_json(json.dumps([list(range(100))] * 1000).encode())


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"])
def test_other_content_types_are_refused(client, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    answer = client.post("/v1/chat/completions", content=json.dumps(chat()), headers=headers)
    assert_error(answer, 415, "`Content-Type` must be application/json")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_json_by_other_names_is_taken(client, kind):
    answer = client.post("/v1/chat/completions", content=json.dumps(chat()), headers={"Content-Type": kind})
    assert answer.status_code == 200


def test_compressed_bodies_are_refused(client):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert_error(client.post("/v1/completions", content=b"\x1f\x8b", headers=headers), 415, "Compressed")


def test_a_thousand_mistakes_give_one_short_answer(client):
    body = {**chat(), "messages": [{"role": f"role {i}", "content": "x" * 50} for i in range(1000)]}
    answer = client.post("/v1/chat/completions", json=body)
    assert_error(answer, 400, "messages[0]")
    assert len(answer.content) < 16_384


def test_unknown_paths_and_wrong_methods_are_told_in_openais_form(client):
    assert_error(client.get("/nothing"), 404, "There is no `GET /nothing` here.", "not_found")
    assert_error(client.post("/v1/chat/completions/", json={}), 404)
    answer = client.get("/v1/chat/completions")
    assert_error(answer, 405, "takes POST", "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    assert_error(client.request("BREW", "/v1/models"), 405)
    assert len(client.get("/" + "x" * 10_000).content) < 1000


def test_the_schema_tells_of_the_errors_that_there_are(client):
    operation = client.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]
    assert {"400", "401", "413", "415", "503"} <= set(operation["responses"])
    assert "422" not in operation["responses"]


# ---------------------------------------------------------------------- on a socket


def send(server, *pieces: bytes, until_closed: bool = True) -> bytes:
    """Sends bytes on a connection of its own and returns all that comes back."""
    with server.connect() as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while data := connection.recv(65536):
            answer += data
            if not until_closed:
                break
        return answer


def post(body: dict) -> bytes:
    """A chat request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(content)}\r\n\r\n".encode() + content


def assert_closed_with(answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert b"connection: close" in head
    assert set(json.loads(body)["error"]) == ERROR_FIELDS


def test_large_bodies_are_refused_before_they_are_read(small_server):
    with small_server.client() as client:
        answer = client.post("/v1/completions", content=b" " * (5 << 20), headers={"Content-Type": "application/json"})
        assert_error(answer, 413, "1048576 bytes", "body_too_large")

        def endless():
            for _ in range(50):
                yield b" " * (100 << 10)

        answer = client.post("/v1/completions", content=endless(), headers={"Content-Type": "application/json"})
        assert_error(answer, 413, "1048576 bytes", "body_too_large")
        assert client.get("/health").status_code == 200
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"
    started = time.monotonic()
    with small_server.connect() as connection:
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert time.monotonic() - started < 1


def test_large_and_many_headers_are_refused_at_once(small_server):
    started = time.monotonic()
    with small_server.client() as client:
        assert_error(
            client.get("/health", headers={"X-Large": "x" * (5 << 20)}), 431, "65536 bytes", "headers_too_large"
        )
        assert_error(client.get("/health", headers={f"X-{i}": "x" for i in range(1000)}), 431, "100 headers")
        assert_closed_with(send(small_server, b"GET /health?" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"), 431)
        assert client.get("/health", headers={f"X-{i}": "x" for i in range(80)}).status_code == 200
        assert client.get("/health", headers={"X-Large": "x" * 60_000}).status_code == 200
        assert client.get("/health").status_code == 200
    assert time.monotonic() - started < 5


def test_headers_that_never_end_are_not_kept(small_server):
    with small_server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        connection.settimeout(5)
        sent = 0
        with pytest.raises(OSError):
            while True:
                sent += connection.send(b"x" * 65536)
        assert sent < 300 << 20
    assert small_server.client().get("/health").status_code == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /h\xffealth HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET http:// HTTP/1.1\r\n\r\n",
    ],
)
def test_broken_http_is_answered_with_400(small_server, request_):
    assert_closed_with(send(small_server, request_), 400)
    assert small_server.client().get("/health").status_code == 200


def test_slow_headers_and_bodies_are_ended(small_server):
    started = time.monotonic()
    assert send(small_server) == b"", "who asks nothing is told nothing"
    assert_closed_with(send(small_server, b"GET /health HTTP/1.1\r\nHost:"), 408)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    assert_closed_with(send(small_server, head, b"{"), 408)
    late = send(small_server, head.replace(b"completions", b"messages"), b"{")
    assert late.startswith(b"HTTP/1.1 408 ") and b'"type":"error"' in late, "in Anthropic's form"
    assert time.monotonic() - started < 15
    wait_until(lambda: small_server.app.state.work.num_running == 0)


def test_a_client_that_sends_byte_by_byte_is_ended(small_server):
    with small_server.connect() as connection:
        started = time.monotonic()
        with pytest.raises(OSError):
            for byte in b"GET /health HTTP/1.1\r\nHost: " + b"x" * 1000:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
        assert time.monotonic() - started < 5


def test_line_ends_between_requests_keep_nothing_open(small_server):
    with small_server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"\r\n")
        connection.settimeout(5)
        while connection.recv(65536):
            pass


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_headers_behind_a_body_mean_nothing_and_may_not_be_long(small_server, make_server):
    body = b'{"prompt": "a"}'
    chunk = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    wish = CHUNKED.replace(b"Host", b"Connection: close\r\nHost") + chunk
    assert send(small_server, wish + b"X-Late: x\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert_closed_with(send(small_server, CHUNKED + chunk + b"X: " + b"x" * 300_000), 431)
    assert_closed_with(send(small_server, CHUNKED + b"5;" + b"x" * 300_000), 431)
    guarded = make_server(api_key=(KEY,))
    assert send(guarded, wish + b"Authorization: Bearer sk-right\r\n\r\n").startswith(b"HTTP/1.1 401 ")


def test_an_endless_body_that_nobody_reads_is_cut_off(small_server):
    with small_server.connect() as connection:
        connection.sendall(CHUNKED.replace(b"POST /tokenize", b"GET /health"))
        assert b"200 OK" in connection.recv(65536)
        connection.settimeout(5)
        with pytest.raises(OSError):
            for _ in range(4000):
                connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def test_requests_on_one_connection_are_answered_in_their_order(small_server):
    wish = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = send(small_server, wish)
    assert answer.index(b"200 OK") < answer.index(b"404 Not Found")


def test_a_request_for_another_protocol_is_answered_in_this_one(small_server):
    wish = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert b"200 OK" in send(small_server, wish, until_closed=False)


def test_hundreds_of_idle_connections_keep_nobody_out(server):
    idle = [server.connect() for _ in range(400)]
    try:
        with server.client() as client:
            assert client.post("/v1/chat/completions", json=chat()).status_code == 200
    finally:
        for connection in idle:
            connection.close()


def test_a_client_that_leaves_ends_its_request(server):
    for stream in (True, False):
        with server.connect() as connection:
            connection.sendall(post(chat(stream=stream, max_tokens=4000, ignore_eos=True)))
            wait_until(lambda: server.service.engine.num_running == 1)
            if stream:
                connection.recv(1024)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wait_until(lambda: server.service.engine.num_running == 0, timeout=5)
        wait_until(lambda: server.app.state.work.num_running == 0, timeout=5)


def test_a_client_that_reads_slowly_holds_up_nobody(server):
    with server.connect() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(post(chat(stream=True, max_tokens=4000, ignore_eos=True, logprobs=True, top_logprobs=20)))
        with server.client() as client:
            started = time.monotonic()
            for _ in range(3):
                assert client.post("/v1/chat/completions", json=chat()).status_code == 200
            assert time.monotonic() - started < 20
    wait_until(lambda: server.service.engine.num_running == 0, timeout=20)


def test_many_clients_at_the_same_time_are_all_answered(server):
    answers: list[httpx.Response] = []

    def ask(i):
        with server.client() as client:
            answers.append(client.post("/v1/chat/completions", json=chat(f"Number {i}", temperature=0)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 32
