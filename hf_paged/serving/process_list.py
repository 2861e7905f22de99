"""Keys on a command line: other users of a machine see it, so they are painted over."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


def hide(secrets: Sequence[str]) -> bool:
    """Replaces secrets in the process's command line, as `ps` shows it, and in `sys.argv` by asterisks.

    Args:
        secrets (`Sequence[str]`):
            Texts that may be on the command line.

    Returns:
        `bool`: Whether none is to be seen any more.
    """
    for arguments in (sys.argv, getattr(sys, "orig_argv", [])):
        arguments[:] = [_covered(argument, secrets) for argument in arguments]
    if not sys.platform.startswith("linux"):
        return False
    try:
        start, end = _place()
        # The kernel reads a command line from the memory of its process, where it may be written like any other.
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            line = memory.read(end - start)
            covered = b"\0".join(_covered_bytes(argument, secrets) for argument in line.split(b"\0"))
            memory.seek(start)
            memory.write(covered)
        shown = Path("/proc/self/cmdline").read_bytes().split(b"\0")
        return not any(_covered_bytes(argument, secrets) != argument for argument in shown)
    except (OSError, ValueError, IndexError):
        return False


def _place() -> tuple[int, int]:
    """Where the command line lies: the fields 48 and 49 of `stat`, counted behind the name, which may hold anything."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if not 0 < start < end:
        raise ValueError("not allowed to know")
    return start, end


def _covered(argument: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        if argument == secret or argument.endswith("=" + secret) or (argument.startswith("[") and secret in argument):
            argument = argument.replace(secret, "*" * len(secret))
    return argument


def _covered_bytes(argument: bytes, secrets: Sequence[str]) -> bytes:
    return _covered(argument.decode("latin-1"), secrets).encode("latin-1")
