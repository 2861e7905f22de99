"""The picture of quantized weights: quality, size and speed, a bar for each kind."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from .plot_foot import describe_setting
from .plot_style import BLUE, GRAY, make_sheet, panel, show_bars
from .plots_speed import runs_in_words

MIB = 2**20


def draw_quantization(report: dict[str, Any]) -> Figure:
    """Returns bars of size, perplexity, milliseconds for a token of one stream, and tokens per second of many.

    Args:
        report (`dict[str, Any]`):
            Of `quantization`.
    """
    rows = report["rows"]
    noise = f"; weights with {report['noise']:.1%} of noise" if report.get("noise") else ""
    about = f"{report['workload']}; {runs_in_words(report['runs'])}{noise}. {report['notes'][0]}"
    figure, axes = make_sheet(
        "Quantized weights: quality, size and speed", about, describe_setting(report), 4 * (0.75 + 0.3 * len(rows)),
        rows=4,
    )  # fmt: skip
    names = [row["system"] for row in rows]
    colors = [GRAY, *[BLUE] * (len(rows) - 1)]
    sizes = [row["model_bytes"] / MIB for row in rows]
    show_bars(axes[0], names, sizes, [f"{size:,.0f} MiB" for size in sizes], colors)
    panel(axes[0], "Size of the weights", x="MiB (less is better)", grid="x")
    changes = [row["perplexity"] / rows[0]["perplexity"] - 1 for row in rows]
    lost = [max(change, 0.0) * 100 for change in changes]
    texts = [f"{row['perplexity']:.3f} ({change:+.2%})" for row, change in zip(rows, changes, strict=True)]
    show_bars(axes[1], names, lost, texts, colors)
    panel(axes[1], "Perplexity", x="percent more than dense (less is better)", grid="x")
    times = [row["seconds_per_token"] * 1e3 for row in rows]
    runs = [[second * 1e3 for second in row["every_seconds_per_token"]] for row in rows]
    show_bars(axes[2], names, times, [f"{time:.1f} ms" for time in times], colors, runs)
    panel(axes[2], "One stream", x="ms for a token (less is better)", grid="x")
    speeds = [row["output_tokens_per_s"] for row in rows]
    runs = [row["every_output_tokens_per_s"] for row in rows]
    show_bars(axes[3], names, speeds, [f"{speed:,.1f} tok/s" for speed in speeds], colors, runs)
    panel(axes[3], "Many requests", x="output tokens/s (more is better)", grid="x")
    return figure
