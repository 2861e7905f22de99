"""Every verb and its help."""

from __future__ import annotations

from typing import Any

import typer

from hf_paged.cli.app import app
from hf_paged.cli.bench import serve_help


def _commands(command: Any, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [words]
    for name, below in getattr(command, "commands", {}).items():
        found += _commands(below, (*words, name))
    return found


COMMANDS = _commands(typer.main.get_command(app))


def help_of(words: tuple[str, ...]) -> str:
    """The help of a verb, without boxes."""
    if words == ("serve",):
        from hf_paged.serving.command_line import make_parser

        return make_parser("hf-paged serve").format_help()
    if words == ("bench", "serve"):
        return serve_help()
    command: Any = typer.main.get_command(app)
    context = command.make_context("hf-paged", [], resilient_parsing=True, terminal_width=200, max_content_width=200)
    for word in words:
        command = command.commands[word]
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    return command.get_help(context)


def example_lines(text: str) -> list[str]:
    """The examples at the end of a help."""
    return [line.strip()[2:] for line in text.splitlines() if line.strip().startswith("$ ")]
