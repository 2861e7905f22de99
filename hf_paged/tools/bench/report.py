"""Tables for people and dictionaries for JSON, from rows of measured values."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 160


class Column(NamedTuple):
    """A column of a table.

    Args:
        key (`str`):
            The value's name in a row.
        title (`str`):
            Its heading.
        show (`Callable[[Any], str]`):
            Makes text of a value.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str


def whole(value: float) -> str:
    """Returns a number without decimals.

    Args:
        value (`float`):
            The number.
    """
    return f"{value:,.0f}"


def one_decimal(value: float) -> str:
    """Returns a number with one decimal.

    Args:
        value (`float`):
            The number.
    """
    return f"{value:,.1f}"


def milliseconds(seconds: float) -> str:
    """Returns seconds as milliseconds.

    Args:
        seconds (`float`):
            The time.
    """
    return f"{seconds * 1e3:,.1f}"


def percent(share: float) -> str:
    """Returns a share in percent.

    Args:
        share (`float`):
            1 is all.
    """
    return f"{share * 100:.1f} %"


def times(factor: float) -> str:
    """Returns a factor.

    Args:
        factor (`float`):
            1 is no difference.
    """
    return f"{factor:.1f}x"


def mebibytes(count: float) -> str:
    """Returns bytes in MiB.

    Args:
        count (`float`):
            How many bytes.
    """
    return f"{count / 2**20:,.0f} MiB"


def gigabytes_per_second(rate: float) -> str:
    """Returns a bandwidth in GB/s.

    Args:
        rate (`float`):
            Bytes per second.
    """
    return f"{rate / 1e9:.1f} GB/s"


@dataclasses.dataclass
class Report:
    """What a benchmark found.

    Args:
        title (`str`):
            What was measured.
        columns (`Sequence[Column]`):
            What the table shows; rows may hold more.
        rows (`list[dict[str, Any]]`):
            A row per system; each has a `"system"`.
        notes (`list[str]`):
            Lines below the table.
        details (`dict[str, Any]`):
            Further values for JSON.
    """

    title: str
    columns: Sequence[Column]
    rows: list[dict[str, Any]]
    notes: list[str] = dataclasses.field(default_factory=list)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {"title": self.title, "rows": self.rows, "notes": self.notes, **self.details}

    def print(self, console: Console) -> None:
        """Prints the table and its notes.

        Args:
            console (`Console`):
                Where to.
        """
        shown = [column for column in self.columns if any(row.get(column.key) is not None for row in self.rows)]
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(shown):
            table.add_column(column.title, justify="left" if index == 0 else "right")
        for row in self.rows:
            values = [row.get(column.key) for column in shown]
            table.add_row(*("-" if v is None else c.show(v) for c, v in zip(shown, values, strict=True)))
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False, markup=False)


def output_console() -> Console:
    """Returns a console on stdout: plain and wide where stdout is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH, no_color=True)


def log_console() -> Console:
    """Returns a console on stderr, for progress and what is being done."""
    return Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=PIPED_WIDTH, no_color=True)


def median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one row of several measurements: medians of numbers, and the last of everything else.

    Args:
        rows (`Sequence[dict[str, Any]]`):
            The measurements, all with the same names.
    """
    return {key: _median([row[key] for row in rows]) for key in rows[-1]}


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes plain values as JSON.

    Args:
        path (`Path`):
            The file; its folder is made if need be.
        values (`dict[str, Any]`):
            What to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _median(values: list[Any]) -> Any:
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return statistics.median(numbers) if len(numbers) == len(values) else values[-1]
