"""Streams: what is in them and in which order, what keeps them open, how they end, and what a leaving client frees."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import openai
import pytest

from hf_paged.serving.errors import ApiError
from hf_paged.serving.streaming import ChunkWriter, EventStream, unless_gone, wants_stream
from tests.paged_models import broken_forward
from tests.serving.events import events_of, joined_chat
from tests.serving.servers import ServerThread, chat, wait_until

PATH = "/v1/chat/completions"
ENDLESS = {"max_tokens": None, "ignore_eos": True}


def stream(client: Any, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(PATH, json=chat(stream=True, **fields))
    assert response.status_code == 200, response.text
    return events_of(response.text)


def forced(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 400}


# ------------------------------------------------------------------ what is in a stream


@pytest.mark.parametrize("n", [1, 3])
def test_each_answer_has_its_role_first_and_its_end_last(client, n):
    chunks = stream(client, n=n, seed=1)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:n]] == [{"role": "assistant", "content": ""}] * n
    assert len({json.dumps({**chunk, "choices": None}) for chunk in chunks}) == 1, "id, model and time are the same"
    assert stream(client, n=n, return_token_ids=True)[0]["prompt_token_ids"]
    assert all("usage" not in chunk for chunk in chunks)
    for index in range(n):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] in ("stop", "length") and own[-1]["delta"] == {}
        assert all(choice["delta"]["content"] for choice in own[1:-1]), "no chunk without text"


def test_the_counts_are_the_last_chunk_and_no_other(client):
    chunks = stream(client, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])


def test_the_counts_may_be_in_every_chunk(client):
    chunks = stream(client, stream_options={"include_usage": True, "continuous_usage_stats": True}, max_tokens=30)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == counts[-2] <= 30


def test_options_of_a_stream_do_not_harm_whole_answers(client):
    response = client.post(PATH, json=chat(stream=False, stream_options={"include_usage": True}))
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 8


def test_an_operator_can_have_the_counts_in_every_stream(make_client):
    chunks = stream(make_client(enable_force_include_usage=True))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]


def test_headers_keep_proxies_from_collecting_chunks(client):
    response = client.post(PATH, json=chat(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers


@pytest.mark.parametrize(
    "text",
    [
        "\u6f22\u5b57\u304b\u306a \u0e44\u0e17\u0e22",
        "\U0001f44d\U0001f3fd and \U0001f468\u200d\U0001f469\u200d\U0001f467",
        "a    b\t\tc\n\n    indented\n",
        "x",
    ],
)
def test_texts_arrive_exactly_and_in_whole_characters(client, text):
    chunks = stream(client, **forced(text))
    assert joined_chat(chunks)[0]["content"] == text
    assert not any("\ufffd" in (chunk["choices"][0]["delta"].get("content") or "") for chunk in chunks)


def test_text_held_back_for_a_stop_string_arrives_at_the_end(client):
    for stop in (["lo!!"], ["never", "lo there"]):
        assert joined_chat(stream(client, **forced("Hello"), stop=stop))[0]["content"] == "Hello"


def test_only_what_may_begin_a_stop_string_is_held_back(server):
    with (
        server.client() as client,
        client.stream("POST", PATH, json=chat(stream=True, stop=["~" * 40], **ENDLESS)) as response,
    ):
        texts = []
        for line in response.iter_lines():
            if line.startswith("data: "):
                texts.append(json.loads(line[6:])["choices"][0]["delta"].get("content"))
            if len(texts) == 3:
                break
        assert any(texts[1:]), "text comes at once"


def test_clients_that_do_not_say_are_streamed_to_only_if_the_operator_wants_it(client, make_client):
    accepting = {"Accept": "text/event-stream"}
    assert client.post(PATH, json=chat(), headers=accepting).json()["object"] == "chat.completion"
    eager = make_client(stream_on_accept=True)
    assert events_of(eager.post(PATH, json=chat(), headers=accepting).text)
    assert eager.post(PATH, json=chat(stream=False), headers=accepting).json()["choices"]
    assert eager.post(PATH, json=chat()).json()["choices"]
    assert not wants_stream(None, None, False)  # type: ignore[arg-type]


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_what_is_wrong_with_a_request_is_told_before_a_stream_begins(client, path):
    body = chat(stream=True, prompt="x", max_tokens=10**6)
    response = client.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


def test_a_step_that_fails_ends_the_stream_with_an_error(client):
    service = client.app.state.service
    with broken_forward(service.engine.model, RuntimeError("out of luck"), at=4):
        response = client.post(PATH, json=chat(stream=True, **ENDLESS))
    assert response.status_code == 200
    *chunks, last = events_of(response.text)
    assert last["error"]["type"] == "server_error" and last["error"]["message"]
    assert chunks and chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert client.post(PATH, json=chat()).status_code == 200


def test_the_official_client_raises_the_error_of_a_stream(server):
    service = server.service
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "extra_body": {"ignore_eos": True}}
        with (
            broken_forward(service.engine.model, RuntimeError("out of luck"), at=4),
            pytest.raises(openai.APIError),
        ):
            for _ in client.chat.completions.create(**body, stream=True):
                pass
        parts = list(client.chat.completions.create(**body, stream=True, max_tokens=5, seed=1))
        whole = client.chat.completions.create(**body, max_tokens=5, seed=1)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
        completion = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, logprobs=1)
        assert len(completion.choices) == 2 and len(completion.choices[0].logprobs.tokens) == 3
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**body, n=500)
        assert caught.value.param == "n"


# ------------------------------------------------------------------ clients that leave, or are slow


def _send(connection: socket.socket, body: dict[str, Any], path: str = PATH) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)


def _assert_all_free(server: ServerThread) -> None:
    engine = server.service.engine
    wait_until(lambda: not engine.engine.has_unfinished and not engine.engine.live.scheduler.requests)
    assert engine.engine.live.block_manager.num_blocks_held == 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [(PATH, {}), (PATH, {"n": 2}), ("/v1/completions", {}), ("/v1/completions", {"prompt": ["a", "b", "c"]})],
)
def test_a_client_that_leaves_a_stream_frees_everything(server, path, fields):
    body = {"prompt": "Hello", **chat(stream=True, **ENDLESS), **fields, "max_tokens": 4000}
    with server.connect() as connection:
        _send(connection, body, path)
        assert connection.recv(100_000).startswith(b"HTTP/1.1 200")
        wait_until(lambda: server.service.engine.num_running >= 1)
    _assert_all_free(server)


def test_a_client_that_leaves_before_its_turn_frees_everything(make_server):
    server = make_server(max_num_seqs=1)
    with server.connect() as first, server.connect() as second:
        _send(first, chat(stream=True, **ENDLESS))
        wait_until(lambda: server.service.engine.num_running == 1)
        _send(second, chat(stream=True, **ENDLESS))
        wait_until(lambda: server.service.engine.num_waiting == 1)
        second.close()
        wait_until(lambda: server.service.engine.num_waiting == 0)
        assert server.service.engine.num_running == 1
    _assert_all_free(server)


def test_a_slow_reader_holds_up_nobody_and_gets_all(server):
    with server.connect() as slow, server.client() as client:
        # Greedy: a draw may fall on the other side of a rounding error where others share the steps.
        body = chat(stream=True, max_tokens=800, ignore_eos=True, temperature=0)
        _send(slow, body)
        for _ in range(5):
            assert client.post(PATH, json=chat()).status_code == 200
        _assert_all_free(server)  # the engine does not wait for its reader
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += slow.recv(65536)
    whole = client_answer(server, {**body, "stream": False})
    text = received.split(b"\r\n\r\n", 1)[1]
    assert joined_chat(events_of(_unchunked(text).decode()))[0]["content"] == whole


def client_answer(server: ServerThread, body: dict[str, Any]) -> str:
    with server.client() as client:
        return client.post(PATH, json=body).json()["choices"][0]["message"]["content"]


def _unchunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


def test_silence_is_filled_with_comments(make_server):
    server = make_server(sse_keep_alive_interval=0.05)
    hold = threading.Event()
    with (
        broken_forward(server.service.engine.model, lambda forward, _: (hold.wait(10), forward())[1]),
        server.client() as client,
        client.stream("POST", PATH, json=chat(stream=True)) as response,
    ):
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        hold.set()
        rest = "\n".join(lines)
    assert joined_chat(events_of(rest.lstrip("\n") + "\n"))[0]["finish_reason"]


# ------------------------------------------------------------------ the response alone


class _Connection:
    """ASGI's two functions, with a client that can leave."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def _items(*items: Any):
    for item in items:
        if isinstance(item, Exception):
            raise item
        await asyncio.sleep(0)
        yield item


