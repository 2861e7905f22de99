"""How many instructions each kernel had when somebody last looked; beside this file as `baseline.json`.

{"attention decode ...": {"3.6": {"sm_80": 1264, "sm_90": 1310, ...}, "3.9": {...}}, ...}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("baseline.json")
SOURCES_PATH = Path(__file__).with_name("sources.sha256")  # of the kernels that were compiled for the baseline
KERNELS = Path(__file__).parents[2] / "hf_paged" / "kernels" / "triton"
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


def sources_digest(folder: Path = KERNELS) -> str:
    """Returns the SHA-256 of the kernels' sources, names and all.

    Args:
        folder (`Path`, *optional*):
            Where they are.
    """
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def is_of_these_sources(path: Path = SOURCES_PATH) -> bool:
    """Returns whether the baseline is that of the kernels as they are now.

    Args:
        path (`Path`, *optional*):
            Where the digest of the baseline's sources is.
    """
    return path.exists() and path.read_text(encoding="utf-8").strip() == sources_digest()


def record_sources(path: Path = SOURCES_PATH) -> None:
    """Writes of which sources the baseline is.

    Args:
        path (`Path`, *optional*):
            Where to.
    """
    path.write_text(sources_digest() + "\n", encoding="utf-8")
