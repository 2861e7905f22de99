"""`hf-paged info`."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

from .examples import examples
from .options import Demo
from .usage import UsageError

EXAMPLES = examples("hf-paged info", "hf-paged info --demo", "hf-paged info --generate --json")


def info(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model folder or hub id.")] = None,
    demo: Demo = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights; auto is the checkpoint's own.")] = "auto",
    generate: Annotated[
        bool, typer.Option("--generate", help="Print how each field and argument of `generate` is run, and no more.")
    ] = False,
) -> None:
    """Print versions, the machine and the attention backends; with a MODEL, what its engine would do here."""
    if generate and (demo or model is not None):
        raise UsageError("--generate is the same for every model; leave out MODEL.")
    if demo:
        if model is not None:
            raise UsageError("--demo is a model of its own; leave out MODEL.")
        from ..tools.packaged_model import packaged_model_path

        model = str(packaged_model_path())
    if model is not None:
        from ..serving.preflight import check_model

        check_model(model)
    from ..tools.info import collect_coverage, collect_info, describe_coverage, describe_info
    from .logs import quiet_transformers

    quiet_transformers()
    if generate:
        typer.echo(json_format.dumps(collect_coverage(), indent=2) if json else describe_coverage())
        return
    found = collect_info(model, dtype)
    typer.echo(json_format.dumps(found, indent=2) if json else describe_info(found))
