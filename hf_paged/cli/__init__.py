"""The command `hf-paged`: arguments in, `tools` called, a table or JSON out."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and ends the process.

    Exit codes: 0 done, 1 failed (two lines on stderr; the traceback only with `--debug`), 2 wrong usage, 130 Ctrl-C.

    Args:
        arguments (`list[str]`, *optional*):
            Instead of those of the process.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # It is understood before and after the verb, hence not left to the parser.
    debug = "--debug" in arguments
    from .app import app

    try:
        app(args=[argument for argument in arguments if argument != "--debug"], prog_name="hf-paged")
    except KeyboardInterrupt:
        print("hf-paged: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"hf-paged: {message}", file=sys.stderr)
        print(f"({type(error).__name__}; run it again with --debug for the traceback)", file=sys.stderr)
        sys.exit(1)
