"""The scenarios of `chaos.py`: each starts its own server, does its worst, and counts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hf_paged.tools.bench.serve import run_loop
from hf_paged.tools.bench.serve_client import HttpClient
from hf_paged.tools.bench.serve_load import allow_files

from .chaos_client import ANSWERED, DROPPED, FAILED, LOST, Outcome, Tally, ask
from .chaos_fuzz import random_request
from .servers import OURS, RunningServer, Server, our_command, serving

PATH = "/v1/completions"
START_SECONDS = 180.0
SOON = 5.0
SETTLE_SECONDS = 20.0
# A token that makes the model of `broken_request` raise.
MARK = 77
USAGE = "hf_paged:kv_cache_usage_perc"
BUSY = ("hf_paged:num_requests_running", "hf_paged:num_requests_waiting")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where scenarios run.

    Args:
        model (`Path`):
            A Transformers folder.
        folder (`Path`):
            For logs.
        seconds (`float`):
            Of the mixed load.
        seed (`int`):
            Of the mixed load.
        scale (`float`, defaults to 1.0):
            Fewer clients, for a short form.
    """

    model: Path
    folder: Path
    seconds: float = 600.0
    seed: int = 0
    scale: float = 1.0

    def server(self, name: str, *flags: str) -> contextlib.AbstractContextManager[RunningServer]:
        """Returns a server for a scenario.

        Args:
            name (`str`):
                Of its log.
            flags (`str`):
                Its flags.
        """
        command = our_command(self.model, "--served-model-name", OURS, "--max-model-len", "2048", *flags)
        return serving(command, self.folder / f"chaos-{name}.log", timeout=START_SECONDS)

    def many(self, count: int) -> int:
        """Returns a number of clients.

        Args:
            count (`int`):
                In the long form.
        """
        return max(4, round(count * self.scale))


