"""The verbs of `hf-paged`. Nothing here imports torch: `--help` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench import app as bench_app
from .demo import demo
from .info import info
from .logs import send_logs_to_stderr
from .run_batch import PASS_ON as PASS_TO_ENGINE
from .run_batch import run_batch
from .serve import PASS_ON as PASS_TO_SERVER
from .serve import serve
from .transformers_serve import PASS_ON, transformers_serve

app = typer.Typer(
    help="A paged K/V cache and continuous batching for Hugging Face Transformers models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.add_typer(bench_app, name="bench")
app.command()(info)
app.command(context_settings=PASS_TO_SERVER)(serve)
app.command(context_settings=PASS_TO_ENGINE)(run_batch)
app.command(context_settings=PASS_ON)(transformers_serve)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; understood anywhere on the line.")] = False,
) -> None:
    """A paged K/V cache and continuous batching for Hugging Face Transformers models."""
    send_logs_to_stderr()
