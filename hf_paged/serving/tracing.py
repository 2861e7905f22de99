"""A span for each request, sent to an OpenTelemetry collector: attributes as the conventions for generative AI and vLLM
name them.

Nothing is done while a request runs. Its span is made when it has ended, and sent by a thread of OpenTelemetry's own:
a collector that is slow or away costs spans, never requests.
"""

from __future__ import annotations

import logging
import os
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, MissingDependencyError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

    from .observability import FinishedRequest

logger = logging.getLogger(__name__)

SPAN_NAME = "llm_request"  # vLLM's
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTER_TIMEOUT = 3.0  # seconds in which a batch is tried again; `close` takes as long at worst


class Tracing:
    """Makes and sends spans.

    Args:
        endpoint (`str`):
            URL of a collector: `http://localhost:4318/v1/traces`; without a path, OTLP's own is added. With
            `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc` in the environment, what a gRPC exporter takes.
        model_name (`str`):
            What the server calls its model.
        exporter (`SpanExporter`, *optional*):
            Instead of the one for the endpoint.

    Raises:
        MissingDependencyError: If OpenTelemetry is not installed.
        ConfigurationError: If the endpoint is not a URL.
    """

    def __init__(self, endpoint: str, model_name: str, *, exporter: SpanExporter | None = None):
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise _missing("opentelemetry-sdk") from error
        self._api = trace
        self._model_name = model_name
        self._propagator = TraceContextTextMapPropagator()
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are honoured by `create`, and win over what is given here.
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "hf_paged"}
        # Not the global provider: a program that has one of its own keeps it.
        self._provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
        exporter = exporter if exporter is not None else _exporter(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(_one_warning(exporter, endpoint)))
        self._tracer = self._provider.get_tracer("hf_paged.serving")

    def extract(self, headers: Mapping[str, str]) -> Any:
        """Returns where the span of a request belongs: under the span of its client, if the headers name one.

        Args:
            headers (`Mapping[str, str]`):
                Of the HTTP request, in lower case: W3C's `traceparent` and `tracestate` are read.
        """
        return self._propagator.extract(headers) if "traceparent" in headers else None

    def record(self, request: FinishedRequest, route: str | None = None) -> None:
        """Makes the span of a request that has ended.

        Args:
            request (`FinishedRequest`):
                What became of it.
            route (`str`, *optional*):
                Path of the HTTP request that it belongs to, as the server declares it.
        """
        times = request.times
        to_epoch = time.time() - time.perf_counter()
        ended = times.finished_time if times.finished_time is not None else time.perf_counter()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=request.trace,
            kind=self._api.SpanKind.SERVER,
            start_time=int((times.arrival_time + to_epoch) * 1e9),
            attributes=self._attributes(request, route),
        )
        if request.error is not None:
            span.set_attribute("error.type", type(request.error).__name__)
            span.set_status(self._api.StatusCode.ERROR, str(request.error))
        span.end(int((ended + to_epoch) * 1e9))

    def _attributes(self, request: FinishedRequest, route: str | None) -> dict[str, Any]:
        params, times = request.params, request.times
        start, first, end = times.first_scheduled_time, times.first_token_time, times.finished_time
        attributes = {
            "http.route": route,
            "gen_ai.operation.name": "text_completion" if route == "/v1/completions" else "chat",
            "gen_ai.provider.name": "hf_paged",
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.response.finish_reasons": request.finish_reasons,
            # The conventions' names of today, and those of vLLM.
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": request.num_generated_tokens,
            "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": request.num_generated_tokens,
            "gen_ai.usage.cached_tokens": times.num_cached_tokens,
            "gen_ai.latency.time_in_queue": _between(times.arrival_time, start),
            "gen_ai.latency.time_to_first_token": _between(times.arrival_time, first),
            "gen_ai.latency.e2e": _between(times.arrival_time, end),
            "gen_ai.latency.time_in_model_prefill": _between(start, first),
            "gen_ai.latency.time_in_model_decode": _between(first, end),
            "gen_ai.latency.time_in_model_inference": _between(start, end),
        }
        return {name: value for name, value in attributes.items() if value is not None}

    def close(self) -> None:
        """Sends what has not been sent, and ends the thread. May take seconds: not for the event loop."""
        self._provider.shutdown()


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def _missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"`--otlp-traces-endpoint` needs {package}, which is not installed: pip install 'hf-paged[otel]'."
    )


def _exporter(endpoint: str) -> SpanExporter:
    protocol = next((os.environ[name] for name in _PROTOCOL_VARIABLES if name in os.environ), "http/protobuf")
    if protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
        except ImportError as error:
            raise _missing("opentelemetry-exporter-otlp-proto-grpc") from error
        return GrpcExporter(endpoint=endpoint)
    if protocol != "http/protobuf":
        raise ConfigurationError(f"{_PROTOCOL_VARIABLES[0]} must be http/protobuf or grpc, got {protocol!r}.")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise _missing("opentelemetry-exporter-otlp-proto-http") from error
    parts = urllib.parse.urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigurationError(
            f"`--otlp-traces-endpoint` must be a URL such as http://localhost:4318/v1/traces, got {endpoint!r}."
        )
    if parts.path in ("", "/"):
        endpoint = urllib.parse.urlunsplit(parts._replace(path="/v1/traces"))
    return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORTER_TIMEOUT)


def _one_warning(exporter: SpanExporter, endpoint: str) -> SpanExporter:
    """Wraps an exporter so that a collector that is away is told of once, not with each batch."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class OneWarning(SpanExporter):
        is_failing = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = exporter.export(spans)
            except Exception as error:
                self._failed(f"{type(error).__name__}: {error}")
                return SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS:
                self._failed("the collector did not take them")
            elif self.is_failing:
                self.is_failing = False
                logger.info("Traces are sent to %s again.", endpoint)
            return result

        def _failed(self, why: str) -> None:
            if not self.is_failing:
                self.is_failing = True
                logger.warning("Traces cannot be sent to %s (%s); they are lost until that works.", endpoint, why)

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return exporter.force_flush(timeout_millis)

    # Which would say the same with each batch.
    logging.getLogger(type(exporter).__module__).setLevel(logging.CRITICAL + 1)
    return OneWarning()
