"""`hf-paged info`: versions, the machine, the backends, a model's plan, and how `generate`'s arguments are run."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from typing import Any

import torch
import transformers

from ..generation.coverage import Way, coverage
from ..kernels.base import BACKENDS
from ..kernels.cpu import library, threads
from ..kernels.selection import describe_backends
from .bench.engine_run import load_paged_model
from .bench.machine import Bandwidth, MachineInfo, machine_info, measure_bandwidth

PACKAGES = ("hf-paged", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "triton", "gguf")


def collect_info(model: str | None = None, dtype: str = "auto") -> dict[str, Any]:
    """Returns everything as plain values.

    Args:
        model (`str`, *optional*):
            Path or hub id of a model, which is loaded.
        dtype (`str`, defaults to `"auto"`):
            Dtype of its weights.
    """
    threads.limit_threads()  # as an engine does
    found: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": dataclasses.asdict(machine_info()),
        "bandwidth": measure_bandwidth().to_dict(),
        "threads": threads.describe_threads(),
        "native": library.status().to_dict(),
        "bf16_dot_speedup": torch.ops.hf_paged.bf16_dot_speedup() if library.load() else 0.0,
    }
    if model is None:
        return found | {"backends": {name: backend.unavailable_reason() or "" for name, backend in BACKENDS.items()}}
    engine = load_paged_model(model, dtype).engine
    try:
        backends = {found.name: found.reason for found in describe_backends(engine.backend.spec)}
        return found | {"backends": backends, "plan": engine.plan.to_dict(), "plan_text": engine.plan.describe()}
    finally:
        engine.close()


def describe_info(found: dict[str, Any]) -> str:
    """Returns lines for people.

    Args:
        found (`dict[str, Any]`):
            What `collect_info` returned.
    """
    machine, bandwidth = MachineInfo(**found["machine"]), Bandwidth(**found["bandwidth"])
    lines = [", ".join(f"{name} {version or 'not installed'}" for name, version in found["versions"].items())]
    lines += [machine.describe(), f"memory {bandwidth.describe()}", f"torch threads {found['threads']}"]
    backends = [f"{name} ({why})" if why else name for name, why in found["backends"].items()]
    lines.append(library.NativeStatus.from_dict(found["native"]).describe())
    if found["bf16_dot_speedup"]:
        lines.append(f"bf16 dot product {found['bf16_dot_speedup']:.1f}x the operations of float32 FMA")
    lines.append(f"attention backends {', '.join(backends)}")
    return "\n".join(lines + (["", found["plan_text"]] if "plan_text" in found else []))


def collect_coverage() -> dict[str, Any]:
    """Returns the names of each `Way` of the installed Transformers; `refused` says why."""
    found: dict[str, Any] = {Way.ENGINE.value: [], Way.STOCK_LOOP.value: [], Way.REFUSED.value: {}}
    for name, entry in coverage().items():
        if entry.way is Way.REFUSED:
            found[entry.way.value][name] = entry.how
        else:
            found[entry.way.value].append(name)
    return found


def describe_coverage() -> str:
    """Returns a table for people: every field of `GenerationConfig` and argument of `generate`, and how it is run."""
    entries = coverage()
    width = max(map(len, entries))
    lines = []
    for way in Way:
        mine = {name: entry for name, entry in entries.items() if entry.way is way}
        lines += ["", f"{way.value} ({len(mine)})"]
        lines += [
            f"  {name:{width}}  {entry.how}" + (f" (with `{entry.needs[0]}`)" if len(entry.needs) == 1 else "")
            for name, entry in mine.items()
        ]
    return "\n".join([f"Transformers {transformers.__version__}: {len(entries)} fields and arguments", *lines])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
