"""Which instruction sets this machine has, and which one the user asked for by `HF_PAGED_CPU_ISA`."""

from __future__ import annotations

import os
import platform
import sys

from ...errors import ConfigurationError

VARIABLE = "HF_PAGED_CPU_ISA"
# The fastest first; "torch" (no native operators) is always possible.
LEVELS = ("amx", "avx512", "avx2", "torch")
_CPU_FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "amx": {"amx_tile", "amx_bf16", "avx512_bf16"},
}


def requested_isa() -> str | None:
    """Returns the level that the user forces, or `None`.

    Raises:
        ConfigurationError: If `HF_PAGED_CPU_ISA` is none of the known levels.
    """
    value = os.environ.get(VARIABLE, "")
    if not value:
        return None
    if value not in LEVELS:
        raise ConfigurationError(
            f"{VARIABLE}={value!r} is not a level; take one of {', '.join(LEVELS)} "
            f"(this machine has {', '.join(machine_isas())}), or leave it unset for the fastest."
        )
    return value


def check_available(level: str, available: tuple[str, ...]) -> None:
    """Refuses a level that the machine lacks.

    Args:
        level (`str`):
            What the user forces.
        available (`tuple[str, ...]`):
            What there is.

    Raises:
        ConfigurationError: If the level is not among them.
    """
    if level not in available:
        raise ConfigurationError(
            f"{VARIABLE}={level!r}, but this machine has only {', '.join(available)}; "
            f"take one of these, or leave it unset for the fastest."
        )


def machine_isas() -> tuple[str, ...]:
    """Returns the levels that processor and operating system have, the fastest first, without loading anything.

    The library's own detection has the last word: a system may still refuse AMX to a process.
    """
    flags = _cpu_flags() if unsupported_platform() is None else set()
    found = ["torch"]
    for level in ("avx2", "avx512", "amx"):
        if not _CPU_FLAGS[level] <= flags:
            break
        found.insert(0, level)
    return tuple(found)


def unsupported_platform() -> str | None:
    """Returns why there are no native operators for this kind of machine, or `None`."""
    if not sys.platform.startswith("linux"):
        return f"they are made for Linux, not for {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"they are made for x86-64 processors, not for {platform.machine()}"
    return None


def _cpu_flags() -> set[str]:
    """The kernel lists only what it also saves at a task switch, so these can be used."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()
