"""The lines that a run prints: one for each compiled kernel, one for each violation, one about all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_TITLES = ("kernel", "target", "Triton", "regs", "shared", "occupancy", "instructions", "tensor", "wide", "")


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each compiled kernel, below a line of titles.

    Args:
        rows (`Sequence[dict[str, Any]]`):
            Each with its `violations`.
    """
    ordered = sorted(rows, key=lambda row: (row["name"], row["target"], row["version"]))
    lines = [_TITLES, *map(_cells, ordered)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_TITLES))]
    return ["  ".join(map(_pad, line, widths, range(len(widths)))).rstrip() for line in lines]


def violation_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each violation.

    Args:
        rows (`Sequence[dict[str, Any]]`):
            Each with its `violations`.
    """
    return [
        f"VIOLATION: {row['name']}, {row['target']}, Triton {row['version']}: {words}"
        for row in rows
        for words in row["violations"]
    ]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Returns one line about all rows.

    Args:
        rows (`Sequence[dict[str, Any]]`):
            Each with its `violations`.
    """
    bad = sum(bool(row["violations"]) for row in rows)
    kernels = {row["name"] for row in rows}
    targets = {row["target"] for row in rows}
    versions = sorted({row["version"] for row in rows}, key=lambda version: [int(part) for part in version.split(".")])
    return (
        f"{len(rows)} compilations of {len(kernels)} configurations for {len(targets)} architectures with Triton "
        f"{' and '.join(versions)}: {bad or 'none'} of them with violations"
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    head = (row["name"], row["target"], row["version"])
    if "figures" not in row:
        return (*head, *["-"] * 6, "FAILED")
    figures = row["figures"]
    return (
        *head,
        f"{figures['registers']}",
        f"{figures['shared']:,}",
        f"{row['occupancy']:.0%}",
        f"{figures['instructions']:,}",
        f"{figures['tensor_core']}",
        f"{figures['wide_loads']}",
        "VIOLATION" if row["violations"] else "",
    )


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)