def test_a_response_is_ended_aborted_and_closed_whatever_happens():
    async def run(*items: Any) -> tuple[_Connection, int]:
        connection, aborts = _Connection(), []
        await EventStream(_items(*items), lambda: aborts.append(1), 0)({}, connection.receive, connection.send)
        assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
        return connection, len(aborts)

    connection, aborts = asyncio.run(run(b"a", b"b"))
    assert connection.body == b"ab" and aborts == 1
    connection, _ = asyncio.run(run(b"a", ApiError(503, "full", code="queue_full")))
    error, done = connection.body.removeprefix(b"a").split(b"\n\n", 1)
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "queue_full" and done == b"data: [DONE]\n\n"


def test_a_comment_comes_as_soon_as_there_was_silence_for_so_long():
    async def run() -> _Connection:
        connection = _Connection()

        async def chunks():
            await asyncio.sleep(0.02)
            yield b"a"
            await asyncio.sleep(0.6)

        await EventStream(chunks(), lambda: None, 0.4)({}, connection.receive, connection.send)
        return connection

    assert asyncio.run(run()).body == b"a: keep-alive\n\n"


def test_an_answer_whose_beginning_cannot_be_sent_is_aborted():
    aborts = []

    async def send(message: dict[str, Any]) -> None:
        raise ConnectionResetError

    answer = EventStream(_items(b"a"), lambda: aborts.append(1), 0)
    with pytest.raises(ConnectionResetError):
        asyncio.run(answer({}, _Connection().receive, send))
    assert aborts == [1]


