"""The verbs of `hf-paged`. Nothing here imports torch: `--help` answers at once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import bench, chat, complete, demo, env, generate, info, quantize, run_batch, serve, transformers_serve
from .examples import examples
from .exits import MEANINGS
from .help import Command, style
from .logs import send_logs_to_stderr

_EXIT_CODES = "Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items()) + "."
# Flags may be written with underscores.
_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "max_content_width": 120,
}

app = typer.Typer(
    help="A paged K/V cache and continuous batching for Hugging Face Transformers models.",
    epilog=f"{_EXIT_CODES}\n\n{examples('hf-paged --version', 'hf-paged chat --help')}",
    no_args_is_help=True,
    rich_markup_mode=style(),
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)
app.command(epilog=chat.EXAMPLES, cls=Command)(chat.chat)
app.command(epilog=complete.EXAMPLES, cls=Command)(complete.complete)
app.command(epilog=generate.EXAMPLES, cls=Command)(generate.generate)
app.command(context_settings=serve.PASS_ON, cls=serve.Command)(serve.serve)
app.command(context_settings=run_batch.PASS_ON, epilog=run_batch.EXAMPLES, cls=run_batch.Command)(run_batch.run_batch)
app.command(context_settings=transformers_serve.PASS_ON, epilog=transformers_serve.EXAMPLES, cls=Command)(
    transformers_serve.transformers_serve
)
app.add_typer(bench.app, name="bench")
app.command(epilog=quantize.EXAMPLES, cls=Command)(quantize.quantize)
app.command(epilog=info.EXAMPLES, cls=Command)(info.info)
app.command(epilog=demo.EXAMPLES, cls=Command)(demo.demo)
app.command(epilog=env.EXAMPLES, cls=Command)(env.env)


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
