"""What a picture says of the circumstances of its figures: machine, model, versions, day, and others at work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from ..packaged_model import MODEL_NAME


def describe_setting(report: dict[str, Any]) -> str:
    """Returns a picture's foot: the machine, what memory gives, the model, versions, the day, and others at work.

    Args:
        report (`dict[str, Any]`):
            From `Report.to_dict`; what it lacks is left out.
    """
    return "; ".join(filter(None, (*_machine(report), *_software(report), *_circumstances(report))))


def _machine(report: dict[str, Any]) -> Iterable[str]:
    machine = report.get("machine") or {}
    if machine:
        cores = machine["num_cores"]
        threads = machine.get("num_threads", cores)
        used = "" if threads == cores else f" ({threads} used)"
        yield f"{machine['processor']}, {cores} core{'s' if cores != 1 else ''}{used}"
        yield machine.get("accelerator") or f"{' '.join(machine['instruction_sets'])}"
    if report.get("isa"):
        yield f"operators: {report['isa']}"
    bandwidths = [row["read_bandwidth"] for row in report.get("rows", ()) if row.get("read_bandwidth")]
    if bandwidths:
        yield f"memory reads {sorted(bandwidths)[len(bandwidths) // 2] / 1e9:.1f} GB/s"


def _software(report: dict[str, Any]) -> Iterable[str]:
    if report.get("model"):
        yield f"{short_name(report['model'])} in {report.get('dtype', 'its dtype')}"
    versions = report.get("versions") or {}
    yield ", ".join(f"{name} {version}" for name, version in versions.items())


def _circumstances(report: dict[str, Any]) -> Iterable[str]:
    yield report.get("date", "")
    loads, machine = report.get("load_average"), report.get("machine")
    if loads and machine and max(loads) > machine.get("num_threads", machine["num_cores"]) + 1:
        yield f"load average {max(loads):.1f}: other processes ran beside it"


def short_name(model: str) -> str:
    """Returns a model's name without the folders it lies in.

    Args:
        model (`str`):
            A path or hub id.
    """
    name = PurePath(model).name if PurePath(model).is_absolute() else model
    return MODEL_NAME if name.startswith(MODEL_NAME) else name
