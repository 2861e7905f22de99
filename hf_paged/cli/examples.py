"""The end of each verb's help: examples, all of which a test runs."""

from __future__ import annotations


def examples(*commands: str) -> str:
    """Returns what a help text ends with.

    Args:
        commands (`str`):
            Lines for a shell.
    """
    return "\n\n".join([f"Example{'s' * (len(commands) > 1)}:", *(f"$ {command}" for command in commands)])
