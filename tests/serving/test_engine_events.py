"""`/engine/events`: who may watch, what is told, and that nobody has to wait for a watcher."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import pytest

from hf_paged.serving import engine_events, lifecycle
from hf_paged.serving.engine_events import MAX_WATCHERS, Watchers
from hf_paged.serving.engine_view import Picture
from hf_paged.serving.errors import ApiError
from tests.serving.servers import chat, wait_until
from tests.serving.watched import Watched

LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def watching(server, **options):
    """A stream of events; yields an iterator of what is told."""
    with server.client(**options) as client, client.stream("GET", "/engine/events") as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


def watchers(server) -> Watchers:
    return server.app.state.watchers


def answer(server, content, **fields):
    """An answer that is read in a thread."""

    def read():
        with (
            server.client() as client,
            client.stream("POST", "/v1/chat/completions", json=chat(content, **fields)) as r,
        ):
            for _ in r.iter_lines():
                pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


# ---------------------------------------------------------------------- what is told


def test_events_tell_of_requests_and_blocks_until_all_is_as_the_engine_says(server):
    blocks = server.service.engine.engine.live.block_manager
    secret = "Nobody else may read this. " * 20
    watched, seen, texts = Watched(), set(), []
    with watching(server) as events:
        watched.take(next(events))
        assert watched.about["num_blocks"] == [256] and watched.about["model"] == "tiny"
        threads = [answer(server, f"{secret}{number}", **LONG) for number in range(4)]
        for told in events:
            texts.append(json.dumps(told))
            watched.take(told)
            seen |= set(watched.requests)
            most = max(watched.owners(0))
            if len(seen) >= 4 and not watched.figures["running"] and not any(t.is_alive() for t in threads):
                break
            if watched.figures["running"] == 4:
                assert most > 1, "the blocks of the common beginning are shared"
        assert watched.owners(0) == blocks.pools[0].ref_counts == [0] * 256
        assert watched.marks[0] == {block for block, _ in blocks.indexes[0].items()} and watched.marks[0]
    assert all(name.startswith("chatcmpl-") for name in seen)
    assert not any("Nobody" in text for text in texts), "no prompt leaves the engine this way"
    assert watched.figures["generated"] >= 4 * 400
    assert watched.latencies["first_token"] and watched.latencies["inter_token"]
    for thread in threads:
        thread.join(60)


def test_a_watcher_that_comes_later_is_told_all(server):
    thread = answer(server, "Count.", **LONG)
    with watching(server) as first:
        for told in first:
            if told["figures"]["running"]:
                break
        with watching(server) as second:
            watched = Watched()
            watched.take(next(second))
            assert watched.tables or not watched.figures["running"]
    thread.join(60)


def test_a_watcher_is_told_now_and_then_that_nothing_is_new(server):
    with watching(server) as events:
        times = [next(events)["figures"]["now"] for _ in range(3)]
    assert times[1] - times[0] > engine_events._SILENCE / 2
    assert times == sorted(times)


# ---------------------------------------------------------------------- who may watch


def test_events_need_a_key_as_any_route(make_server):
    server = make_server(api_key=("sk-right",))
    with server.client() as client:
        refused = client.get("/engine/events")
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/engine/events?key=sk-right").status_code == 401
    with watching(server, headers={"Authorization": "Bearer sk-right"}) as events:
        assert next(events)["about"]


def test_so_many_may_watch_and_the_next_is_told_to_come_again(server):
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(watching(server)) for _ in range(MAX_WATCHERS)]
        assert all(next(events)["about"] for events in streams)
        with server.client() as client:
            refused = client.get("/engine/events")
        assert refused.status_code == 503 and refused.headers["retry-after"] == str(engine_events.RETRY_AFTER)
        assert str(MAX_WATCHERS) in refused.json()["error"]["message"]
    wait_until(lambda: len(watchers(server)) == 0)
    with watching(server) as events:
        assert next(events)["about"]


def test_only_get_is_possible(client):
    for method in ("POST", "HEAD", "DELETE"):
        assert client.request(method, "/engine/events").status_code == 405


# ---------------------------------------------------------------------- nobody is disturbed


def test_nobody_looks_while_nobody_watches(server, monkeypatch):
    looks = []
    look = watchers(server)._look
    monkeypatch.setattr(watchers(server), "_look", lambda: looks.append(1) or look())
    answer(server, "Count.", **LONG).join(60)
    assert not looks
    with watching(server) as one, watching(server) as other:
        assert next(one)["about"] and next(other)["about"]
        task = watchers(server)._task
        assert task is not None
    wait_until(lambda: task.done())
    assert looks and len(watchers(server)) == 0
    assert watchers(server).picture is None and not watchers(server)._differences


def test_a_look_that_fails_ends_the_watching_and_nothing_else(make_server, monkeypatch, caplog):
    server = make_server()

    def fail():
        raise RuntimeError("broken look")

    with monkeypatch.context() as broken:
        broken.setattr(watchers(server), "_look", fail)
        with server.client() as client:
            text = client.get("/engine/events").text
        assert json.loads(text.split("\n\n")[0].removeprefix("data: "))["error"]["code"] == "internal_error"
        assert "could not look at the engine" in caplog.text
        answer(server, "Hello").join(60)
    with watching(server) as events:
        assert next(events)["about"], "the next watcher finds it mended"


def test_draining_does_not_wait_for_watchers(make_server):
    server = make_server()
    with watching(server) as events:
        assert next(events)["about"]
        assert server.app.state.work.num_running == 0
        server.server.stop(timeout=600)
        states = [told["figures"]["state"] for told in events]  # to the end of the stream
        assert states[-1:] in (["draining"], [])
    server.thread.join(60)
    assert not server.thread.is_alive() and server.server.exit_code == 0


def test_a_watcher_that_does_not_read_keeps_nobody_from_leaving(make_server, monkeypatch):
    monkeypatch.setattr(lifecycle, "_GOODBYE_SECONDS", 1)
    monkeypatch.setattr(engine_events, "_INTERVAL", 0.01)
    server = make_server()
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with server.connect() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.sendall(b"GET /engine/events HTTP/1.1\r\nHost: x\r\n\r\n")
        threads = [answer(server, f"Count {number}. " * 60, **{**LONG, "max_tokens": 3000}) for number in range(8)]
        wait_until(lambda: any(c.flow.write_paused for c in server.server.server_state.connections))
        server.server.stop(timeout=0)
        for thread in [*threads, server.thread]:
            thread.join(60)
    assert not server.thread.is_alive()


def test_a_slow_watcher_is_told_less_often_and_still_all():
    """The pictures that it has missed are in no queue: the next event leads from what it saw to what there is."""
    numbers = iter(range(10**6))

    def look() -> Picture:
        number = next(numbers)
        return Picture({"num_blocks": [4]}, {"now": number}, [b""], {str(number): (number,)}, {}, {})

    async def watch() -> None:
        group = Watchers(look, lambda: False, limit=1)
        watcher = group.join()
        with pytest.raises(ApiError):
            group.join()
        events = watcher.events()
        watched = Watched()
        watched.take(json.loads((await anext(events)).removeprefix(b"data: ")))
        for _ in range(2):
            seen = watched.figures["now"]
            while group.picture.figures["now"] < seen + 5:
                await asyncio.sleep(0.001)
            watched.take(json.loads((await anext(events)).removeprefix(b"data: ")))
            assert watched.figures["now"] >= seen + 5
            assert watched.requests == {str(watched.figures["now"]): [watched.figures["now"]]}
        watcher.leave()
        assert [event async for event in events] == []
        assert len(group) == 0 and group.picture is None
        await asyncio.wait_for(group._task, 10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_events, "_INTERVAL", 0.001)
        asyncio.run(watch())
