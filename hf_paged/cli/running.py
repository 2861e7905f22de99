"""A command from its arguments to its exit code, whatever goes wrong on the way."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Any

import typer

from . import exits, interrupts
from .usage import ClickException, unknown_flag

_VARIABLES = ("HF_PAGED_CPU_ISA=", "HF_PAGED_CPU_PIN=")
_LONGEST = 1000  # characters of a message: some libraries write pages


def run(arguments: list[str]) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments (`list[str]`):
            Those behind `hf-paged`.
    """
    arguments, debug = _take_debug(arguments)
    try:
        code = _ended_by(arguments, debug)
    except BrokenPipeError:
        _drop_output()
        return exits.READER_GONE
    return _flushed(code)


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return exits.READER_GONE
    except OSError as error:
        _drop_output()
        return _failed(error) if code == exits.DONE else code
    return code


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """`--debug` stands before or behind the verb, hence it is not left to the parser. Behind `--` it is a word."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    ours = [argument for argument in arguments[:end] if argument != "--debug"]
    return ours + arguments[end:], len(ours) < end


def _ended_by(arguments: list[str], debug: bool) -> int:
    try:
        return _invoke(arguments, debug)
    except typer.Exit as ended:
        return ended.exit_code
    except ClickException as error:
        return _wrong_usage(error)
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Exception as error:
        if interrupts.received() is not None:  # which came in the middle of an import, and was made an error of it
            return _interrupted()
        if debug:
            raise
        return _failed(error)


def _invoke(arguments: list[str], debug: bool) -> int:
    from .app import app

    if "_HF_PAGED_COMPLETE" in os.environ:
        app(args=arguments, prog_name="hf-paged")
    command = typer.main.get_command(app)
    with command.make_context("hf-paged", arguments, obj={"debug": debug}) as context:
        code = command.invoke(context)
    if interrupts.received() is not None:
        return _interrupted()
    return code if isinstance(code, int) else exits.DONE


def _interrupted() -> int:
    terminated = interrupts.received() == signal.SIGTERM
    print(f"hf-paged: {'terminated' if terminated else 'interrupted'}", file=sys.stderr)
    return exits.TERMINATED if terminated else exits.INTERRUPTED


def _wrong_usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        if error.message:  # elsewhere the help has been printed by asking for it
            print(error.message)
        return exits.WRONG_USAGE
    path = context.command_path if context is not None else "hf-paged"
    print(f"hf-paged: {_one_line(_message(error, context))}\n(see {path} --help)", file=sys.stderr)
    return exits.WRONG_USAGE


def _message(error: Any, context: Any) -> str:
    option = getattr(error, "option_name", None)
    if type(error).__name__ != "NoSuchOption" or not option:
        return error.format_message()
    known = [name for parameter in context.command.get_params(context) for name in parameter.opts] if context else []
    return unknown_flag(option, known)


def _failed(error: Exception) -> int:
    from ..errors import ConfigurationError
    from ..serving.command_line import UsageError

    said = str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        said = f"What is written has no room: {error.strerror}; make room, or write to another place."
    print(f"hf-paged: {_one_line(said) or type(error).__name__}", file=sys.stderr)
    # The variables of the native operators are read by layers that know of no command line.
    is_variable = isinstance(error, ConfigurationError) and said.startswith(_VARIABLES)
    if is_variable or isinstance(error, UsageError):
        print("(see hf-paged --help)", file=sys.stderr)
        return exits.WRONG_USAGE
    print(f"({type(error).__name__}; run it again with --debug for the traceback)", file=sys.stderr)
    return exits.FAILED


def _one_line(text: str) -> str:
    from ..tools.terminal.texts import printable

    text = printable(" ".join(text.split()))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def _drop_output() -> None:
    """What is left in the buffer of stdout has nowhere to go, and Python would complain about that at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # a stdout that is no file
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for what is left of the process
