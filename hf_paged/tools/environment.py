"""`hf-paged env`: what a bug report needs, and nothing that is secret. A part that cannot be found says why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ..cache_folder import cache_folder

PACKAGES = (
    *("hf-paged", "torch", "transformers", "tokenizers", "accelerate", "safetensors", "huggingface-hub", "numpy"),
    *("triton", "llguidance", "gguf", "fastapi", "uvicorn", "pydantic", "typer", "rich"),
)
_PREFIXES = (
    *("HF_PAGED_", "HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "NCCL_"),
    *("TRITON_", "TOKENIZERS_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "ATEN_", "DNNL_", "ONEDNN_"),
)
_NAMES = ("CXX", "LD_PRELOAD", "LD_LIBRARY_PATH", "NO_COLOR", "TERM", "LANG", "LC_ALL", "XDG_CACHE_HOME", "VIRTUAL_ENV")
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|KEYS|SECRET|PASSWORD|PASS|AUTH|CREDENTIALS?)(_|$)")


def collect_environment() -> dict[str, Any]:
    """Returns everything as plain values; loads no model and builds nothing."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "python": _attempt(_python),
        "platform": platform.platform(),
        "processor": _attempt(_processor),
        "memory": _attempt(_memory),
        "native": _attempt(_native),
        "torch": _attempt(_torch),
        "cache": _attempt(_cache),
        "variables": relevant_variables(os.environ),
    }


def describe_environment(found: dict[str, Any]) -> str:
    """Returns lines for people, to be pasted into a report.

    Args:
        found (`dict[str, Any]`):
            What `collect_environment` returned.
    """
    lines = [f"{name}: {version or 'not installed'}" for name, version in found["versions"].items()]
    for name in ("platform", "python", "processor", "memory", "native", "torch", "cache"):
        value = found[name]
        if isinstance(value, dict):
            value = ", ".join(f"{key.replace('_', ' ')} {_shown(item)}" for key, item in value.items())
        lines.append(f"{name}: {value}")
    lines += [f"{name}={value}" for name, value in found["variables"].items()] or ["no variables that matter are set"]
    return "\n".join(lines)


def relevant_variables(environment: Any) -> dict[str, str]:
    """Returns the variables that change what hf_paged does. Secrets are named, not shown.

    Args:
        environment (`Mapping[str, str]`):
            All variables.
    """
    names = sorted(name for name in environment if name in _NAMES or name.startswith(_PREFIXES))
    return {name: "(set, not shown)" if _SECRET.search(name) else _harmless(environment[name]) for name in names}


def _harmless(value: str) -> str:
    """Without names and passwords of URLs, and without the user's name in paths of their home."""
    if "://" in value and "@" in value:
        parts = urlsplit(value)
        value = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return _without_home(value)


def _without_home(value: str) -> str:
    home = str(Path.home())
    return value.replace(home, "~") if len(home) > 1 else value


def _attempt(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception as error:  # a report without this part is better than none
        return f"unknown ({type(error).__name__}: {' '.join(str(error).split())})"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> dict[str, Any]:
    return {
        "implementation": platform.python_implementation(),
        "executable": _without_home(sys.executable),
        "hf_paged_folder": _without_home(str(Path(__file__).parents[1])),
    }


def _processor() -> dict[str, Any]:
    from ..kernels.cpu.threads import thread_limits
    from .bench.machine import machine_info

    machine, limits = machine_info(), thread_limits()
    return {
        "name": machine.processor,
        "usable_cores": limits.num_processors,
        "container_quota": limits.quota,
        "instruction_sets": machine.instruction_sets,
    }


def _memory() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    gib = {"total_gib": memory.total, "free_gib": memory.available}
    return {name: round(value / 2**30, 1) for name, value in gib.items()} | {"huge_pages": _huge_pages()}


def _huge_pages() -> str:
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"\[(\w+)\]", setting)
    return found[1] if found else setting.strip()


def _native() -> dict[str, Any]:
    from ..kernels.cpu.library import find_without_building

    status = find_without_building()
    return status | {"path": _without_home(status["path"]) if status["path"] else None}


def _torch() -> dict[str, Any]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)")
    return {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": gpus,
    }


def _cache() -> dict[str, Any]:
    folder = cache_folder()
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    return {
        "folder": _without_home(str(folder)),
        "exists": folder.is_dir(),
        "writable": place.is_dir() and os.access(place, os.W_OK),
    }


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
