"""Pictures of speed: bars beside peers, lines over the number of requests, and the parts of a start."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from .plot_foot import describe_setting
from .plot_style import (
    BLUE,
    INK,
    QUIET,
    SKY,
    TEXT_SIZE,
    color_of,
    in_digits,
    legend_above,
    make_sheet,
    marker_of,
    panel,
    show_bars,
    spread,
)
from .systems import OURS

_TITLES = {
    "throughput": "Throughput: many requests of mixed lengths, started together",
    "prefix": "Throughput: requests that begin with the same 512 tokens",
    "long": "Throughput: prompts of 4,000 tokens",
    "latency": "Speed of one user alone",
    "memory": "Throughput: many requests of mixed lengths, started together",
}
_EXTRAPOLATED = "* a part was run, the rest is extrapolated"
_LEAST_SHARE = 0.05  # of which less was measured is compared with nobody


def draw_speed(report: dict[str, Any]) -> Figure:
    """Returns bars of output tokens per second, one for each system, a dot for each run.

    Args:
        report (`dict[str, Any]`):
            Of a benchmark that runs a workload.
    """
    rows = report["rows"]
    about = f"{report['workload']}; {runs_in_words(report['runs'])}"
    foot = describe_setting(report)
    if any(row.get("extrapolated") for row in rows):
        foot = f"{_EXTRAPOLATED}. {foot}"
    figure, (axis,) = make_sheet(_TITLES[report["benchmark"]], about, foot, 0.75 + 0.48 * len(rows))
    ours = rows[0]["output_tokens_per_s"]
    texts = [f"{row['output_tokens_per_s']:,.1f} tok/s" for row in rows]
    for index, row in enumerate(rows[1:], 1):
        texts[index] += "*" if row["extrapolated"] else ""
        texts[index] += f"   {_compare(row, ours)}"
    show_bars(
        axis,
        [row["system"] for row in rows],
        [row["output_tokens_per_s"] for row in rows],
        texts,
        [color_of(row["system"]) for row in rows],
        [[run["output_tokens_per_s"] for run in report["every_run"][row["system"]]] for row in rows],
    )
    panel(axis, x="output tokens/s (more is better)", grid="x")
    return figure


def _compare(row: dict[str, Any], ours: float) -> str:
    if row.get("measured_share", 1.0) < _LEAST_SHARE:
        return f"rough: {row['measured_share']:.1%} of it was measured"
    return f"{OURS} is {ours / row['output_tokens_per_s']:.1f}x as fast"


def draw_concurrency(report: dict[str, Any]) -> Figure:
    """Returns a line for each system: output tokens per second over the number of requests.

    Args:
        report (`dict[str, Any]`):
            Of `concurrency`.
    """
    about = f"{report['workload']}, or so many of them, started together; {runs_in_words(report['runs'])}"
    foot = describe_setting(report)
    if any(row["extrapolated"] for row in report["rows"]):
        foot = f"Hollow: a part was run, the rest is extrapolated. {foot}"
    title = "Throughput over the number of requests at a time"
    figure, (axis,) = make_sheet(title, about, foot, 4.2)
    lines = {
        system: [row for row in report["rows"] if row["system"] == system]
        for system in dict.fromkeys(row["system"] for row in report["rows"])
    }
    highest = max(run["output_tokens_per_s"] for runs in report["every_run"].values() for run in runs) * 1.08
    for system, rows in lines.items():
        color, marker = color_of(system), marker_of(system)
        levels = [row["concurrency"] for row in rows]
        speeds = [row["output_tokens_per_s"] for row in rows]
        axis.plot(levels, speeds, color=color, linewidth=2.2, label=system)
        for row, speed in zip(rows, speeds, strict=True):
            face = "white" if row["extrapolated"] else color
            axis.plot(
                row["concurrency"], speed, marker, color=color, markersize=7, markerfacecolor=face, markeredgewidth=1.8
            )
        runs = report["every_run"][system]
        if report["runs"] > 1:
            axis.plot(
                [run["concurrency"] for run in runs], [run["output_tokens_per_s"] for run in runs], ".", color=INK,
                markersize=3.5,
            )  # fmt: skip
    ends = {system: rows[-1]["output_tokens_per_s"] for system, rows in lines.items()}
    heights = spread(list(ends.values()), highest * 0.17)
    for (system, end), height in zip(ends.items(), heights, strict=True):
        factor = "" if system == OURS else f"\n{_compare(lines[system][-1], ends[OURS])}"
        label = f"{system}\n{in_digits(end)} tok/s{factor}"
        axis.annotate(
            label,
            (1.02, height),
            xycoords=("axes fraction", "data"),
            va="center",
            size=TEXT_SIZE,
            color=color_of(system),
            weight="bold" if system == OURS else "normal",
        )
    levels = [row["concurrency"] for row in lines[OURS]]
    axis.set_xscale("log", base=2)
    axis.set_xticks(levels, [f"{level}" for level in levels])
    axis.minorticks_off()
    axis.set_ylim(0, highest)
    panel(axis, x="requests at a time", y="output tokens/s", grid="both")
    return figure


def draw_start(report: dict[str, Any]) -> Figure:
    """Returns bars of the seconds from `from_pretrained` to the first token.

    Args:
        report (`dict[str, Any]`):
            Of `start`.
    """
    rows = report["rows"]
    about = f"Fresh processes, in turns; {runs_in_words(report['runs'])}"
    title = "Start: from from_pretrained to the first token"
    figure, (axis,) = make_sheet(title, about, describe_setting(report), 1.1 + 0.5 * len(rows))
    loads = [row["load_seconds"] for row in rows]
    firsts = [row["first_token_seconds"] for row in rows]
    runs = [[run["seconds"] for run in report["every_run"][row["system"]]] for row in rows]
    texts = [f"{load:.2f} + {first:.2f} s" for load, first in zip(loads, firsts, strict=True)]
    ends = [load + first for load, first in zip(loads, firsts, strict=True)]
    names = [row["system"] if row["system"] == OURS else "Transformers" for row in rows]
    show_bars(axis, names, ends, texts, [SKY] * len(rows), runs)
    axis.barh(range(len(rows)), loads, height=0.62, color=BLUE)
    panel(axis, x="seconds (less is better)", grid="x")
    legend_above(axis, [("area", BLUE, "from_pretrained"), ("area", SKY, "first token of a short prompt")], 2)
    axis.xaxis.label.set_color(QUIET)
    return figure


def runs_in_words(runs: int) -> str:
    """Returns how often something was measured.

    Args:
        runs (`int`):
            How often.
    """
    return "one run" if runs == 1 else f"medians of {runs} runs (dots)"
