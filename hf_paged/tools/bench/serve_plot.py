"""The figure of `hf-paged bench serve`: latencies as distributions, load and speed over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .serve_records import RequestRecord
from .serve_statistics import concurrency, metric_values, token_times

NAMES = {"ttft": "time to first token", "e2el": "whole answer", "itl": "between chunks", "tpot": "per token (mean)"}


def plot_run(records: Sequence[RequestRecord], caption: str, path: Path) -> None:
    """Draws a run into a PNG file.

    Args:
        records (`Sequence[RequestRecord]`):
            All requests.
        caption (`str`):
            What was measured.
        path (`Path`):
            The file.

    Raises:
        ImportError: Without matplotlib (the extra `bench`).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [record for record in records if record.succeeded]
    values = metric_values(good)
    begin = min((record.start for record in records), default=0.0)
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7.5))
    _distributions(axes[0, 0], {NAMES[name]: values[name] for name in ("ttft", "e2el")}, "seconds", 1.0)
    _distributions(axes[0, 1], {NAMES[name]: values[name] for name in ("itl", "tpot")}, "milliseconds", 1e3)
    times, weights = token_times(good)
    if len(times):
        axes[1, 0].step(range(int((times - begin).max()) + 1), np.bincount((times - begin).astype(int), weights))
    axes[1, 0].set_title("output tokens in each second", fontsize=10)
    counts = concurrency(records)
    axes[1, 1].step([when - begin for when, _ in counts], [count for _, count in counts], where="post")
    axes[1, 1].set_title("open requests", fontsize=10)
    for axis in axes[1]:
        axis.set_xlabel("seconds", fontsize=8)
        axis.set_ylim(bottom=0)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, 0.005, caption, fontsize=7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _distributions(axis: Any, values: dict[str, list[float]], unit: str, scale: float) -> None:
    for name, found in values.items():
        if found:
            axis.step(np.sort(found) * scale, (np.arange(len(found)) + 1) / len(found), where="post", label=name)
    axis.set_title("share of requests, or chunks, within so many " + unit, fontsize=10)
    axis.set_xlabel(unit, fontsize=8)
    axis.set_ylim(0, 1)
    axis.legend(fontsize=8, loc="lower right") if any(values.values()) else None
