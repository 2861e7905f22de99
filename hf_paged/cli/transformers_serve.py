"""`hf-paged transformers-serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from .examples import examples

EXAMPLES = examples("hf-paged transformers-serve --stock-help")

# Everything that is not ours goes to Transformers' command, options included.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def transformers_serve(
    context: typer.Context,
    paged_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Fields of PagedConfig, such as '{\"max_num_seqs\": 32}'.")
    ] = None,
    stock_help: Annotated[
        bool, typer.Option("--stock-help", help="Print the options of `transformers serve`.")
    ] = False,
) -> None:
    """Run `transformers serve MODEL` with its chat requests on the paged engine, all at the same time."""
    from ..tools.transformers_serve import serve

    serve(["--help"] if stock_help else context.args, paged_config)
