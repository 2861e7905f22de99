"""Pictures of memory: what is reserved and what is used of it, and the pool of blocks over time."""

from __future__ import annotations

from typing import Any

from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .plot_foot import describe_setting
from .plot_style import (
    BLUE,
    GRAY,
    INK,
    ORANGE,
    PARTS,
    QUIET,
    SKY,
    TEXT_SIZE,
    color_of,
    legend_above,
    make_sheet,
    panel,
    show_bars,
)

MIB = 2**20
FREE = "#eef0f2"


def draw_memory(report: dict[str, Any]) -> Figure:
    """Returns bars of the K/V memory that systems hold for requests, and how much of it holds tokens.

    Args:
        report (`dict[str, Any]`):
            Of a benchmark that runs a workload.
    """
    rows = report["rows"]
    served = report.get("served") or {}
    has_process = served.get("other_bytes") is not None
    about = f"{report['workload']}; K/V memory held for requests at its peak, and the most that held tokens of them"
    heights = [1.15 + 0.46 * len(rows), *([1.35] if has_process else [])]
    figure, axes = make_sheet(
        "K/V memory: reserved, and really used",
        about,
        describe_setting(report),
        sum(heights),
        rows=len(heights),
        height_ratios=heights,
    )
    axis = axes[0]
    held = [row["kv_bytes_held"] / MIB for row in rows]
    used = [row["kv_bytes_used"] / MIB for row in rows]
    texts = [
        f"{h:,.0f} MiB reserved, {u:,.0f} used; {row['kv_waste']:.1%} wasted"
        for h, u, row in zip(held, used, rows, strict=True)
    ]
    colors = [color_of(row["system"]) for row in rows]
    show_bars(axis, [row["system"] for row in rows], held, texts, [_tint(color) for color in colors])
    axis.barh(range(len(rows)), used, height=0.62, color=colors)
    panel(axis, x="MiB; waste is the mean over steps of 1 - tokens stored / slots held", grid="x")
    legend_above(axis, [("area", INK, "really used"), ("area", _tint(INK), "reserved")], 2)
    if has_process:
        _show_process(axes[1], served)
    return figure


def _show_process(axis: Any, served: dict[str, Any]) -> None:
    parts = {
        "imports": served["imported_bytes"],
        "weights": served["weight_bytes"],
        "K/V pool in use": served["touched_pool_bytes"],
        "everything else": served["other_bytes"],
    }
    begin, entries = 0.0, []
    for (name, size), color in zip(parts.items(), (GRAY, BLUE, SKY, ORANGE), strict=True):
        axis.barh([0], [size / MIB], left=begin, height=0.6, color=color)
        begin += size / MIB
        entries.append(("area", color, f"{name} {size / MIB:,.0f}"))
    axis.set_yticks([0], ["hf_paged"], size=TEXT_SIZE)
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, begin * 1.02)
    panel(axis, f"A process that serves: {served['served_bytes'] / MIB:,.0f} MiB", x="MiB", grid="x")
    legend_above(axis, entries, 4)


def draw_pool(report: dict[str, Any]) -> Figure:
    """Returns the pool of blocks while requests run: held, cached, free; and below it how many requests there are.

    Args:
        report (`dict[str, Any]`):
            Of a benchmark that runs a workload.

    Raises:
        ValueError: If the report has no timeline.
    """
    line = report["timeline"]
    if not line["seconds"]:
        raise ValueError("its timeline is empty")
    seconds, held, cached = line["seconds"], line["blocks_held"], line["blocks_cached"]
    stored = [tokens / line["block_size"] for tokens in line["tokens_stored"]]
    free = [line["num_blocks"] - h - c for h, c in zip(held, cached, strict=True)]
    mib = line["bytes_per_block"] / MIB
    about = f"{report['workload']}; the first run. A block holds {line['block_size']} tokens, {mib * 1024:,.0f} KiB"
    figure, (pool, requests) = make_sheet(
        "The block pool while requests run", about, describe_setting(report), 5.2, rows=2, height_ratios=[3, 1.2]
    )
    # What is seen after a step was held during it.
    pool.stackplot(seconds, held, cached, free, colors=[BLUE, SKY, FREE], step="pre", linewidth=0)
    pool.plot(seconds, stored, color=INK, linewidth=1.4, drawstyle="steps-pre")
    top = min(line["num_blocks"], 1.25 * max(h + c for h, c in zip(held, cached, strict=True)))
    pool.set_ylim(0, top)
    pool.set_xlim(0, seconds[-1])
    title = f"{line['num_blocks']:,} blocks, {line['num_blocks'] * mib:,.0f} MiB; at most {max(held):,} held at a time"
    panel(pool, title, y="blocks", grid=None)
    if top < line["num_blocks"]:
        pool.annotate(
            f"free up to {line['num_blocks']:,} blocks", (0.99, 0.97), xycoords="axes fraction", ha="right", va="top",
            size=TEXT_SIZE, color=QUIET,
        )  # fmt: skip
    entries = [
        ("area", BLUE, "held by requests"),
        ("line", INK, "of that filled with tokens"),
        ("area", SKY, "cached: free, with a known content"),
        ("area", FREE, "free"),
    ]
    legend_above(pool, entries, 4)
    in_mib = pool.secondary_yaxis("right", functions=(lambda blocks: blocks * mib, lambda size: size / mib))
    in_mib.set_ylabel("MiB", size=TEXT_SIZE, color=QUIET)
    in_mib.tick_params(labelsize=TEXT_SIZE, color=GRAY)
    in_mib.spines["right"].set_visible(False)
    for name, color in (("running", PARTS[0]), ("waiting", PARTS[1])):
        requests.step(seconds, line[name], where="pre", color=color, linewidth=2)
    requests.set_xlim(0, seconds[-1])
    requests.set_ylim(0, 1.1 * max(*line["running"], *line["waiting"], 1))
    requests.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    panel(requests, "Requests", x="seconds", y="requests")
    legend_above(requests, [("line", PARTS[0], "running"), ("line", PARTS[1], "waiting")], 2)
    return figure


def _tint(color: str) -> str:
    """A light version of a colour."""
    red, green, blue = (0.32 * part + 0.68 for part in to_rgb(color))
    return to_hex((red, green, blue))
