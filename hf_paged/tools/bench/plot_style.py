"""How all pictures look: a title, panels, and a foot that says what was measured and on what. White, no pyplot."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from .systems import METHOD_TITLES, OURS

# Inches. At the 800 pixels that a README shows, a point is 1.2 pixels.
WIDTH = 9.0
MARGIN = 0.15
DPI = 180
TITLE_SIZE, SUBTITLE_SIZE, TEXT_SIZE, FOOT_SIZE = 14.0, 10.5, 10.0, 8.5
LINE_HEIGHT = 1.35 / 72  # inches for a point

INK, QUIET, FAINT = "#1a1a1a", "#5f6368", "#e3e5e8"
# Okabe and Ito's colours, which everybody can tell apart.
BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE, GRAY = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
    "#8a8d91",
)
PARTS = (BLUE, ORANGE, GREEN, PURPLE, SKY, GRAY)
_SYSTEM_COLORS = {
    OURS: BLUE,
    METHOD_TITLES["one_by_one"]: GRAY,
    METHOD_TITLES["static_batch"]: VERMILLION,
    METHOD_TITLES["generate_batch"]: GREEN,
}
_SYSTEM_MARKERS = {OURS: "o", METHOD_TITLES["static_batch"]: "s", METHOD_TITLES["generate_batch"]: "^"}


def color_of(system: str) -> str:
    """Returns a system's colour: always the same, ours the strongest.

    Args:
        system (`str`):
            Its name in a report.
    """
    return _SYSTEM_COLORS.get(system, GRAY)


def marker_of(system: str) -> str:
    """Returns a system's marker in line plots.

    Args:
        system (`str`):
            Its name in a report.
    """
    return _SYSTEM_MARKERS.get(system, "D")


def make_sheet(
    title: str,
    subtitle: str,
    foot: str,
    height: float,
    *,
    rows: int = 1,
    columns: int = 1,
    **grid: Any,
) -> tuple[Figure, list[Any]]:
    """Returns a figure with its texts in place, and empty panels; texts are broken so that they fit its width.

    Args:
        title (`str`):
            What the picture is about.
        subtitle (`str`):
            What was run.
        foot (`str`):
            On what.
        height (`float`):
            Inches of the panels.
        rows (`int`, defaults to 1):
            Rows of panels.
        columns (`int`, defaults to 1):
            Columns of panels.
        grid (`Any`):
            `width_ratios` or `height_ratios`.

    Returns:
        `tuple[Figure, list[Axes]]`: The figure, and its panels row by row.
    """
    head = [(line, TITLE_SIZE, INK, "bold") for line in wrap(title, TITLE_SIZE, "bold")]
    head += [(line, SUBTITLE_SIZE, QUIET, "normal") for line in wrap(subtitle, SUBTITLE_SIZE)]
    foot_lines = wrap(foot, FOOT_SIZE)
    above = MARGIN + sum(size for _, size, _, _ in head) * LINE_HEIGHT + 0.08
    below = MARGIN + len(foot_lines) * FOOT_SIZE * LINE_HEIGHT + 0.08
    total = above + height + below
    figure = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor="white")
    inner = (0.05 / WIDTH, below / total, 1 - 0.1 / WIDTH, height / total)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=inner, w_pad=0.08, h_pad=0.06, wspace=0.03))
    top = MARGIN
    for line, size, color, weight in head:
        figure.text(MARGIN / WIDTH, 1 - top / total, line, size=size, color=color, weight=weight, va="top")
        top += size * LINE_HEIGHT
    for number, line in enumerate(foot_lines, 1):
        bottom = MARGIN + (len(foot_lines) - number) * FOOT_SIZE * LINE_HEIGHT
        figure.text(MARGIN / WIDTH, bottom / total, line, size=FOOT_SIZE, color=QUIET, va="baseline")
    axes = list(figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(GRAY)
        axis.tick_params(labelsize=TEXT_SIZE, colors=INK, color=GRAY, length=3)
        axis.set_axisbelow(True)
    return figure, axes


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Returns the inches that a line of text takes.

    Args:
        text (`str`):
            One line.
        size (`float`):
            Points.
        weight (`str`, defaults to `"normal"`):
            Or `"bold"`.
    """
    if not text.strip():
        return 0.0
    outline = TextPath((0, 0), text, size=size, prop=FontProperties(weight=weight)).vertices  # exact enough, and fast
    return float(np.ptp(np.asarray(outline)[:, 0])) / 72


def wrap(text: str, size: float, weight: str = "normal", width: float = WIDTH - 2 * MARGIN) -> list[str]:
    """Returns text as lines that are not wider than the picture.

    Args:
        text (`str`):
            Words.
        size (`float`):
            Points.
        weight (`str`, defaults to `"normal"`):
            Or `"bold"`.
        width (`float`):
            Inches of a line.
    """
    text = escape(" ".join(text.split()))
    characters = len(text)
    while characters > 20:
        lines = textwrap.wrap(text, characters) or [""]
        widest = max(text_width(line, size, weight) for line in lines)
        if widest <= width:
            return lines
        characters = min(characters - 1, int(characters * width / widest) + 1)
    return textwrap.wrap(text, 20)


