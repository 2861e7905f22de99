"""`hf-paged serve`."""

from __future__ import annotations

import typer

# The server declares its flags itself; nothing here looks at them.
PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def serve(context: typer.Context) -> None:
    """Serve a model over HTTP as OpenAI does: hf-paged serve MODEL [flags], or --demo; --help lists the flags."""
    from ..serving.api_server import leave, main

    leave(main(context.args, prog="hf-paged serve", demo_model=_demo_model))


def _demo_model() -> tuple[str, str]:
    from ..tools.packaged_model import MODEL_NAME, packaged_model_path

    return str(packaged_model_path()), MODEL_NAME
