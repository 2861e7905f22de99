"""A span for each request, in a collector of our own: what it says, where it belongs, and that requests never wait."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time

import pytest

from hf_paged.errors import ConfigurationError, MissingDependencyError, RequestAbortedError, StepFailedError
from tests.paged_models import broken_forward
from tests.serving.observed import PROMPTS, collector, spans_in

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hf_paged.serving.tracing import Tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def observed(shared, spans):
    """An engine whose spans end up in `spans`, once `observed.tracing` is closed."""
    shared.tracing = Tracing("http://nowhere", "tiny", exporter=spans)
    shared.start_over(tracing=shared.tracing)
    return shared


def test_a_span_says_what_was_asked_for_and_what_it_took(observed, spans):
    before = time.time_ns()
    (output,) = observed.ask_all(PROMPTS[:1], max_tokens=6, temperature=0.5, top_p=0.9, seed=1)
    after = time.time_ns()
    observed.tracing.close()
    (span,) = spans.get_finished_spans()
    assert span.name == "llm_request" and span.kind is SpanKind.SERVER
    assert span.resource.attributes["service.name"] == "hf_paged"
    assert before - 5e6 <= span.start_time < span.end_time <= after + 5e6
    said = dict(span.attributes)
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny"
    assert said["gen_ai.request.id"] == output.request_id
    assert said["gen_ai.request.max_tokens"] == 6 and said["gen_ai.request.n"] == 1
    assert said["gen_ai.request.temperature"] == 0.5 and said["gen_ai.request.top_p"] == 0.9
    assert said["gen_ai.usage.prompt_tokens"] == said["gen_ai.usage.input_tokens"] == len(PROMPTS[0])
    assert said["gen_ai.usage.completion_tokens"] == said["gen_ai.usage.output_tokens"] == 6
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    latency = {name.removeprefix("gen_ai.latency."): v for name, v in said.items() if name.startswith("gen_ai.latency")}
    assert set(latency) == {
        "time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode",
        "time_in_model_inference",
    }  # fmt: skip
    assert latency["e2e"] == pytest.approx(latency["time_in_queue"] + latency["time_in_model_inference"])
    assert latency["e2e"] == pytest.approx((span.end_time - span.start_time) / 1e9, abs=1e-6)


def test_a_span_belongs_under_the_clients(observed, spans):
    context = observed.tracing.extract(TRACEPARENT)
    assert observed.tracing.extract({}) is None
    broken = observed.tracing.extract({"traceparent": "00-zz\r\n-nothing"})

    async def ask():
        await asyncio.gather(*(observed.ask(PROMPTS[0], 3, trace=trace) for trace in (context, None, broken)))
        await observed.idle()

    asyncio.run(ask())
    observed.tracing.close()
    spans_by_parent = {span.parent and f"{span.parent.span_id:016x}": span for span in spans.get_finished_spans()}
    child = spans_by_parent.pop(PARENT)
    assert f"{child.context.trace_id:032x}" == TRACE and child.context.trace_state["vendor"] == "1"
    assert set(spans_by_parent) == {None}
    assert len(spans.get_finished_spans()) == 3


def test_a_parent_that_is_not_sampled_has_no_children_here(observed, spans):
    context = observed.tracing.extract({"traceparent": f"00-{TRACE}-{PARENT}-00"})

    async def ask():
        await observed.ask(PROMPTS[0], 3, trace=context)
        await observed.idle()

    asyncio.run(ask())
    observed.tracing.close()
    assert not spans.get_finished_spans()


def test_what_failed_and_what_was_aborted_has_a_span_that_says_so(observed, spans):
    async def run():
        with broken_forward(observed.model, RuntimeError("no")), pytest.raises(StepFailedError):
            await observed.ask(PROMPTS[0])
        answers = observed.submit(PROMPTS[1], 4000)
        answers.abort()
        with pytest.raises(RequestAbortedError):
            await answers.output()
        await observed.idle()

    asyncio.run(run())
    observed.tracing.close()
    failed, aborted = spans.get_finished_spans()
    assert failed.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert failed.attributes["error.type"] == "StepFailedError" and failed.status.status_code is StatusCode.ERROR
    assert aborted.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert aborted.attributes["error.type"] == "RequestAbortedError"


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/elsewhere"])
def test_spans_are_sent_to_a_collector(shared, path):
    with collector() as (url, received):
        tracing = Tracing(url + path, "tiny")
        shared.start_over(tracing=tracing)
        shared.ask_all(PROMPTS[:3], max_tokens=3)
        tracing.close()
    assert {asked for asked, _ in received} == {"/elsewhere" if path == "/elsewhere" else "/v1/traces"}
    sent = spans_in(received)
    assert [span.name for span in sent] == ["llm_request"] * 3
    assert {a.value.int_value for s in sent for a in s.attributes if a.key == "gen_ai.usage.output_tokens"} == {3}


def test_a_collector_that_is_away_costs_one_warning_and_no_request(shared, caplog, monkeypatch):
    monkeypatch.setattr("hf_paged.serving.tracing._EXPORTER_TIMEOUT", 0.5)
    with collector() as (url, _):
        pass  # nobody listens there any more
    caplog.set_level(logging.INFO)
    tracing = Tracing(url, "tiny")
    shared.start_over(tracing=tracing)
    outputs = shared.ask_all(PROMPTS, max_tokens=4)
    assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
    tracing.close()
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1 and url in told[0].getMessage() and "race" in told[0].getMessage()


def test_a_collector_that_refuses_is_told_of_once_and_again_when_it_takes_spans(caplog):
    caplog.set_level(logging.INFO)
    results = iter([1, 1, 0, 0, 1])

    class Flaky(InMemorySpanExporter):
        def export(self, spans):
            if next(results):
                raise ConnectionError("away")
            return super().export(spans)

    tracing = Tracing("http://collector", "tiny", exporter=Flaky())
    for _ in range(5):
        tracing._tracer.start_span("x").end()
        tracing._provider.force_flush()
    tracing.close()
    ours = [record.getMessage() for record in caplog.records if record.name == "hf_paged.serving.tracing"]
    assert [message.startswith("Traces cannot be sent") for message in ours] == [True, False, True]
    assert "ConnectionError: away" in ours[0] and "again" in ours[1]


def test_a_slow_collector_holds_up_nobody(shared):
    hold = threading.Event()
    with collector(hold) as (url, received):
        tracing = Tracing(url, "tiny")
        shared.start_over(tracing=tracing)
        shared.ask_all(max_tokens=2)
        sender = threading.Thread(target=tracing._provider.force_flush)
        sender.start()
        shared.ask_all(PROMPTS[:4], max_tokens=2)
        assert not received  # while the answers above have come
        hold.set()
        sender.join()
        tracing.close()
    assert received


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://localhost/x", "", "http://"])
def test_an_endpoint_that_is_no_url_is_refused_at_the_start(endpoint):
    with pytest.raises(ConfigurationError, match="otlp-traces-endpoint.*http://localhost:4318/v1/traces"):
        Tracing(endpoint, "tiny")


def test_protocols_are_asked_for_by_opentelemetrys_own_variables(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigurationError, match="carrier-pigeon"):
        Tracing("http://localhost", "tiny")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(MissingDependencyError, match="otlp-proto-grpc"):
        Tracing("http://localhost", "tiny")


def test_the_services_name_comes_from_the_environment_if_it_is_there(monkeypatch, spans):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = Tracing("http://nowhere", "tiny", exporter=spans)
    tracing._tracer.start_span("x").end()
    tracing.close()
    assert spans.get_finished_spans()[0].resource.attributes["service.name"] == "mine"


def test_without_opentelemetry_the_way_out_is_named():
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from hf_paged.errors import MissingDependencyError\n"
        "from hf_paged.serving.tracing import Tracing\n"
        "try:\n    Tracing('http://localhost:4318', 'tiny')\n"
        "except MissingDependencyError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hf-paged[otel]" in done.stdout
