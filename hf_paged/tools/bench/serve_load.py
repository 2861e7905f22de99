"""Sends requests at their times and writes down what comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from .serve_client import ConnectionLostError, HttpClient
from .serve_dataset import ServeRequest
from .serve_records import RequestRecord, StreamRecorder
from .serve_settings import ServeBenchSettings
from .serve_statistics import ClientCost

LAG_INTERVAL = 0.05
# Sockets beside those of requests.
SPARE_FILES = 256


def request_body(request: ServeRequest, model: str, settings: ServeBenchSettings) -> bytes:
    """Returns a request as JSON.

    Args:
        request (`ServeRequest`):
            What is asked.
        model (`str`):
            The model's name.
        settings (`ServeBenchSettings`):
            Endpoint and sampling.
    """
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if settings.is_chat:
        body |= {"messages": [{"role": "user", "content": request.prompt}], "max_completion_tokens": request.output_len}
    else:
        body |= {"prompt": request.prompt, "max_tokens": request.output_len}
    names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    body |= {name: getattr(settings, name) for name in names}
    if settings.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": settings.logprobs} if settings.is_chat else {
            "logprobs": settings.logprobs
        }  # fmt: skip
    if settings.ignore_eos:
        body["ignore_eos"] = True
    body = {name: value for name, value in body.items() if value is not None}
    return json.dumps(body | settings.extra_body | request.body).encode()


async def send_one(
    client: HttpClient, path: str, body: bytes, planned: float, timeout: float | None = None
) -> RequestRecord:
    """Sends a request and returns what became of it; never raises for what the server does.

    Args:
        client (`HttpClient`):
            The server.
        path (`str`):
            The endpoint.
        body (`bytes`):
            The request, which must ask for a stream.
        planned (`float`):
            When it should be sent.
        timeout (`float`, *optional*):
            Seconds that it may take.
    """
    record = RequestRecord(planned=planned, start=time.perf_counter())
    try:
        async with asyncio.timeout(timeout):
            answer = await client.send("POST", path, body, StreamRecorder(record).feed)
        if answer.status != 200:
            record.fail(f"http {answer.status}", answer.body[:500].decode("utf-8", "replace"))
        elif not record.is_complete:
            record.fail("cut off", "the stream ended without [DONE]")
    except TimeoutError:
        record.fail("timeout", f"no end within {timeout:g} s")
    except ConnectionLostError as error:
        record.fail("connection lost", str(error))
    except OSError as error:
        record.fail("no connection", str(error))
    record.end = record.end or time.perf_counter()
    return record


async def send_all(
    client: HttpClient,
    path: str,
    bodies: Sequence[bytes],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    timeout: float | None = None,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
) -> tuple[list[RequestRecord], float, ClientCost]:
    """Sends requests at their times; returns their records, seconds that all took, and what that cost the client.

    Args:
        client (`HttpClient`):
            The server.
        path (`str`):
            The endpoint.
        bodies (`Sequence[bytes]`):
            The requests.
        times (`Sequence[float]`):
            Seconds from now for each, ascending.
        max_concurrency (`int`, *optional*):
            At most so many at a time; the others wait.
        timeout (`float`, *optional*):
            Seconds that one may take.
        on_end (`Callable[[RequestRecord], None]`, *optional*):
            Told of each that ended.
    """
    allow_files(len(bodies))
    seats = asyncio.Semaphore(max_concurrency or len(bodies))
    lags: list[float] = []
    watch = asyncio.create_task(_watch_loop(lags))
    cpu, begin = time.process_time(), time.perf_counter()

    async def one(body: bytes, planned: float) -> RequestRecord:
        async with seats:
            record = await send_one(client, path, body, planned, timeout)
        on_end(record)
        return record

    tasks = []
    async with asyncio.TaskGroup() as group:
        for body, seconds in zip(bodies, times, strict=True):
            wait = begin + seconds - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(body, begin + seconds)))
    duration = time.perf_counter() - begin
    watch.cancel()
    return [task.result() for task in tasks], duration, ClientCost(time.process_time() - cpu, lags)


async def _watch_loop(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + LAG_INTERVAL
        await asyncio.sleep(LAG_INTERVAL)
        lags.append(time.perf_counter() - due)


def allow_files(count: int) -> None:
    """Raises the process's limit of open files, where it is too low for so many connections and may be raised.

    Args:
        count (`int`):
            Connections.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + SPARE_FILES
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