def body(prompt: str | list[int] = "Once upon a time", length: int = 32, **fields: Any) -> dict[str, Any]:
    """Returns a greedy request of forced length that is answered as a stream.

    Args:
        prompt (`str` or `list[int]`):
            The prompt.
        length (`int`, defaults to 32):
            Tokens of its answer.
        fields (`Any`):
            Further fields.
    """
    asked = {"model": OURS, "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    return {**asked, "stream": True, **fields}


def scenario(work: Callable[[HttpClient, Any, Tally], Awaitable[None]], server: Server, name: str) -> Tally:
    """Runs a scenario's client and then sees whether the server is as it was.

    Args:
        work (`Callable`):
            The scenario.
        server (`Server`):
            The server.
        name (`str`):
            Of the scenario.
    """
    tally = Tally(name)

    async def run() -> None:
        client = HttpClient(server.url)
        try:
            await work(client, server, tally)
            outcome = await ask(client, PATH, body("The end", 4), timeout=60.0)
            tally.add(outcome)
            tally.expect(outcome.kind == ANSWERED, f"an ordinary request afterwards is answered, not {outcome}")
        finally:
            client.close()

    run_loop(run())
    tally.expect(server.get("/health")[0] == 200, "/health is 200 afterwards")
    tally.notes["blocks_in_use"] = in_use = blocks_in_use(server)
    tally.expect(in_use == 0, f"all blocks are free at the end, not {in_use} in use")
    return tally


def blocks_in_use(server: Server) -> int:
    """Returns the blocks that are held, once nothing runs any more.

    Args:
        server (`Server`):
            The server.
    """
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        metrics = server.metrics()
        usage = next(value for name, value in metrics.items() if name.startswith(USAGE))
        busy = sum(
            v for n, v in metrics.items() if n.startswith(("hf_paged:num_requests_r", "hf_paged:num_requests_w"))
        )
        if (usage == 0 and busy == 0) or time.monotonic() > end:
            blocks = json.loads(server.get("/server_info")[1])["plan"]["num_blocks"]
            return round(usage * blocks)
        time.sleep(0.1)


def paused(place: Place) -> Tally:
    """The process is stopped for three seconds in the middle of streams, and goes on.

    Args:
        place (`Place`):
            Where.
    """

    async def work(client: HttpClient, server: RunningServer, tally: Tally) -> None:
        asked = [ask(client, PATH, body(f"Number {n}", 160), timeout=120.0) for n in range(place.many(16))]
        streams = [asyncio.create_task(each) for each in asked]
        await asyncio.sleep(1.0)
        os.kill(server.process.pid, signal.SIGSTOP)
        # Requests that come meanwhile wait in the kernel.
        streams += [asyncio.create_task(ask(client, PATH, body(f"Late {n}", 8), timeout=120.0)) for n in range(4)]
        await asyncio.sleep(3.0)
        os.kill(server.process.pid, signal.SIGCONT)
        for outcome in await asyncio.gather(*streams):
            tally.add(outcome)
        tally.expect(tally.kinds[ANSWERED] == len(streams), "all requests are answered")

    with place.server("paused", "--max-num-seqs", "8") as server:
        return scenario(work, server, "paused")


def dropped(place: Place) -> Tally:
    """Sixty clients begin to read long answers and leave; four seats.

    Args:
        place (`Place`):
            Where.
    """

    async def work(client: HttpClient, server: RunningServer, tally: Tally) -> None:
        def one(number: int) -> Awaitable[Outcome]:
            long = body(f"Number {number}", 1900, stream=number % 3 != 0)
            # Every third is not streamed: its client leaves while it waits.
            return ask(client, PATH, long, drop_after=2 if number % 3 else None, timeout=15.0 if number % 3 else 1.0)

        for outcome in await asyncio.gather(*(one(number) for number in range(place.many(60)))):
            # Those that never got a seat left by their time-out, which is what they were to do.
            tally.add(dataclasses.replace(outcome, kind=DROPPED) if outcome.kind == LOST else outcome)
        outcome = await ask(client, PATH, body("And now", 8), timeout=SOON)
        tally.add(outcome)
        tally.notes["next_request_seconds"] = round(outcome.seconds, 2)
        tally.expect(outcome.kind == ANSWERED, f"the next request is answered within {SOON:g} s, not {outcome}")

    with place.server("dropped", "--max-num-seqs", "4") as server:
        return scenario(work, server, "dropped")


def slow_readers(place: Place) -> Tally:
    """Clients that do not read what they asked for, and then read all of it; others are not to notice.

    Args:
        place (`Place`):
            Where.
    """

    async def work(client: HttpClient, server: RunningServer, tally: Tally) -> None:
        count = place.many(16)
        slow = [asyncio.create_task(asyncio.to_thread(read_late, server.url, 1500, 8.0)) for _ in range(count)]
        await asyncio.sleep(1.0)
        for number in range(4):
            outcome = await ask(client, PATH, body(f"Quick {number}", 4), timeout=60.0)
            tally.add(outcome)
        for outcome in await asyncio.gather(*slow):
            tally.add(outcome)
        tally.expect(tally.kinds[ANSWERED] == count + 4, "all requests are answered")

    with place.server("slow", "--max-num-seqs", "32") as server:
        return scenario(work, server, "slow readers")


def read_late(url: str, length: int, wait: float) -> Outcome:
    """Asks for a stream over a socket with a small buffer, reads nothing for a while, then everything.

    Args:
        url (`str`):
            The server.
        length (`int`):
            Tokens of the answer.
        wait (`float`):
            Seconds.
    """
    parts = urlsplit(url)
    data = json.dumps(body("A long story", length, logprobs=5)).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(300.0)
        connection.connect((parts.hostname, parts.port))
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(wait)
        received = b""
        try:
            while piece := connection.recv(65536):
                received += piece
        except OSError as error:
            return Outcome(LOST, str(error))
    whole = b"data: [DONE]" in received and b" 200 " in received[:20]
    return Outcome(ANSWERED) if whole else Outcome(LOST, received[-200:].decode("utf-8", "replace"))


def idle(place: Place) -> Tally:
    """Two thousand connections that say nothing, half of them with half a request.

    Args:
        place (`Place`):
            Where.
    """

    async def work(client: HttpClient, server: RunningServer, tally: Tally) -> None:
        count = place.many(2000)
        allow_files(count)
        parts = urlsplit(server.url)
        connections = []
        for number in range(count):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            if number % 2:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
            connections.append(writer)
        tally.notes["connections"] = count
        before = server.memory()
        for number in range(8):
            outcome = await ask(client, PATH, body(f"Number {number}", 8), timeout=SOON)
            tally.add(outcome)
            tally.expect(outcome.kind == ANSWERED, f"requests are answered within {SOON:g} s, not {outcome}")
        tally.notes["mebibytes"] = round(before / 2**20)
        for writer in connections:
            writer.close()

    with place.server("idle") as server:
        return scenario(work, server, "idle connections")


def terminated(place: Place, timeout: float = 0.0) -> Tally:
    """SIGTERM under load.

    Args:
        place (`Place`):
            Where.
        timeout (`float`, defaults to 0.0):
            `--shutdown-timeout`: so long what runs may go on.
    """
    tally = Tally(f"SIGTERM, --shutdown-timeout {timeout:g}")

    async def work(server: RunningServer) -> None:
        client = HttpClient(server.url)
        count = place.many(24)
        asked = [ask(client, PATH, body(f"Number {n}", 200, stream=n % 2 == 0), timeout=120.0) for n in range(count)]
        running = [asyncio.create_task(each) for each in asked]
        await asyncio.sleep(1.5)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        late = [await ask(client, PATH, body("Late", 4), timeout=60.0) for _ in range(4)]
        outcomes = await asyncio.gather(*running)
        for outcome in (*late, *outcomes):
            tally.add(outcome)
        tally.expect(all(outcome.kind == "refused" for outcome in late), "requests after the signal are refused")
        if timeout:
            answered = sum(outcome.kind == ANSWERED for outcome in outcomes)
            tally.expect(answered == count, f"all of {count} running requests are answered, not {answered}")
        tally.expect(not tally.kinds[LOST], "every running request is told how it ended")

    with place.server(f"sigterm-{timeout:g}", "--shutdown-timeout", str(timeout)) as server:
        run_loop(work(server))
        begin = time.perf_counter()
        with contextlib.suppress(Exception):
            server.process.wait(30.0)
        tally.notes["exit_code"] = server.process.poll()
        tally.notes["seconds_to_exit"] = round(time.perf_counter() - begin, 2)
        tally.expect(server.process.poll() == 0, f"the process ends with 0, not {server.process.poll()}")
    return tally


def broken_step(place: Place) -> Tally:
    """The model raises once, in its eleventh forward, while sixteen requests run.

    Args:
        place (`Place`):
            Where.
    """

    async def work(client: HttpClient, server: Server, tally: Tally) -> None:
        asked = [ask(client, PATH, body(f"Number {n}", 48, stream=n % 2 == 0), timeout=60.0) for n in range(16)]
        for outcome in await asyncio.gather(*asked):
            tally.add(outcome)
        tally.expect(raised.is_set(), "a forward raised")
        tally.expect(not tally.kinds[LOST], "every request is told how it ended")

    raised = threading.Event()

    def break_once(number: int, kwargs: dict[str, Any]) -> None:
        if number == 11:
            raised.set()
            raise RuntimeError("the eleventh forward")

    with in_process(place, break_once) as server:
        return scenario(work, server, "exception in the 11th forward")


def broken_request(place: Place) -> Tally:
    """The model raises whenever it sees a certain token: two of sixteen requests have it.

    Args:
        place (`Place`):
            Where.
    """
    others = {"logit_bias": {str(MARK): -100}}

    async def work(client: HttpClient, server: Server, tally: Tally) -> None:
        first = [ask(client, PATH, body(f"Number {n}", 64, **others), timeout=60.0) for n in range(14)]
        running = [asyncio.create_task(each) for each in first]
        await asyncio.sleep(0.5)
        guilty = [ask(client, PATH, body([MARK] * 5, 8, stream=n == 0), timeout=60.0) for n in range(2)]
        blamed = await asyncio.gather(*guilty)
        innocent = await asyncio.gather(*running)
        for outcome in (*blamed, *innocent):
            tally.add(outcome)
        tally.expect(all(o.kind == FAILED for o in blamed), f"the requests at fault fail: {[o.kind for o in blamed]}")
        tally.expect(all(o.kind == ANSWERED for o in innocent), "the others are answered")

    def break_on_mark(number: int, kwargs: dict[str, Any]) -> None:
        if bool((kwargs["input_ids"] == MARK).any()):
            raise RuntimeError("this token again")

    with in_process(place, break_on_mark) as server:
        return scenario(work, server, "requests that make each step fail")


@contextlib.contextmanager
def in_process(place: Place, before: Callable[[int, dict[str, Any]], None]) -> Iterator[Server]:
    """Runs a server in a thread of this process, whose model does something before each of its forwards.

    Args:
        place (`Place`):
            Where.
        before (`Callable[[int, dict[str, Any]], None]`):
            Called with the forward's number, counted from the server's start, and its arguments; may raise.
    """
    from hf_paged.serving.app import make_app
    from hf_paged.serving.http_protocol import make_protocol
    from hf_paged.serving.lifecycle import make_server
    from hf_paged.serving.loading import load_service
    from hf_paged.serving.settings import ServerSettings

    settings = ServerSettings(model=str(place.model), served_model_name=(OURS,), max_model_len=2048, max_num_seqs=16)
    service = load_service(settings)
    kind = type(service.engine.model)
    forward, calls = kind.forward, itertools.count(1)

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(next(calls), kwargs)
        return forward(self, *args, **kwargs)

    protocol = make_protocol(settings.read_timeout, settings.max_body_bytes)
    server = make_server(make_app(service), service, protocol)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        kind.forward = hooked
        try:
            thread.start()
            while not server.started:
                time.sleep(0.01)
            yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            kind.forward = forward
            server.stop(0.0)
            thread.join(30.0)
            service.close()


def mixed(place: Place) -> Tally:
    """All kinds of requests with parameters crossed at random, clients that leave, and one that must stay the same.

    Args:
        place (`Place`):
            Where.
    """
    end = time.monotonic() + place.seconds
    fixed: list[bytes] = []

    async def work(client: HttpClient, server: RunningServer, tally: Tally) -> None:
        # Started here: the server's own start does not count.
        nonlocal end
        end = time.monotonic() + place.seconds

        async def careless(number: int) -> None:
            source = random.Random(place.seed * 1000 + number)
            while time.monotonic() < end:
                path, asked = random_request(source, OURS)
                leave = source.randint(1, 4) if asked.get("stream") and source.random() < 0.2 else None
                # Whoever gives way to all others may have to wait until there are none.
                gives_way = isinstance(asked.get("priority"), int) and asked["priority"] > 0
                wait = 120.0 + (end - time.monotonic() if gives_way else 0.0)
                outcome = await ask(client, path, asked, timeout=wait, drop_after=leave)
                tally.add(outcome)
                if outcome.kind in (LOST, "failed"):
                    tally.problems.append(f"{path} {json.dumps(asked)[:600]}: {outcome.detail[:300]}")

        async def careful() -> None:
            while time.monotonic() < end:
                outcome = await ask(client, PATH, body("Once upon a time", 24, stream=False), timeout=120.0)
                tally.add(outcome)
                tally.expect(outcome.kind == ANSWERED, f"the ordinary client is answered, not {outcome}")
                if outcome.kind == ANSWERED:
                    fixed.append(json.dumps(json.loads(outcome.body)["choices"]).encode())
                await asyncio.sleep(0.2)

        await asyncio.gather(careful(), *(careless(number) for number in range(place.many(24))))
        tally.notes["memory_mebibytes"] = round(server.memory() / 2**20)

    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--scheduling-policy", "priority")
    short = ("--max-model-len", "768")  # an answer without a limit of its own ends within the client's patience
    with place.server(
        "mixed", "--max-num-seqs", "16", "--max-num-queued-reqs", "64", "--dtype", "float32", *flags, *short
    ) as server:
        tally = scenario(work, server, f"mixed load, {place.seconds:g} s")
    tally.notes["ordinary_answers"] = len(fixed)
    tally.expect(len(set(fixed)) == 1, f"the same request has the same answer each time, not {len(set(fixed))} ones")
    return tally


SCENARIOS: dict[str, Callable[[Place], Tally]] = {
    "paused": paused,
    "dropped": dropped,
    "slow": slow_readers,
    "idle": idle,
    "sigterm": terminated,
    "drain": lambda place: terminated(place, 60.0),
    "broken-step": broken_step,
    "broken-request": broken_request,
    "mixed": mixed,
}
