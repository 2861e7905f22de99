"""An engine whose requests are watched, and what is then read of it."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hf_paged import AsyncEngine, SamplingParams
from hf_paged.serving.metrics import Metrics
from hf_paged.serving.observability import Observability
from tests.conftest import random_prompts
from tests.paged_models import paged

PROMPTS = random_prompts(12, 199, seed=1)


class Observed:
    """A tiny model's engine with metrics of its own."""

    def __init__(self, **config: Any):
        self.model = paged(**{"block_size": 8, "num_blocks": 100, "max_num_seqs": 8, **config})
        self.engine = AsyncEngine(self.model)
        self.start_over()

    def start_over(self, **parts: Any) -> None:
        """Other metrics, so that a test sees its own requests only."""
        self.model.engine.reset_stats()
        self.metrics = Metrics(self.engine, "tiny")
        self.observability = Observability(self.metrics, **parts)

    def submit(self, prompt: list[int], max_tokens: int = 8, *, trace: Any = None, stream: bool = True, **wanted: Any):
        params = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **wanted})
        answers = self.engine.submit(prompt, params, stream=stream)
        self.observability.watch(answers, trace)
        return answers

    async def ask(self, prompt: list[int], max_tokens: int = 8, **wanted: Any):
        async with self.submit(prompt, max_tokens, **wanted) as answers:
            return await answers.output()

    def ask_all(self, prompts: Iterable[list[int]] = PROMPTS, max_tokens: int = 8, **wanted: Any) -> list[Any]:
        async def everybody():
            outputs = await asyncio.gather(*(self.ask(prompt, max_tokens, **wanted) for prompt in prompts))
            await self.idle()
            return outputs

        return asyncio.run(everybody())

    async def idle(self) -> None:
        """Waits until nothing is running and everybody was told."""
        while self.engine.engine.has_unfinished or self.engine._live:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.01)

    def numbers(self, accept: str = "") -> dict[str, float]:
        """What is exported: `name{label=value,...}` without the labels that all series carry -> number."""
        return numbers_of(self.metrics.render(accept)[0].decode())


def numbers_of(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return found


@contextlib.contextmanager
def collector(hold: threading.Event | None = None) -> Iterator[tuple[str, list[Any]]]:
    """An OTLP collector on this machine. Yields its URL and the requests that it has got."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802 (http.server's name)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if hold is not None:
                hold.wait(30)
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            with contextlib.suppress(OSError):
                self.send_response(200)
                self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def spans_in(received: list[Any]) -> list[Any]:
    """All spans that a collector has got."""
    groups = [group for _, body in received for group in body.resource_spans]
    return [span for group in groups for scope in group.scope_spans for span in scope.spans]
