"""Builds the device and makes torch know it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "foreign"
SOURCE = Path(__file__).with_name("device.cpp")
GIB = 1 << 30


def compiler() -> str | None:
    """The compiler, or `None` where there is none."""
    return shutil.which("g++") or shutil.which("clang++")


def build(folder: Path) -> Path:
    """Compiles the device; takes half a minute."""
    library, lib = folder / "foreign_device.so", Path(torch.__file__).parent / "lib"
    found = compiler()
    assert found is not None, "a test asks for the compiler first"
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    links = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = [found, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *includes, str(SOURCE), *links, "-o", str(library)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return library


def load(library: Path) -> Any:
    """Makes this process know the device, as `"foreign"`; returns the module that counts."""
    torch.utils.rename_privateuse1_backend(NAME)
    device = types.ModuleType(NAME)
    answers = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "device_count": 1,
        "current_device": 0,
        "mem_get_info": (8 * GIB, 16 * GIB),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
    }
    for name, answer in answers.items():
        setattr(device, name, lambda *args, answer=answer: answer)
    for name in ("manual_seed_all", "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        setattr(device, name, lambda *args: None)
    torch._register_device_module(NAME, device)
    spec = importlib.util.spec_from_file_location("foreign_device", library)
    assert spec is not None and spec.loader is not None, "the library was built"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return module
