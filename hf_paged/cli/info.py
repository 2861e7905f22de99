"""`hf-paged info`."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

from .examples import examples
from .usage import UsageError

EXAMPLES = examples("hf-paged info", "hf-paged info --generate --json")


def info(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model folder or hub id.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights; auto is the checkpoint's own.")] = "auto",
    generate: Annotated[
        bool, typer.Option("--generate", help="Print how each field and argument of `generate` is run, and no more.")
    ] = False,
) -> None:
    """Print versions, the machine and the attention backends; with a MODEL, what its engine would do here."""
    if generate and model is not None:
        raise UsageError("--generate is the same for every model; leave out MODEL.")
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
