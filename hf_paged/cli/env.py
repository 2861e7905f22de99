"""`hf-paged env`."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

from .examples import examples
from .logs import only_warnings

EXAMPLES = examples("hf-paged env", "hf-paged env --json")


def env(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print what a bug report needs: versions, machine, native library, GPUs, variables. No keys, no tokens.

    Nothing is loaded, built or measured; hf-paged info does that.
    """
    from ..tools.environment import collect_environment, describe_environment

    only_warnings()
    found = collect_environment()
    typer.echo(json_format.dumps(found, indent=2) if json else describe_environment(found))
