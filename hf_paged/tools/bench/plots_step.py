"""Pictures of where time goes: the parts of a step, and each native operator beside its floor."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from .plot_foot import describe_setting
from .plot_style import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    TEXT_SIZE,
    VERMILLION,
    in_digits,
    legend_above,
    make_sheet,
    panel,
    show_bars,
)
from .plots_speed import runs_in_words

_BESIDE = {"schedule": ORANGE, "inputs": GREEN, "sample": PURPLE, "collect": BLUE, "rest": GRAY}


def draw_step(report: dict[str, Any]) -> Figure:
    """Returns what a decoding step takes with 1, 2, 4 ... requests: the model beside its floor, and all else.

    Args:
        report (`dict[str, Any]`):
            Of `step`.
    """
    rows = [row for row in report["rows"] if row["system"] == "greedy"]
    about = f"Greedy, with texts; {runs_in_words(report['runs']).partition(' (')[0]}. Less is better"
    figure, (whole, beside) = make_sheet(
        "A decoding step by number of requests", about, describe_setting(report), 4.0, columns=2
    )
    places, names = list(range(len(rows))), [f"{row['num_running']:.0f}" for row in rows]
    model = [row["model_seconds"] * 1e3 for row in rows]
    overhead = [row["overhead_seconds"] * 1e3 for row in rows]
    whole.bar(places, model, width=0.68, color=SKY, label="model")
    whole.bar(places, overhead, bottom=model, width=0.68, color=ORANGE, label="all else")
    for place, row in zip(places, rows, strict=True):
        whole.annotate(
            in_digits(row["step_seconds"] * 1e3), (place, row["step_seconds"] * 1e3), (0, 3),
            textcoords="offset points", ha="center", size=TEXT_SIZE, color=INK,
        )  # fmt: skip
    entries = [("area", SKY, "the model"), ("area", ORANGE, "all else")]
    for name, color, words in (
        ("memory_floor_seconds", INK, "floor: memory reads weights and K/V once"),
        ("arithmetic_floor_seconds", VERMILLION, "floor: the processor multiplies each weight"),
    ):
        floors = [row[name] for row in rows]
        if None not in floors:
            for place, floor in zip(places, floors, strict=True):
                whole.plot([place - 0.34, place + 0.34], [floor * 1e3] * 2, color=color, linewidth=2.4, label=name)
            entries.append(("line", color, words))
    whole.set_ylim(0, 1.1 * max(row["step_seconds"] * 1e3 for row in rows))
    panel(whole, "The whole step", x="requests that decode", y="ms for each step")
    legend_above(whole, entries)
    _show_overhead(beside, rows, places, len(entries))
    for axis in (whole, beside):
        axis.set_xticks(places, names)
        axis.tick_params(axis="x", length=0)
    return figure


def _show_overhead(axis: Any, rows: list[dict[str, Any]], places: list[int], lines: int) -> None:
    bottoms = [0.0] * len(rows)
    for name, color in _BESIDE.items():
        if name == "rest":
            known = [sum(row[f"{part}_seconds"] for part in list(_BESIDE)[:-1]) for row in rows]
            sizes = [max(row["overhead_seconds"] - part, 0.0) * 1e3 for row, part in zip(rows, known, strict=True)]
        else:
            sizes = [row[f"{name}_seconds"] * 1e3 for row in rows]
        axis.bar(places, sizes, bottom=bottoms, width=0.68, color=color, label=name)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    for place, row, top in zip(places, rows, bottoms, strict=True):
        axis.annotate(
            f"{row['overhead_seconds'] / row['step_seconds']:.0%}", (place, top), (0, 3), textcoords="offset points",
            ha="center", size=TEXT_SIZE, color=INK,
        )  # fmt: skip
    axis.set_ylim(0, 1.1 * max(bottoms, default=1.0))
    panel(axis, "All else, and its share of the step", x="requests that decode", y="ms for each step")
    legend_above(axis, [("area", color, name) for name, color in _BESIDE.items()], 3, lines)


def draw_kernels(report: dict[str, Any]) -> Figure:
    """Returns the share of its floor that each native operator reaches, and torch beside it.

    Args:
        report (`dict[str, Any]`):
            Of `kernels`.
    """
    rows = report["rows"]
    colors = {"memory": BLUE, "arithmetic": ORANGE}
    about = "Median of calls at the model's own shapes. The floor: bytes over what memory reads, or operations over "
    about += f"the peak of {report['instruction']}, whichever takes longer"
    figure, (axis,) = make_sheet(
        "Native operators beside what the machine allows", about, describe_setting(report), 1.2 + 0.27 * len(rows)
    )
    shares = [row["floor_share"] * 100 for row in rows]
    texts = [f"{share:.0f} %   {in_digits(row['seconds'] * 1e3)} ms" for share, row in zip(shares, rows, strict=True)]
    show_bars(axis, [row["system"] for row in rows], shares, texts, [colors[row["bound"]] for row in rows])
    theirs = [
        (place, row["floor_seconds"] / row["torch_seconds"] * 100)
        for place, row in enumerate(rows)
        if row["torch_seconds"]
    ]
    axis.plot([share for _, share in theirs], [place for place, _ in theirs], "D", color=INK, markersize=5,
              markerfacecolor="white", label="torch")  # fmt: skip
    axis.axvline(100, color=INK, linewidth=1.2, linestyle="--")
    axis.set_xlim(0, max(100.0, *shares) * 1.3)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    panel(axis, x="% of the floor reached (more is better)", grid="x")
    entries = [("area", BLUE, "bound by memory"), ("area", ORANGE, "bound by arithmetic")]
    legend_above(axis, [*entries, ("D", INK, "torch"), ("dash", INK, "the floor")], 4)
    return figure
