"""`hf-paged serve`."""

from __future__ import annotations

import typer

from . import interrupts
from .help import command_with, flags_of_servers

# The server declares its flags itself; nothing here looks at them.
PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
Command = command_with(flags_of_servers)


def serve(context: typer.Context) -> None:
    """Serve a model over HTTP as OpenAI does: hf-paged serve MODEL, or --demo; --help lists the flags."""
    from ..serving.api_server import leave, main

    code = main(
        context.args, prog="hf-paged serve", demo_model=_demo_model, debug=bool((context.obj or {}).get("debug"))
    )
    if interrupts.received() is not None:  # in the middle of an import, which made an error of it
        raise KeyboardInterrupt
    leave(code)


def _demo_model() -> tuple[str, str]:
    from ..tools.packaged_model import MODEL_NAME, packaged_model_path

    return str(packaged_model_path()), MODEL_NAME
