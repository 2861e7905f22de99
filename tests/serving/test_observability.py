"""What a whole server tells about its requests: counts that agree with `usage`, spans, logs without secrets."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from hf_paged.serving.errors import overloaded
from tests.serving.observed import collector, numbers_of, spans_in
from tests.serving.servers import wait_until

pytest.importorskip("opentelemetry.sdk")

KEY, SECRET = "sk-do-not-tell", "my name is Bond"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def traced(make_server):
    """A server with a key, and the collector that its spans go to."""
    with collector() as (url, received):
        server = make_server(api_key=(KEY,), otlp_traces_endpoint=url, enable_log_requests=True)
        server.received = received
        yield server
        server.service.observability._tracing._provider.force_flush()  # while somebody listens


@pytest.fixture
def client(traced):
    with traced.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def read(client) -> dict[str, float]:
    return numbers_of(client.get("/metrics").text)


def chat(**fields):
    message = {"role": "user", "content": f"Hello, {SECRET}. What is a cat?"}
    return {"model": "tiny", "messages": [message], "max_tokens": 9, "ignore_eos": True, **fields}


def usage_of(answer) -> dict:
    if answer.headers["content-type"].startswith("application/json"):
        return answer.json()["usage"]
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return chunks[-1]["usage"]


def test_counters_agree_with_the_usage_that_clients_were_told(client):
    before = read(client)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    completion = {"model": "tiny", "prompt": ["one two", "three"], "max_tokens": 5, "ignore_eos": True}
    answers = [
        client.post("/v1/chat/completions", json=chat()),
        client.post("/v1/chat/completions", json=chat(**streamed)),
        client.post("/v1/chat/completions", json=chat(n=3, seed=1, temperature=1)),
        client.post("/v1/completions", json=completion),
        client.post("/v1/completions", json={**completion, **streamed, "stop": "a"}),
    ]
    usages = [usage_of(answer) for answer in answers]
    after = read(client)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["hf_paged:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert grown["hf_paged:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown["hf_paged:prompt_tokens_cached_total"] == cached > 0
    ended = [grown[f"hf_paged:request_success_total{{finished_reason={reason}}}"] for reason in ("stop", "length")]
    assert sum(ended) == 7  # two of the HTTP requests had two prompts
    assert grown["hf_paged:http_requests_total{route=/v1/chat/completions,status=200}"] == 3
    assert {name: after[f"vllm:{name}"] for name in GAUGES} == dict.fromkeys(GAUGES, 0)


def test_five_clients_that_leave_are_five_aborts(client, traced, caplog):
    caplog.set_level(logging.INFO, "hf_paged.access")
    before = read(client)

    def leave():
        with (
            traced.client(headers={"Authorization": f"Bearer {KEY}"}) as mine,
            mine.stream("POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=1000)) as answer,
        ):
            next(answer.iter_lines())

    threads = [threading.Thread(target=leave) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    aborts = "hf_paged:request_success_total{finished_reason=abort}"
    wait_until(lambda: read(client)[aborts] == before[aborts] + 5)
    after = read(client)
    assert {name: after[f"vllm:{name}"] for name in GAUGES} == dict.fromkeys(GAUGES, 0)
    ours = [record for record in caplog.records if record.name == "hf_paged.access"]
    lines = [record for record in ours if "/v1/chat/completions" in record.getMessage()]
    assert [record.fields["finish"] for record in lines] == ["abort"] * 5


def test_what_a_stopping_server_aborts_is_an_abort(client, traced):
    before = read(client)
    with client.stream("POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=1000)) as answer:
        lines = answer.iter_lines()
        next(lines)
        traced.service.engine.abort_all(overloaded("The server is shutting down.", "shutting_down"))
        assert any("shutting_down" in line for line in lines)
    ended = {reason: f"hf_paged:request_success_total{{finished_reason={reason}}}" for reason in ("abort", "error")}
    wait_until(lambda: read(client)[ended["abort"]] == before[ended["abort"]] + 1)
    assert read(client)[ended["error"]] == before[ended["error"]]


def test_metrics_come_in_the_form_that_was_asked_for(client, traced):
    plain = client.get("/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    open_metrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert open_metrics.text.endswith("# EOF\n")
    with traced.client() as stranger:
        assert stranger.get("/metrics").status_code == 401


def test_a_request_is_a_span_under_its_clients(client, traced):
    force_flush = traced.service.observability._tracing._provider.force_flush
    force_flush()
    del traced.received[:]
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
    answer = client.post("/v1/chat/completions", json=chat(), headers=headers).json()
    wait_until(lambda: force_flush() and traced.received)
    (span,) = spans_in(traced.received)
    said = {attribute.key: attribute.value for attribute in span.attributes}
    assert span.trace_id.hex() == trace and span.parent_span_id.hex() == PARENT
    assert said["http.route"].string_value == "/v1/chat/completions"
    assert said["gen_ai.operation.name"].string_value == "chat"
    assert said["gen_ai.request.id"].string_value.startswith(answer["id"] + "-")  # ids may be sent twice
    assert said["gen_ai.usage.output_tokens"].int_value == answer["usage"]["completion_tokens"]
    assert SECRET not in str(span)


def test_logs_hold_neither_prompts_nor_answers_nor_keys(client, traced, caplog):
    caplog.set_level(logging.DEBUG)
    answers = [
        client.post("/v1/chat/completions", json=chat()),
        client.post("/v1/chat/completions", json=chat(max_tokens=-1)),
        client.post("/v1/chat/completions", json=chat(), headers={"Authorization": "Bearer sk-another"}),
        client.get("/v1/models", params={"api_key": KEY}),
        client.get(f"/elsewhere?key={KEY}"),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 401, 200, 404]
    # httpx logs each request, too: what is waited for is the server's own line.
    wait_until(lambda: any(r.name == "hf_paged.access" and "/elsewhere" in r.getMessage() for r in caplog.records))
    said = [(record.name, record.getMessage(), getattr(record, "fields", None)) for record in caplog.records]
    lines = [entry for entry in said if entry[0] == "hf_paged.access"]
    assert [message for _, message, _ in lines if "/metrics" not in message] == [
        "POST /v1/chat/completions 200", "POST /v1/chat/completions 400", "POST /v1/chat/completions 401",
        "GET /v1/models 200", "GET /elsewhere 404",
    ]  # fmt: skip
    refusals = [(fields.get("code"), fields.get("param")) for _, _, fields in lines[1:3]]
    assert refusals == [("invalid_value", "max_tokens"), ("invalid_api_key", None)]  # why, but not what was sent
    # pytest shows what nobody else would see: uvicorn's own access log, which is off.
    ours = str([entry for entry in said if entry[0].startswith(("hf_paged", "uvicorn.error"))])
    content = answers[0].json()["choices"][0]["message"]["content"]
    for secret in (KEY, "sk-another", SECRET, "Bond", content):
        assert secret not in ours
    (arrival,) = [fields for name, _, fields in said if name == "hf_paged.requests"]
    assert arrival["prompt"] == answers[0].json()["usage"]["prompt_tokens"] and "text" not in arrival


def test_what_a_stopping_server_refuses_is_counted(client, traced):
    name = "vllm:admission_rejections_total{reason=shutting_down}"
    before = read(client)[name]
    traced.service.draining = True
    try:
        refused = client.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        assert read(client)[name] == before + 1
    finally:
        traced.service.draining = False
