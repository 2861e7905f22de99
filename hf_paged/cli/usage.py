"""The error of wrong usage: two lines and an exit code of its own, whatever version of Typer there is."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import typer

# Typer brings a Click of its own, or uses the one that is installed: the classes are found through one it exports.
UsageError: Any = typer.BadParameter.__mro__[1]
ClickException: Any = UsageError.__mro__[1]


def refuse_unknown(arguments: Sequence[str], known: Sequence[str]) -> None:
    """Refuses a flag that nobody knows, and suggests the nearest.

    Args:
        arguments (`Sequence[str]`):
            Of a command.
        known (`Sequence[str]`):
            Its flags.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in known:
            raise UsageError(unknown_flag(name, known))


def unknown_flag(name: str, known: Sequence[str]) -> str:
    """Returns a sentence about a flag that nobody knows.

    Args:
        name (`str`):
            The flag.
        known (`Sequence[str]`):
            Those that there are.
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"Unknown flag `{name}`" + (f"; did you mean `{close[0]}`?" if close else ".")
