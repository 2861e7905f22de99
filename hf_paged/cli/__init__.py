"""The command `hf-paged`: arguments in, `tools` called, a table or JSON out."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and ends the process with one of the codes of `exits.py`.

    An error is two lines on stderr: what is wrong, and the way out. The traceback comes only with `--debug`, which is
    understood anywhere on the line.

    Args:
        arguments (`list[str]`, *optional*):
            Instead of those of the process.
    """
    from .interrupts import handled

    with handled():  # before anything else is imported, which takes a moment
        from .running import run

        code = run(sys.argv[1:] if arguments is None else list(arguments))
    sys.exit(code)
