"""Pictures of `make bench-cpu` and `make bench-serve`: a bar for each engine or server, a dot for each round."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from .plot_foot import short_name
from .plot_style import BLUE, GRAY, SKY, in_digits, make_sheet, panel, show_bars
from .systems import OURS

ENGINE_PANELS = (
    ("w1_tokens_per_s", "64 mixed requests", "output tokens/s (more is better)"),
    ("w2_tokens_per_s", "64 requests, shared beginning", "output tokens/s (more is better)"),
    ("w3_ms_per_token", "One user alone", "ms/token (less is better)"),
    ("w4_seconds", "Four prompts of 4,000 tokens", "s to all first tokens (less is better)"),
)
SERVER_PANELS = (
    ("output_throughput", "tokens/s (more is better)"),
    ("p99_ttft_ms", "p99 first token, ms (less)"),
    ("p99_itl_ms", "p99 between tokens, ms (less)"),
)


def draw_engines(report: dict[str, Any]) -> Figure:
    """Returns a panel for each workload of `make bench-cpu`.

    Args:
        report (`dict[str, Any]`):
            What it wrote.
    """
    rows, machine, settings = report["rows"], report["machine"], report["settings"]
    about = f"Medians of {settings['rounds']} alternating rounds, which are the dots; each engine in its own processes"
    foot = [machine["processor"], f"memory reads {machine['read_bandwidth'] / 1e9:.0f} GB/s"]
    foot += [f"{short_name(settings['model'])} in bf16", report["begun"]]
    most = max(len([row for row in rows.values() if name in row["medians"]]) for name, _, _ in ENGINE_PANELS)
    figure, axes = make_sheet(
        "hf_paged and its peers on a CPU", about, "; ".join(foot), 2 * (1.0 + 0.34 * most), rows=2, columns=2
    )
    for axis, (name, title, unit) in zip(axes, ENGINE_PANELS, strict=True):
        shown = {peer: row for peer, row in rows.items() if name in row["medians"]}
        _show_peers(
            axis,
            {peer: row["medians"][name] for peer, row in shown.items()},
            {peer: [run for run in row["runs"][name] if run is not None] for peer, row in shown.items()},
            {peer: row["title"] for peer, row in shown.items()},
        )
        panel(axis, title, x=unit, grid="x")
    return figure


def draw_servers(report: dict[str, Any]) -> Figure:
    """Returns a row of panels for each load of `python -m benchmarks.serving.compare`.

    Args:
        report (`dict[str, Any]`):
            What it wrote.
    """
    medians = report["medians"]
    peers = max(map(len, medians.values()))
    rounds = max(len(runs) for load in report["results"].values() for runs in load.values())
    about = f"Medians of {rounds} alternating rounds, which are the dots; the same load for each server"
    foot = f"{report.get('processor', '')}{', ' if report.get('processor') else ''}{len(report['cores'])} cores; "
    figure, axes = make_sheet(
        "hf_paged's server and its peers",
        about,
        foot + report["date"],
        len(medians) * (0.95 + 0.4 * peers),
        rows=len(medians),
        columns=len(SERVER_PANELS),
    )
    panels = iter(axes)
    for load, by_peer in medians.items():
        for name, unit in SERVER_PANELS:
            axis = next(panels)
            runs = {peer: [run[name] for run in found] for peer, found in report["results"][load].items()}
            _show_peers(
                axis, {peer: found[name] for peer, found in by_peer.items()}, runs, {peer: peer for peer in by_peer}
            )
            panel(axis, load, x=unit, grid="x")
    return figure


def _show_peers(axis: Any, values: dict[str, float], runs: dict[str, list[float]], titles: dict[str, str]) -> None:
    show_bars(
        axis,
        [titles[peer] for peer in values],
        list(values.values()),
        [in_digits(value) for value in values.values()],
        [BLUE if peer == OURS else SKY if peer.startswith(OURS) else GRAY for peer in values],
        [runs[peer] for peer in values],
    )
