"""The command `hf-paged`: arguments in, `tools` called, a table or JSON out."""

from __future__ import annotations

import os
import sys

from . import exits


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and ends the process with one of the codes of `exits.py`.

    An error is two lines on stderr: what is wrong, and the way out. The traceback comes only with `--debug`, which is
    understood anywhere on the line.

    Args:
        arguments (`list[str]`, *optional*):
            Instead of those of the process.
    """
    try:
        from .interrupts import handled

        with handled():  # before anything else is imported, which takes a moment
            _replace_closed_streams()
            from .running import run

            code = run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt as error:  # in that moment, or after the end of `run`
        is_terminated = type(error) is not KeyboardInterrupt
        print(f"hf-paged: {'terminated' if is_terminated else 'interrupted'}", file=sys.stderr)
        code = exits.TERMINATED if is_terminated else exits.INTERRUPTED
    # CPython notes an interrupt that left the `exec` of a text, as libraries make classes by, and at the end of
    # `python -m` kills itself for it, whoever has caught it since. The next `exec` takes the note away.
    exec("")
    sys.exit(code)


def _replace_closed_streams() -> None:
    """Python has `None` for a standard stream that is closed; to read from it, or write to it, is to do nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
