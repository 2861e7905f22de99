"""Figures of a finished run: attention beside its rivals, and tokens per second beside stock Transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .targets import OURS, Rows


def plot_all(rows: Rows, folder: Path, caption: str) -> list[Path]:
    """Draws what was measured and returns the files.

    Args:
        rows (`Rows`):
            Rows of all parts, by name.
        folder (`Path`):
            Where they go.
        caption (`str`):
            What it was measured on.

    Raises:
        ImportError: Without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in (("attention", _attention), ("tokens_per_s", _tokens)):
        path = folder / f"{name}.png"
        if draw(rows, path, caption):
            drawn.append(path)
    return drawn


def _attention(rows: Rows, path: Path, caption: str) -> bool:
    timed = [row for row in rows.get("attention", []) if "seconds" in row]
    panels = (
        ("decode", "bandwidth_share", "share of the measured copy bandwidth"),
        ("prefill", "peak_share", "share of the measured peak"),
    )
    data = []
    for kind, figure, title in panels:
        shown = [row | {"group": row["problem"], "value": row[figure]} for row in timed if row["kind"] == kind]
        data.append((f"{kind}: {title}", _grouped(shown)))
    return _bars(data, path, caption)


def _tokens(rows: Rows, path: Path, caption: str) -> bool:
    data = []
    for part in ("large_model", "small_model", "given_model"):
        found = [row for row in rows.get(part, []) if row.get("output_tokens_per_s")]
        shown = [row | {"group": f"{row['requests']} requests", "value": row["output_tokens_per_s"]} for row in found]
        if shown:
            data.append((f"{found[0]['model']}: output tokens/s", _grouped(shown)))
    return _bars(data, path, caption)


def _grouped(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Values by group and system."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["value"] is not None:
            found.setdefault(row["group"], {})[row["system"]] = row["value"]
    return found


def _bars(panels: list[tuple[str, dict[str, dict[str, float]]]], path: Path, caption: str) -> bool:
    from matplotlib import pyplot

    panels = [(title, groups) for title, groups in panels if groups]
    if not panels:
        return False
    figure, axes = pyplot.subplots(1, len(panels), figsize=(7 * len(panels), 6), squeeze=False)
    for axis, (title, groups) in zip(axes.flat, panels, strict=True):
        systems = sorted({system for values in groups.values() for system in values}, key=lambda s: (s != OURS, s))
        height = 0.8 / len(systems)
        for number, system in enumerate(systems):
            places = [index + number * height for index in range(len(groups))]
            values = [groups[group].get(system, 0.0) for group in groups]
            axis.barh(places, values, height, label=system)
            for place, value in zip(places, values, strict=True):
                axis.text(value, place, f" {value:.3g}" if value else "", va="center", fontsize=7)
        axis.set_yticks([index + 0.4 - height / 2 for index in range(len(groups))], list(groups), fontsize=8)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, 0.005, caption, fontsize=7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
