"""The figure: one panel for each workload, a bar for each engine, a dot for each run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .peers import OURS

PANELS = (
    ("w1_tokens_per_s", "W1: 64 mixed requests", "output tokens/s, more is better"),
    ("w2_tokens_per_s", "W2: 64 requests, shared beginning", "output tokens/s, more is better"),
    ("w3_ms_per_token", "W3: one user alone", "ms/token, less is better"),
    ("w4_seconds", "W4: four prompts of 4,000 tokens", "seconds to all first tokens, less is better"),
)


def plot(rows: dict[str, dict[str, Any]], caption: str, path: Path) -> None:
    """Draws the medians and runs into a PNG file.

    Args:
        rows (`dict[str, dict[str, Any]]`):
            From `summary.summarize`.
        caption (`str`):
            What it was measured on.
        path (`Path`):
            The file.

    Raises:
        ImportError: Without matplotlib (the extra `bench`).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7.5))
    for axis, (name, title, unit) in zip(axes.flat, PANELS, strict=True):
        shown = [row | {"ours": peer == OURS} for peer, row in rows.items() if name in row["medians"]]
        heights = range(len(shown))
        values = [row["medians"][name] for row in shown]
        axis.barh(heights, values, color=["tab:orange" if row["ours"] else "tab:gray" for row in shown])
        for height, row in zip(heights, shown, strict=True):
            runs = [run for run in row["runs"][name] if run is not None]
            axis.plot(runs, [height] * len(runs), ".", color="black", markersize=4)
            axis.text(row["medians"][name], height, f"  {row['medians'][name]:.4g}", va="center", fontsize=8)
        axis.set_yticks(heights, [row["title"] for row in shown], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, max(values, default=1) * 1.15)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(unit, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, 0.005, caption, fontsize=7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
