"""The lines that a run prints: one for each compiled kernel, one for each violation, one about all.

And the table of registers and occupancy that is kept with the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .architectures import ARCHITECTURES, KIB

FIGURES = Path(__file__).with_name("figures.md")
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


def write_figures(rows: Sequence[dict[str, Any]], path: Path = FIGURES) -> None:
    """Writes registers, shared memory and occupancy of each configuration, a table for each version of Triton.

    Args:
        rows (`Sequence[dict[str, Any]]`):
            All that was compiled.
        path (`Path`, *optional*):
            Where; by default beside this file.
    """
    lines = [
        "# Registers, shared memory and occupancy of every Triton kernel",
        "",
        "Written by `make gates ARGS=--record`. In each cell: registers of a thread, KiB of shared memory of a",
        "program, and occupancy, the share of warps that both leave room for. Empty where it is not used.",
    ]
    for version in sorted({row["version"] for row in rows}):
        lines += ["", f"## Triton {version}", ""]
        lines += ["| kernel | " + " | ".join(ARCHITECTURES) + " |", "|---|" + "---|" * len(ARCHITECTURES)]
        of_version = {(row["name"], row["target"]): row for row in rows if row["version"] == version}
        for name in sorted({name for name, _ in of_version}):
            cells = [_figures(of_version.get((name, target))) for target in ARCHITECTURES]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _figures(row: dict[str, Any] | None) -> str:
    if row is None or "figures" not in row:
        return ""
    figures = row["figures"]
    return f"{figures['registers']}, {figures['shared'] / KIB:.1f}, {row['occupancy']:.0%}"


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
