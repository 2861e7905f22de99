"""How help looks, and what a shell completes where another parser reads the flags."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from typer.core import TyperCommand

_NARROW = 80  # columns; boxes need some


def style() -> Literal["rich"] | None:
    """Returns whether help has boxes and colours: on a terminal that is wide enough, and knows them."""
    plain = not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
    return None if plain or shutil.get_terminal_size().columns < _NARROW else "rich"


class Command(TyperCommand):
    """A verb. Without boxes, too, its flags are shown in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the flags.

        Args:
            ctx (`Context`):
                Of the command.
            formatter (`HelpFormatter`):
                Takes them.
        """
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def command_with(flags: Callable[[], Sequence[tuple[str, str]]]) -> type[Command]:
    """Returns a class of verbs that know, for completion, flags that another parser reads.

    Args:
        flags (`Callable[[], Sequence[tuple[str, str]]]`):
            Returns them with their help.
    """

    class PassingOn(Command):
        def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
            found = super().shell_complete(ctx, incomplete)
            if not incomplete.startswith("-"):
                return found
            known = {item.value for item in found}
            new = [(name, text) for name, text in flags() if name.startswith(incomplete) and name not in known]
            item_type = _completion_item()
            return found + [item_type(name, help=text) for name, text in new]

    return PassingOn


def _completion_item() -> Any:
    """The class of completions: newer versions of Typer have a Click of their own."""
    try:
        return importlib.import_module("typer._click.shell_completion").CompletionItem
    except ImportError:
        return importlib.import_module("click.shell_completion").CompletionItem


def flags_of_servers() -> list[tuple[str, str]]:
    """Returns the flags of `hf-paged serve`, with their help."""
    from ..serving.command_line import make_parser

    return flags_of(make_parser())


def flags_of(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Returns the flags of a parser, with their help.

    Args:
        parser (`argparse.ArgumentParser`):
            The parser.
    """
    return [
        (name, action.help or "")
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        for name in action.option_strings
        if name.startswith("--")
    ]