def escape(text: str) -> str:
    """Returns text in which matplotlib finds no formula: a name with two dollar signs stays a name.

    Args:
        text (`str`):
            Any text.
    """
    return text.replace("$", r"\$")


def panel(axis: Any, title: str = "", x: str = "", y: str = "", grid: str | None = "y") -> None:
    """Gives a panel its texts and its grid.

    Args:
        axis (`Axes`):
            The panel.
        title (`str`, defaults to none):
            What it shows.
        x (`str`, defaults to none):
            What is along it, with its unit.
        y (`str`, defaults to none):
            What is up it, with its unit.
        grid (`str`, *optional*, defaults to `"y"`):
            Whose lines are drawn: `"x"`, `"y"` or `"both"`.
    """
    axis.set_title(title, loc="left", size=TEXT_SIZE + 0.5, weight="bold", color=INK)
    axis.set_xlabel(x, size=TEXT_SIZE, color=QUIET)
    axis.set_ylabel(y, size=TEXT_SIZE, color=QUIET)
    if grid is not None:
        axis.grid(axis=grid, color=FAINT, linewidth=0.8)


def legend_above(axis: Any, entries: Sequence[tuple[str, str, str]], columns: int = 1, lines: int = 0) -> None:
    """Puts a legend between a panel and its title, where it hides nothing.

    Args:
        axis (`Axes`):
            The panel, which has its title.
        entries (`Sequence[tuple[str, str, str]]`):
            Kind (`"area"`, `"line"`, `"dash"`, or a marker), colour and text of each.
        columns (`int`, defaults to 1):
            Entries beside each other.
        lines (`int`, defaults to 0):
            Room for so many lines at least, so that titles of panels beside each other are level.
    """
    handles: list[Any] = []
    for kind, color, _ in entries:
        if kind == "area":
            handles.append(Patch(facecolor=color, edgecolor="none"))
        elif kind in ("line", "dash"):
            handles.append(Line2D([], [], color=color, linewidth=2, linestyle="--" if kind == "dash" else "-"))
        else:
            handles.append(
                Line2D([], [], color=color, marker=kind, linestyle="none", markersize=7, markerfacecolor="white")
            )
    axis.legend(
        handles,
        [escape(text) for _, _, text in entries],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        fontsize=TEXT_SIZE - 0.5,
        frameon=False,
        borderaxespad=0.1,
        handlelength=1.4,
        handletextpad=0.5,
        columnspacing=1.2,
        labelspacing=0.25,
        labelcolor=INK,
    )
    lines = max(lines, -(-len(entries) // columns))
    axis.set_title(axis.get_title("left"), loc="left", pad=8 + 13.5 * lines, size=TEXT_SIZE + 0.5, weight="bold")


def show_bars(
    axis: Any,
    names: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    colors: Sequence[str],
    runs: Sequence[Sequence[float]] = (),
) -> None:
    """Draws bars from left to right with a text behind each, and a dot for each run.

    Args:
        axis (`Axes`):
            The panel.
        names (`Sequence[str]`):
            Left of each bar.
        values (`Sequence[float]`):
            Their lengths.
        texts (`Sequence[str]`):
            Behind each bar.
        colors (`Sequence[str]`):
            Of each bar.
        runs (`Sequence[Sequence[float]]`, defaults to none):
            What the runs gave; one run is the bar itself.
    """
    places = range(len(values))
    axis.barh(places, values, height=0.62, color=colors)
    furthest = list(values)
    for place, measured in enumerate(runs):
        if len(measured) > 1:
            axis.plot(measured, [place] * len(measured), ".", color=INK, markersize=5)
            furthest[place] = max(furthest[place], *measured)
    for place, text in enumerate(texts):
        axis.annotate(
            escape(text), (furthest[place], place), (6, 0), textcoords="offset points", va="center", size=TEXT_SIZE,
            color=INK,
        )  # fmt: skip
    axis.set_yticks(places, [escape(name) for name in names], size=TEXT_SIZE)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    width = WIDTH / axis.get_gridspec().ncols - max((text_width(name, TEXT_SIZE) for name in names), default=0.0) - 0.5
    rooms = [max(1 - (text_width(text, TEXT_SIZE) + 0.2) / width, 0.1) for text in texts]
    axis.set_xlim(0, max((end / room for end, room in zip(furthest, rooms, strict=True)), default=0.0) or 1.0)


def spread(values: Sequence[float], least: float) -> list[float]:
    """Returns values moved as little as needed to lie some distance apart, for labels at the ends of lines.

    Args:
        values (`Sequence[float]`):
            Where labels should be.
        least (`float`):
            The distance.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    moved = [values[index] for index in order]
    for _ in range(100):
        for index in range(1, len(moved)):
            missing = least - (moved[index] - moved[index - 1])
            if missing > 1e-9:
                moved[index] += missing / 2
                moved[index - 1] -= missing / 2
    found = [0.0] * len(values)
    for index, value in zip(order, moved, strict=True):
        found[index] = value
    return found


def in_digits(value: float) -> str:
    """Returns a number with three digits, or all of those before the point.

    Args:
        value (`float`):
            The number.
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
