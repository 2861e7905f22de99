"""Every run and the medians, as a table for people and plain values for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from .peers import Peer
from .reference import agreement
from .store import RunStore
from .targets import Target


class Figure(NamedTuple):
    """A figure of a peer in a round.

    Args:
        name (`str`):
            Its name in JSON.
        title (`str`):
            Heading of its column.
        workload (`str`, *optional*):
            The workload that gives it; by default it comes from the start or the end of the worker.
        key (`str`):
            Where the worker puts it.
        scale (`float`):
            From the worker's unit to the table's.
        digits (`int`):
            Digits behind the point.
    """

    name: str
    title: str
    workload: str | None
    key: str
    scale: float = 1.0
    digits: int = 1


FIGURES = (
    Figure("w1_tokens_per_s", "W1 tok/s", "W1", "output_tokens_per_s"),
    Figure("w2_tokens_per_s", "W2 tok/s", "W2", "output_tokens_per_s"),
    Figure("w3_ms_per_token", "W3 ms/token", "W3", "seconds_per_token", 1e3, 2),
    Figure("w3_first_ms", "W3 first ms", "W3", "first_token_seconds", 1e3),
    Figure("w4_seconds", "W4 first tokens s", "W4", "all_first_tokens_seconds"),
    Figure("step_ms", "step of 64 ms", "step", "seconds", 1e3),
    Figure("start_seconds", "start s", None, "started.start_seconds"),
    Figure("import_seconds", "import s", None, "started.import_seconds"),
    Figure("peak_mib", "peak MiB", None, "ended.peak_bytes", 2.0**-20, 0),
)
MACHINE = (
    ("read_bandwidth", "reads, GB/s", 1e-9),
    ("read_bandwidth_ordinary_pages", "on ordinary pages", 1e-9),
    ("fma_peak", "FMA peak, GFLOP/s", 1e-9),
    ("bf16_peak", "bf16 peak, GFLOP/s", 1e-9),
    ("torch_float32_gemm", "torch float32 product", 1e-9),
    ("torch_bfloat16_gemm", "torch bf16 product", 1e-9),
    ("load_average", "load before", 1.0),
)


def value_of(figure: Figure, result: dict[str, Any]) -> float | None:
    """Returns a figure of a peer in a round, or `None`.

    Args:
        figure (`Figure`):
            Which.
        result (`dict[str, Any]`):
            What the peer did in the round.
    """
    place: Any = result.get("workloads", {}).get(figure.workload) if figure.workload else result
    for key in figure.key.split("."):
        place = place.get(key) if isinstance(place, dict) else None
    return None if place is None else place * figure.scale


def summarize(
    peers: Sequence[Peer], store: RunStore, rounds: int, tops: list[dict[str, Any]] | None
) -> dict[str, dict[str, Any]]:
    """Returns for each peer every run's figures, their medians, errors, and how its first tokens agree.

    Args:
        peers (`Sequence[Peer]`):
            Who was measured.
        store (`RunStore`):
            The run.
        rounds (`int`):
            How many rounds.
        tops (`list[dict[str, Any]]`, *optional*):
            First tokens of W1 in float32.
    """
    rows = {}
    for peer in peers:
        results = [found for number in range(1, rounds + 1) if (found := store.result(number, peer.name))]
        if not results:
            continue
        runs = {figure.name: [value_of(figure, result) for result in results] for figure in FIGURES}
        known = {name: [value for value in values if value is not None] for name, values in runs.items()}
        rows[peer.name] = {
            "title": peer.title,
            "runs": {name: values for name, values in runs.items() if known[name]},
            "medians": {name: statistics.median(values) for name, values in known.items() if values},
            "errors": [f"round {n}, {k}: {e}" for n, r in enumerate(results, 1) for k, e in r["errors"].items()],
            "how": {name: found["how"] for r in results for name, found in r["workloads"].items() if "how" in found},
            "first_tokens": _first_tokens(results, tops),
            "about": results[-1].get("ended", {}).get("about", {}),
            "wall_seconds": [result.get("wall_seconds") for result in results],
        }
    return rows


def machine_medians(store: RunStore, rounds: int) -> dict[str, Any]:
    """Returns the medians of what the probe measured before the rounds.

    Args:
        store (`RunStore`):
            The run.
        rounds (`int`):
            How many rounds.
    """
    found = [f for number in range(1, rounds + 1) if (f := store.result(number, "machine"))]
    medians = dict(found[-1])
    for name, _, _ in MACHINE:
        values = [f[name] for f in found if f[name] is not None]
        medians[name] = statistics.median(values) if values else None
    return medians | {"rounds": found}


def print_summary(
    console: Console, rows: dict[str, dict[str, Any]], machine: dict[str, Any], unavailable: dict[str, str]
) -> None:
    """Prints the tables of peers and of the machine.

    Args:
        console (`Console`):
            Where to.
        rows (`dict[str, dict[str, Any]]`):
            From `summarize`.
        machine (`dict[str, Any]`):
            From `machine_medians`.
        unavailable (`dict[str, str]`):
            Why some peers could not run.
    """
    console.print(f"{machine['processor']}; bf16 unit {machine['bf16_unit'] or 'none'}", highlight=False, markup=False)
    console.print(_machine_table(machine))
    console.print(_table("Medians", rows, lambda row, figure: _text(row["medians"].get(figure.name), figure)))
    console.print(_table("Every run", rows, _every_run))
    for name, row in rows.items():
        if row["first_tokens"]:
            console.print(f"{name}, first tokens of W1 against float32: {row['first_tokens']}", highlight=False)
        for workload, how in row["how"].items():
            if not how.startswith("all "):
                console.print(f"{name}, {workload}: {how}", highlight=False, markup=False)
        for error in row["errors"]:
            console.print(f"{name} failed: {error}", highlight=False, markup=False)
    for name, reason in unavailable.items():
        console.print(f"{name} could not run: {reason}", highlight=False, markup=False)


def print_targets(console: Console, targets: Sequence[Target]) -> None:
    """Prints every target beside its figure.

    Args:
        console (`Console`):
            Where to.
        targets (`Sequence[Target]`):
            From `targets.all_targets`.
    """
    table = Table(title="Targets", title_justify="left")
    for title, side in (("target", "left"), ("must be", "right"), ("is", "right"), ("", "left")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    for target in targets:
        word = {True: "met", False: "MISSED", None: "not measured"}[target.is_met]
        limit = f"{'>=' if target.at_least else '<='} {target.limit:g}"
        table.add_row(target.what, limit, "-" if target.figure is None else f"{target.figure:.2f}", word)
    console.print(table)


def _first_tokens(results: list[dict[str, Any]], tops: list[dict[str, Any]] | None) -> str | None:
    for result in results:
        said = result["workloads"].get("W1", {}).get("first_tokens")
        if said and tops and len(said) == len(tops):
            counts = agreement(said, tops)
            return f"{counts['same']} the same, {counts['near_tie']} near ties, {counts['other']} others"
    return None


def _every_run(row: dict[str, Any], figure: Figure) -> str:
    return " ".join(_text(value, figure) for value in row["runs"].get(figure.name, [])) or "-"


def _text(value: float | None, figure: Figure) -> str:
    return "-" if value is None else f"{value:,.{figure.digits}f}"


def _table(title: str, rows: dict[str, dict[str, Any]], show: Callable[[dict[str, Any], Figure], str]) -> Table:
    figures = [figure for figure in FIGURES if any(figure.name in row["medians"] for row in rows.values())]
    table = Table(title=title, title_justify="left")
    table.add_column("engine")
    for figure in figures:
        table.add_column(figure.title, justify="right")
    for row in rows.values():
        table.add_row(row["title"], *(show(row, figure) for figure in figures))
    return table


def _machine_table(machine: dict[str, Any]) -> Table:
    table = Table(title="The machine before each round", title_justify="left")
    table.add_column("round")
    for _, title, _ in MACHINE:
        table.add_column(title, justify="right")
    for number, found in enumerate(machine["rounds"], 1):
        values = [found[name] for name, _, _ in MACHINE]
        scaled = ("-" if v is None else f"{v * s:,.1f}" for v, (_, _, s) in zip(values, MACHINE, strict=True))
        table.add_row(str(number), *scaled)
    return table
