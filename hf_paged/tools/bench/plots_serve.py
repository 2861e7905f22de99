"""The picture of `hf-paged bench serve`: latencies as distributions, load and speed over time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .plot_foot import describe_setting, short_name
from .plot_style import (
    BLUE,
    INK,
    ORANGE,
    TEXT_SIZE,
    in_digits,
    legend_above,
    make_sheet,
    panel,
)
from .plots_latency import show_distributions

_METRICS = {
    "ttft": "time to the first token",
    "tpot": "per token of an answer (mean)",
    "itl": "between chunks",
    "e2el": "whole answer",
}
_MOST_BARS = 2000  # of a width that can be seen; a run may have waited for hours
_COLORS = {"ttft": BLUE, "e2el": ORANGE, "itl": BLUE, "tpot": ORANGE}


def draw_serve(report: dict[str, Any]) -> Figure:
    """Returns four panels of a run of which single requests are known, else medians and percentiles.

    Args:
        report (`dict[str, Any]`):
            Of `serve`, under vLLM's names.
    """
    if "ttfts" not in report:
        return _draw_summary(report)
    figure, axes = make_sheet(_title(report), _about(report), _foot(report), 6.6, rows=2, columns=2)
    good = [index for index, error in enumerate(report["errors"]) if not error and report["latencies"][index] > 0]
    firsts, latencies, lengths = (
        [report[name][index] for index in good] for name in ("ttfts", "latencies", "output_lens")
    )
    values = {
        "ttft": firsts,
        "e2el": latencies,
        "itl": [gap for index in good for gap in report["itls"][index]],
        "tpot": [
            (latency - first) / (length - 1)
            for latency, first, length in zip(latencies, firsts, lengths, strict=True)
            if length > 1
        ],
    }
    for axis, names, title, share in (
        (axes[0], ("ttft", "e2el"), "Of each request", "share of requests"),
        (axes[1], ("itl", "tpot"), "Of each token", "share"),
    ):
        show_distributions(
            axis, title, share, {_METRICS[n]: values[n] for n in names}, {_METRICS[n]: _COLORS[n] for n in names}
        )
    _show_tokens(axes[2], report, good)
    _show_open_requests(axes[3], report)
    return figure


def _show_tokens(axis: Any, report: dict[str, Any], good: list[int]) -> None:
    """Output tokens a second, with a bar for each second or, of a long run, for several; pieces of an answer share its
    tokens evenly."""
    begin = min(filter(None, report["start_times"]), default=0.0)
    times: list[float] = []
    weights: list[float] = []
    for index in good:
        arrivals = np.cumsum([report["start_times"][index] - begin + report["ttfts"][index], *report["itls"][index]])
        times += [float(when) for when in arrivals]
        weights += [report["output_lens"][index] / len(arrivals)] * len(arrivals)
    width = max(1, math.ceil(max(times, default=0.0) / _MOST_BARS))
    if times:
        counts = np.bincount((np.asarray(times) / width).astype(int), weights)
        axis.bar((np.arange(len(counts)) + 0.5) * width, counts / width, width=0.9 * width, color=BLUE)
    axis.axhline(report["output_throughput"], color=INK, linewidth=1.2, linestyle="--")
    title = "Output tokens in each second" if width == 1 else f"Output tokens a second, mean of each {width:,} s"
    panel(axis, title, x="seconds", y="output tokens/s")
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    legend_above(axis, [("dash", INK, f"the whole run: {report['output_throughput']:,.1f} tok/s")])


def _show_open_requests(axis: Any, report: dict[str, Any]) -> None:
    spans = [
        (s, max(s + latency, s)) for s, latency in zip(report["start_times"], report["latencies"], strict=True) if s
    ]
    begin = min((start for start, _ in spans), default=0.0)
    changes = sorted(change for start, end in spans for change in ((start - begin, 1), (end - begin, -1)))
    counts = np.cumsum([change for _, change in changes])
    axis.step([when for when, _ in changes], counts, where="post", color=BLUE, linewidth=2)
    panel(axis, "Open requests", x="seconds", y="requests")
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    failed = f", {report['failed']:,} failed" if report["failed"] else ""
    legend_above(axis, [("line", BLUE, f"{report['completed']:,} answered{failed}")])


def _draw_summary(report: dict[str, Any]) -> Figure:
    """Without single requests: the median, and the percentiles that were asked for."""
    names = [name for name in _METRICS if f"median_{name}_ms" in report]
    figure, (axis,) = make_sheet(_title(report), _about(report), _foot(report), 1.0 + 0.5 * len(names))
    furthest = 0.0
    for place, name in enumerate(names):
        points = {"p50": report[f"median_{name}_ms"]} | {
            key.partition("_")[0]: value
            for key, value in report.items()
            if key.startswith("p") and key.endswith(f"_{name}_ms")
        }
        axis.plot(list(points.values()), [place] * len(points), "-o", color=BLUE, linewidth=2, markersize=7)
        texts = ", ".join(f"{words} {in_digits(value)}" for words, value in points.items())
        axis.annotate(
            f"{texts} ms",
            (max(points.values()), place),
            (8, 0),
            textcoords="offset points",
            va="center",
            size=TEXT_SIZE,
        )
        furthest = max(furthest, *points.values())
    axis.set_yticks(range(len(names)), [_METRICS[name] for name in names], size=TEXT_SIZE)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlim(0, furthest * 1.6 or 1.0)
    panel(axis, x="ms (less is better); `--save-detailed` keeps whole distributions", grid="x")
    return figure


def _title(report: dict[str, Any]) -> str:
    speed = in_digits(report["output_throughput"])
    return f"A server under load: {speed} output tokens/s, {report['completed']:,} answers"


def _about(report: dict[str, Any]) -> str:
    rate = report["request_rate"]
    arrivals = "all at once" if rate == "inf" or math.isinf(float(rate)) else f"{rate:g} requests/s on average"
    limit = f", at most {report['max_concurrency']} at a time" if report.get("max_concurrency") else ""
    return f"{report['num_prompts']:,} requests ({report['dataset_name']}), {arrivals}{limit}; as the client sees it"


def _foot(report: dict[str, Any]) -> str:
    where = f"{short_name(report['model_id'])} at {report['base_url']}{report['endpoint']}"
    client = describe_setting({name: report[name] for name in ("machine", "load_average") if name in report})
    day = report["date"].partition("-")[0]
    if len(day) == 8:
        day = f"{day[:4]}-{day[4:6]}-{day[6:]}"
    return "; ".join(filter(None, (where, f"client: {client}" if client else "", day)))
