"""Pictures of latency: which share of requests, or of tokens, came within how many milliseconds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .plot_foot import describe_setting
from .plot_style import (
    INK,
    QUIET,
    TEXT_SIZE,
    color_of,
    in_digits,
    legend_above,
    make_sheet,
    panel,
)
from .systems import short_title

_ENOUGH = 50  # values for a 99th percentile


def draw_latency(report: dict[str, Any]) -> Figure:
    """Returns distributions of the time to the first token and between tokens, of each system.

    Args:
        report (`dict[str, Any]`):
            Of a benchmark that runs a workload.
    """
    requests = report["requests"]
    runs = report["runs"]
    peers = "; the others are stock Transformers" if len(requests) > 1 else ""
    about = f"{report['workload']}; all requests of {runs} run{'s' if runs != 1 else ''}{peers}"
    figure, (first, between) = make_sheet(
        "Latency: time to the first token, and between tokens", about, describe_setting(report), 4.0, columns=2
    )
    names = {system: short_title(system) for system in requests}
    colors = {name: color_of(system) for system, name in names.items()}
    firsts = {names[system]: found["ttfts"] for system, found in requests.items()}
    gaps = {names[system]: list(itertools.chain(*found["itls"])) for system, found in requests.items()}
    floor = report["rows"][0].get("floor_seconds_per_token")
    lines = len(names) + (floor is not None)
    show_distributions(first, "Time to the first token", "share of requests", firsts, colors, lines=lines)
    show_distributions(between, "Between tokens", "share of tokens", gaps, colors, floor, lines=lines)
    return figure


def show_distributions(
    axis: Any,
    title: str,
    share: str,
    values: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    floor: float | None = None,
    lines: int = 0,
) -> None:
    """Draws cumulative distributions, with the 50th and 99th percentile marked and named in the legend.

    Where there are too few values for a 99th, the largest is named in its place.

    Args:
        axis (`Axes`):
            The panel.
        title (`str`):
            What it shows.
        share (`str`):
            Of what shares are.
        values (`Mapping[str, Sequence[float]]`):
            Seconds of each system.
        colors (`Mapping[str, str]`):
            Its colour.
        floor (`float`, *optional*):
            The least seconds that memory allows.
        lines (`int`, defaults to 0):
            Room for so many lines of a legend at least.
    """
    found = {name: np.sort(np.asarray(seconds, dtype=float)) for name, seconds in values.items() if len(seconds)}
    largest = max((float(np.percentile(seconds, 99)) for seconds in found.values()), default=0.0)
    scale, unit = (1.0, "s") if largest >= 2 else (1e3, "ms")
    entries: list[tuple[str, str, str]] = []
    limit = 0.0
    for name, seconds in found.items():
        shown, color = seconds * scale, colors[name]
        heights = np.arange(1, len(shown) + 1) / len(shown)
        axis.step(
            np.concatenate([shown[:1], shown]), np.concatenate([[0.0], heights]), where="post", color=color,
            linewidth=2.2, label=name,
        )  # fmt: skip
        last = 99 if len(shown) >= _ENOUGH else 100
        marks = [float(np.percentile(shown, percentile)) for percentile in (50, last)]
        axis.plot(marks, [0.5, last / 100], "o", color=color, markersize=6, clip_on=False)
        limit = max(limit, min(float(shown[-1]), 1.25 * marks[-1]))
        word = "p99" if last == 99 else "max"
        entries.append(("line", color, f"{name}: p50 {in_digits(marks[0])}, {word} {in_digits(marks[1])} {unit}"))
    if floor is not None:
        axis.axvline(floor * scale, color=INK, linewidth=1.2, linestyle="--")
        entries.append(("dash", INK, f"memory allows {in_digits(floor * scale)} {unit}"))
    smallest = min((float(seconds[0]) * scale for seconds in found.values()), default=0.0)
    if smallest > 0 and limit / smallest > 30:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
        axis.set_xlim(smallest / 1.3, limit * 1.3)
    else:
        axis.set_xlim(0, limit * 1.05 or 1.0)
    axis.set_ylim(0, 1.03)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0 %", "25 %", "p50", "75 %", "p99"])
    panel(axis, title, x=f"{unit} (less is better)", y=share, grid="both")
    if not found:
        axis.annotate("none", (0.5, 0.5), xycoords="axes fraction", ha="center", size=TEXT_SIZE, color=QUIET)
    legend_above(axis, entries, lines=lines)