def test_chunks_are_taken_only_as_fast_as_they_are_sent():
    async def run() -> None:
        connection, taken = _Connection(), []
        may_send = asyncio.Semaphore(0)

        async def chunks():
            for i in range(5):
                taken.append(i)
                yield b"%d" % i

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                await may_send.acquire()
            await connection.send(message)

        task = asyncio.create_task(EventStream(chunks(), lambda: None, 0)({}, connection.receive, send))
        for sent in range(5):
            await asyncio.sleep(0.01)
            assert len(taken) == sent + 1 and connection.body == b"01234"[:sent]
            may_send.release()
        await task

    asyncio.run(run())


def test_a_response_to_nobody_says_nothing_more():
    async def run() -> _Connection:
        connection, gone = _Connection(), asyncio.Event()

        async def chunks():
            yield b"a"
            connection.gone.set()
            await gone.wait()  # as an answer that was aborted
            raise RuntimeError("nobody hears this")

        await EventStream(chunks(), gone.set, 0)({}, connection.receive, connection.send)
        return connection

    connection = asyncio.run(run())
    assert [message["type"] for message in connection.sent][:2] == ["http.response.start", "http.response.body"]


def test_work_for_a_client_that_has_gone_is_cancelled():
    from hf_paged.serving.streaming import ClientGone

    async def run() -> bool:
        connection, cancelled = _Connection(), asyncio.Event()

        async def work() -> None:
            try:
                connection.gone.set()
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        with pytest.raises(ClientGone):
            await unless_gone(connection, work())  # type: ignore[arg-type]
        assert await unless_gone(_Connection(), asyncio.sleep(0, 5)) == 5  # type: ignore[arg-type]
        return cancelled.is_set()

    assert asyncio.run(run())


def test_the_writer_makes_the_same_of_its_parts_as_json_would():
    head = {"id": "x\u6f22", "object": "o", "created": 5, "model": 'a"b'}
    choice = {"index": 0, "delta": {"content": "\u2028\n\U0001f44d"}}
    counts = {"total_tokens": 3}
    for options, usage in (({}, {}), ({"include_usage": True}, {"usage": None})):
        writer = ChunkWriter(head, lambda: counts, **options)
        whole = {**head, "choices": [choice], **usage}
        assert events_of((writer.chunk(choice) + writer.end()).decode())[0] == whole
        assert events_of((writer.chunk(choice, x=[1], y="z") + writer.end()).decode())[0] == {
            **whole,
            "x": [1],
            "y": "z",
        }
    writer = ChunkWriter(head, lambda: counts, include_usage=True, continuous_usage=True)
    first, last = events_of((writer.chunk(choice) + writer.end()).decode())
    assert first["usage"] == last["usage"] == counts and last["choices"] == []
