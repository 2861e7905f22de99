"""How many instructions each kernel had when somebody last looked; beside this file as `baseline.json`.

{"attention decode ...": {"3.6": {"sm_80": 1264, "sm_90": 1310, ...}, "3.9": {...}}, ...}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("baseline.json")
Counts = dict[str, dict[str, dict[str, int]]]


def read(path: Path = PATH) -> Counts:
    """Returns what is recorded.

    Args:
        path (`Path`, *optional*):
            Where; by default beside this file.
    """
    counts: Counts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return counts


def record(rows: Iterable[dict[str, Any]], path: Path = PATH, keep: bool = False) -> None:
    """Writes what was compiled, a line for each kernel and version.

    Args:
        rows (`Iterable[dict[str, Any]]`):
            From `worker.py`.
        path (`Path`, *optional*):
            Where; by default beside this file.
        keep (`bool`, defaults to `False`):
            Keep what is recorded of anything else: not all kernels, versions or architectures were compiled.
    """
    counts = read(path) if keep else {}
    for row in rows:
        if "figures" in row:
            versions = counts.setdefault(row["name"], {})
            versions.setdefault(row["version"], {})[row["target"]] = row["figures"]["instructions"]
    lines = []
    for name, versions in sorted(counts.items()):
        inner = ",\n".join(f"  {json.dumps(v)}: {json.dumps(versions[v], sort_keys=True)}" for v in sorted(versions))
        lines.append(f" {json.dumps(name)}: {{\n{inner}\n }}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def recorded(counts: Counts, row: dict[str, Any]) -> int | None:
    """Returns the instructions recorded for a row, or `None`.

    Args:
        counts (`Counts`):
            From `read`.
        row (`dict[str, Any]`):
            From `worker.py`.
    """
    return counts.get(row["name"], {}).get(row["version"], {}).get(row["target"])


def versions_of(counts: Counts) -> set[str]:
    """Returns the versions of Triton of which anything is recorded.

    Args:
        counts (`Counts`):
            From `read`.
    """
    return {version for versions in counts.values() for version in versions}
