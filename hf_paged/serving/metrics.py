"""`Metrics`: what Prometheus, routers and autoscalers read at `/metrics`.

Nothing is done per step. Counts of the engine are read when somebody asks; what a request did is counted when it has
ended, and tokens when their readers are woken. No label holds anything that a request says.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client import exposition as text_format
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.responses import Response

from ..generation.request import RequestMetrics
from ..generation.sampling.params import SamplingParams
from ..generation.stats import STEP_SIZE_BOUNDS, EngineStats
from .latencies import RecentLatencies
from .metrics_collectors import Collector, Histogram, Series

if TYPE_CHECKING:
    from ..generation.engine import Engine

FINISH_REASONS = ("stop", "length", "abort", "error")
# The first two as vLLM calls them.
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens", "shutting_down", "grammars", "other")
UNKNOWN_ROUTE = "unmatched"
CACHE_LABELS = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization")

# vLLM's boundaries. Ours have some below them, where small models and good networks are.
_REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_HTTP_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)
_ANSWERS = (1, 2, 5, 10, 20)


router = APIRouter()


@router.get("/metrics", tags=["status"], operation_id="metrics", response_class=Response)
async def read_metrics(request: Request) -> Response:
    """Returns all metrics in Prometheus' text format, or in OpenMetrics'.

    Args:
        request (`Request`):
            The request; its `Accept` header chooses.
    """
    metrics: Metrics = request.app.state.service.metrics
    # Not in the service's own workers, which may have prompts to read: a scrape must not wait under load.
    body, content_type = await asyncio.to_thread(metrics.render, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


class EngineView(Protocol):
    """What is read of an `AsyncEngine`."""

    engine: Engine

    @property
    def num_running(self) -> int:
        """Returns the sequences that run."""

    @property
    def num_waiting(self) -> int:
        """Returns the requests that wait."""


class Metrics:
    """The metrics of one server.

    Args:
        engine (`AsyncEngine`):
            Whose numbers are read when somebody asks.
        model_name (`str`):
            What the server calls its model; the label `model_name` of all series.
        vllm_names (`bool`, defaults to `True`):
            Whether what vLLM also has is there under vLLM's name too.
    """

    def __init__(self, engine: EngineView, model_name: str, *, vllm_names: bool = True):
        self.model_name = model_name
        self._engine = engine
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejections = dict.fromkeys(REJECTION_REASONS, 0)
        self.http_requests: dict[tuple[str, str], int] = {}
        self.http_seconds: dict[str, Histogram] = {}
        self.event_loop_lag = Histogram(_LAG_SECONDS)
        self.time_to_first_token = _seconds(_FIRST_TOKEN_SECONDS, ())
        self.inter_token_latency = _seconds(_TOKEN_SECONDS)
        self.recent_first_token, self.recent_inter_token = RecentLatencies(), RecentLatencies()
        self.time_per_output_token = _seconds(_TOKEN_SECONDS)
        self.e2e, self.queue, self.prefill, self.decode, self.inference = (_seconds(_REQUEST_SECONDS) for _ in range(5))
        token_bounds = _one_two_five(engine.engine.plan.max_model_len)
        self.prompt_tokens, self.generation_tokens, self.max_tokens = (Histogram(token_bounds) for _ in range(3))
        self.answers = Histogram(_ANSWERS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(Collector(self._series(), {"model_name": model_name, "engine": "0"}, vllm_names))
        ProcessCollector(registry=self._registry)

    # ------------------------------------------------------------------ what happens

    def request_arrived(self, params: SamplingParams) -> None:
        """The engine has taken a request.

        Args:
            params (`SamplingParams`):
                What it wants.
        """
        self.answers.observe(params.n)
        if params.max_tokens is not None:
            self.max_tokens.observe(params.max_tokens)

    def rejected(self, reason: str) -> None:
        """A request was refused although nothing is wrong with it.

        Args:
            reason (`str`):
                One of `REJECTION_REASONS`; anything else counts as `"other"`.
        """
        self.rejections[reason if reason in self.rejections else "other"] += 1

    def prompt_answered(self, num_tokens: int, num_cached_tokens: int, seconds: float | None = None) -> None:
        """The first token of an answer has come.

        Args:
            num_tokens (`int`):
                Of the prompt.
            num_cached_tokens (`int`):
                Of these, found in the prefix cache.
            seconds (`float`, *optional*):
                Since the request's arrival, if they are known.
        """
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens
        if seconds is not None:
            self.time_to_first_token.observe(seconds)
            self.recent_first_token.observe(seconds)

    def add_tokens(self, count: int, seconds: float | None) -> None:
        """Tokens of an answer have come.

        Args:
            count (`int`):
                How many.
            seconds (`float`, *optional*):
                Since the token before them; `None` for the first one of an answer.
        """
        self.num_generation_tokens += count
        if seconds is not None:
            each = max(0.0, seconds) / count
            self.inter_token_latency.observe(each, count)
            self.recent_inter_token.observe(each, count)

    def request_finished(
        self, times: RequestMetrics, num_prompt_tokens: int, num_generated_tokens: int, num_answers: int, reason: str
    ) -> None:
        """A request has ended. Times of requests that were aborted or failed say nothing and are not counted.

        Args:
            times (`RequestMetrics`):
                When what happened.
            num_prompt_tokens (`int`):
                Of the prompt.
            num_generated_tokens (`int`):
                Of all answers.
            num_answers (`int`):
                How many there are.
            reason (`str`):
                One of `FINISH_REASONS`.
        """
        self.finished[reason] += 1
        started, first, ended = times.first_scheduled_time, times.first_token_time, times.finished_time
        if reason not in ("stop", "length") or started is None or first is None or ended is None:
            return
        self.e2e.observe(ended - times.arrival_time)
        self.queue.observe(started - times.arrival_time)
        self.prefill.observe(first - started)
        self.decode.observe(ended - first)
        self.inference.observe(ended - started)
        self.prompt_tokens.observe(num_prompt_tokens)
        self.generation_tokens.observe(num_generated_tokens)
        per_answer = num_generated_tokens / num_answers
        if per_answer > 1:
            self.time_per_output_token.observe((ended - first) / (per_answer - 1))

    def http_answered(self, route: str | None, status: int, seconds: float) -> None:
        """An answer has been sent to its end.

        Args:
            route (`str`, *optional*):
                The path as the server declares it, of which there are few; `None` if there is none for what was asked.
            status (`int`):
                Of HTTP.
            seconds (`float`):
                From the request's headers to the answer's end.
        """
        route = route or UNKNOWN_ROUTE
        key = (route, str(status))
        self.http_requests[key] = self.http_requests.get(key, 0) + 1
        histogram = self.http_seconds.get(route)
        if histogram is None:
            histogram = self.http_seconds[route] = Histogram(_HTTP_SECONDS)
        histogram.observe(seconds)

    async def watch_event_loop(self, interval: float = 0.05) -> None:
        """Measures how late the event loop is, until it is cancelled.

        Args:
            interval (`float`, defaults to 0.05):
                Seconds between two looks.
        """
        while True:
            due = time.perf_counter() + interval
            await asyncio.sleep(interval)
            self.event_loop_lag.observe(max(0.0, time.perf_counter() - due))

    # ------------------------------------------------------------------ what is read

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Returns all metrics as Prometheus reads them. Takes milliseconds: run it in a worker thread.

        Args:
            accept (`str`, *optional*):
                The `Accept` header: OpenMetrics, if it asks for that, else Prometheus' text format.

        Returns:
            `tuple[bytes, str]`: The body and its content type.
        """
        # Not prometheus-client's `choose_encoder`: it repeats what the header says, and fails if that is nonsense.
        if "application/openmetrics-text" in accept:
            return openmetrics.generate_latest(self._registry), openmetrics.CONTENT_TYPE_LATEST
        return text_format.generate_latest(self._registry), "text/plain; version=0.0.4; charset=utf-8"

    @property
    def stats(self) -> EngineStats:
        """Returns the engine's counters."""
        return self._engine.engine.stats()

    @property
    def kv_cache_usage(self) -> float:
        """Returns the share of the blocks that requests hold."""
        blocks = self._engine.engine.live.block_manager
        return blocks.num_blocks_held / blocks.num_blocks if blocks.num_blocks else 0.0

    @property
    def prefix(self) -> tuple[int, int]:
        """Returns the tokens that were looked for in the prefix cache, and those that were found."""
        stats = self.stats
        return stats.num_prompt_tokens, stats.num_cached_tokens

    @property
    def load(self) -> tuple[int, int]:
        """Returns the sequences that run and the requests that wait."""
        return self._engine.num_running, self._engine.num_waiting

    def _step_sizes(self) -> Histogram:
        stats, histogram = self.stats, Histogram(STEP_SIZE_BOUNDS)
        histogram.counts, histogram.sum = stats.step_sizes.copy(), stats.num_computed_tokens
        return histogram

    def _cache_config(self) -> dict[tuple[str, ...], int]:
        plan, config = self._engine.engine.plan, self._engine.engine.config
        values = (
            *(plan.block_size, plan.num_blocks, config.kv_cache_dtype),
            *(plan.enable_prefix_caching, config.gpu_memory_utilization),
        )
        return {tuple(map(str, values)): 1}

    def _series(self) -> list[Series]:
        return [*self._engine_series(), *self._request_series(), *self._time_series(), *self._server_series()]

    def _engine_series(self) -> list[Series]:
        engine = self._engine
        return [
            Series("gauge", "num_requests_running", "Sequences that hold blocks.", lambda: engine.num_running),
            Series("gauge", "num_requests_waiting", "Requests that wait to be run.", lambda: engine.num_waiting),
            Series(
                "gauge", "kv_cache_usage_perc", "Share of the K/V blocks in use: 0 to 1.", lambda: self.kv_cache_usage
            ),
            Series("counter", "prefix_cache_queries", "Tokens looked for in the prefix cache.", lambda: self.prefix[0]),
            Series("counter", "prefix_cache_hits", "Tokens found in the prefix cache.", lambda: self.prefix[1]),
            Series(
                "counter", "num_preemptions", "Requests that lost their blocks.", lambda: self.stats.num_preemptions
            ),
            Series("histogram", "iteration_tokens_total", "Tokens computed by a step.", self._step_sizes),
            Series("gauge", "cache_config_info", "The K/V cache; always 1.", self._cache_config, CACHE_LABELS),
        ]

    def _request_series(self) -> list[Series]:
        return [
            Series("counter", "prompt_tokens", "Tokens of answered prompts.", lambda: self.num_prompt_tokens),
            Series("counter", "prompt_tokens_cached", "Those found in the cache.", lambda: self.num_cached_tokens),
            Series("counter", "generation_tokens", "Tokens of answers.", lambda: self.num_generation_tokens),
            Series(
                "counter", "request_success", "Requests that ended, by reason.", self.finished, ("finished_reason",)
            ),
            Series(
                "counter", "admission_rejections", "Requests refused because of load.", self.rejections, ("reason",)
            ),
            Series("histogram", "request_prompt_tokens", "Tokens of a prompt.", self.prompt_tokens),
            Series("histogram", "request_generation_tokens", "Tokens of a prompt's answers.", self.generation_tokens),
            Series("histogram", "request_params_max_tokens", "`max_tokens` of a request.", self.max_tokens),
            Series("histogram", "request_params_n", "`n` of a request.", self.answers),
        ]

    def _time_series(self) -> list[Series]:
        described = {
            "time_to_first_token_seconds": ("From a request's arrival to its first token.", self.time_to_first_token),
            "inter_token_latency_seconds": ("From a token of an answer to the next.", self.inter_token_latency),
            "request_time_per_output_token_seconds": ("A request's mean of these.", self.time_per_output_token),
            "e2e_request_latency_seconds": ("From a request's arrival to its end.", self.e2e),
            "request_queue_time_seconds": ("From a request's arrival to its first step.", self.queue),
            "request_prefill_time_seconds": ("From a request's first step to its first token.", self.prefill),
            "request_decode_time_seconds": ("From a request's first token to its end.", self.decode),
            "request_inference_time_seconds": ("From a request's first step to its end.", self.inference),
        }
        return [Series("histogram", name, text, histogram) for name, (text, histogram) in described.items()]

    def _server_series(self) -> list[Series]:
        """What vLLM has no name for."""
        described: list[tuple[str, str, str, Any, tuple[str, ...]]] = [
            ("counter", "http_requests", "HTTP requests answered.", self.http_requests, ("route", "status")),
            ("histogram", "http_request_duration_seconds", "To the end of an answer.", self.http_seconds, ("route",)),
            ("histogram", "event_loop_lag_seconds", "How late the event loop is.", self.event_loop_lag, ()),
        ]
        return [Series(*row, in_vllm=False) for row in described]


def _seconds(vllm_bounds: tuple[float, ...], further: tuple[float, ...] = _SHORT_SECONDS) -> Histogram:
    return Histogram({*vllm_bounds, *further}, vllm_bounds)


def _one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to a limit."""
    return [step * 10**power for power in range(len(str(limit))) for step in (1, 2, 5) if step * 10**power <= limit]
