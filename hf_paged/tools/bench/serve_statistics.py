"""Figures of a run, under the names that vLLM's benchmark gives them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .serve_records import RequestRecord
from .serve_settings import METRICS

# vLLM leaves these out of a file unless details are wanted.
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts", "errors")
EXAMPLES_LENGTH = 300


@dataclasses.dataclass(frozen=True)
class ClientCost:
    """What the client itself took: whether it, not the server, was the limit.

    Args:
        cpu_seconds (`float`):
            Processor time of its process.
        loop_lags (`list[float]`):
            How late timers of its event loop were, in seconds.
    """

    cpu_seconds: float
    loop_lags: list[float]


def summarize(
    records: Sequence[RequestRecord],
    duration: float,
    *,
    percentiles: Sequence[float] = (99.0,),
    metrics: Sequence[str] = METRICS,
    goodput: Sequence[tuple[str, float]] = (),
    cost: ClientCost | None = None,
) -> dict[str, Any]:
    """Returns all figures of a run; times end in `_ms`, those of single requests are seconds.

    Args:
        records (`Sequence[RequestRecord]`):
            All requests.
        duration (`float`):
            Seconds from the first to the last.
        percentiles (`Sequence[float]`, defaults to `(99.0,)`):
            Which percentiles.
        metrics (`Sequence[str]`):
            Of which metrics.
        goodput (`Sequence[tuple[str, float]]`, defaults to `()`):
            Most milliseconds of metrics; requests that meet all of them are counted.
        cost (`ClientCost`, *optional*):
            What the client took.
    """
    good = [record for record in records if record.succeeded]
    output_tokens = sum(record.num_output_tokens for record in good)
    input_tokens = sum(record.prompt_tokens or 0 for record in good)
    kinds = collections.Counter(record.error_kind for record in records if record.error_kind)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(map(_meets(goodput), good)) / duration if goodput else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "max_output_tokens_per_s": _busiest_second(good),
        "max_concurrent_requests": max((count for _, count in concurrency(records)), default=0),
        "error_kinds": dict(kinds),
        "error_examples": {record.error_kind: record.error[:EXAMPLES_LENGTH] for record in records if record.error},
        "tokens_counted_by": "chunks" if any(record.output_tokens is None for record in good) else "usage",
    }
    values = metric_values(good)
    for name in metrics:
        result |= _of_metric(name, values[name], percentiles)
    late = [record.start - record.planned for record in records]
    result |= {f"p{p:g}_send_delay_ms": _percentile(late, p) * 1e3 for p in percentiles}
    if cost is not None:
        result["client_cpu_seconds"] = cost.cpu_seconds
        result |= {f"p{p:g}_client_loop_lag_ms": _percentile(cost.loop_lags, p) * 1e3 for p in percentiles}
    return result | _details(records)


def metric_values(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Returns the values of each metric in seconds.

    Args:
        records (`Sequence[RequestRecord]`):
            Requests that succeeded.
    """
    return {
        "ttft": [record.ttft for record in records],
        "tpot": [record.tpot for record in records if record.tpot is not None],
        "itl": [gap for record in records for gap in record.gaps],
        "e2el": [record.latency for record in records],
    }


def concurrency(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """Returns how many requests were open after each change, in order of time.

    Args:
        records (`Sequence[RequestRecord]`):
            All requests.
    """
    changes = sorted(
        change for r in records for change in ((r.start, 1), (max(r.end, r.start), -1)) if r.start
    )  # fmt: skip
    count, counts = 0, []
    for when, change in changes:
        count += change
        counts.append((when, count))
    return counts


def token_times(records: Sequence[RequestRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Returns when pieces came, and how many tokens each stands for: the server's count, shared out evenly.

    Args:
        records (`Sequence[RequestRecord]`):
            Requests that succeeded.
    """
    times = [when for record in records for when in record.arrivals]
    weights = [r.num_output_tokens / len(r.arrivals) for r in records for _ in r.arrivals]
    return np.asarray(times), np.asarray(weights)


def _meets(goodput: Sequence[tuple[str, float]]) -> Any:
    def meets(record: RequestRecord) -> bool:
        measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        return all(measured[name] * 1e3 <= limit for name, limit in goodput)

    return meets


def _busiest_second(records: Sequence[RequestRecord]) -> float:
    times, weights = token_times(records)
    if not len(times):
        return 0.0
    return float(np.bincount((times - times.min()).astype(int), weights).max())


def _of_metric(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    found = np.asarray(values if len(values) else [0.0]) * 1e3
    figures = {"mean": found.mean(), "median": np.median(found), "std": found.std()}
    figures |= {f"p{p:g}": np.percentile(found, p) for p in percentiles}
    return {f"{word}_{name}_ms": float(value) for word, value in figures.items()}


def _percentile(values: Sequence[float], percentile: float) -> float:
    return float(np.percentile(values, percentile)) if len(values) else 0.0


def _details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens if record.succeeded else 0 for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.gaps for record in records],
        "latencies": [record.latency for record in records],
        "start_times": [record.start for record in records],
        "generated_texts": ["".join(record.texts) for record in records],
        "errors": [record.error for record in records],
    }
