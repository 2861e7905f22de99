"""`hf-paged run-batch`."""

from __future__ import annotations

import dataclasses
import json as json_format
from typing import Annotated

import typer

from . import exits
from .examples import examples
from .help import command_with, flags_of_servers
from .usage import UsageError

# The flags of a server's model and engine are looked at by the server's own parser.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_OWN = ("--input-file", "--output-file", "--overwrite", "--max-in-flight", "--json")
Command = command_with(flags_of_servers)
EXAMPLES = examples(
    'echo \'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"Hi"}}\' > requests.jsonl',
    "hf-paged run-batch --demo -i requests.jsonl -o answers.jsonl --overwrite",
)


def run_batch(
    context: typer.Context,
    input_file: Annotated[
        str, typer.Option("--input-file", "-i", metavar="FILE", help="Requests, one a line, in OpenAI's batch format.")
    ],
    output_file: Annotated[
        str, typer.Option("--output-file", "-o", metavar="FILE", help="Answers, one a line; - is standard output.")
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output file that is there.")] = False,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests at the same time. By default twice --max-num-seqs.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Answer a file of requests without a server: hf-paged run-batch -i IN -o OUT MODEL.

    Flags of the model, the engine and the chat are those of hf-paged serve. Lines may ask for /v1/chat/completions,
    /v1/completions, /v1/responses or /v1/messages; answers come in their order. A line's `model` is left out, or is
    MODEL as it stands here (or a --served-model-name): any other is that line's error.

    A line that fails gets an entry that says why, and the others go on; the exit code is 1 then. The summary counts
    errors by their code.
    """
    from ..errors import HfPagedError
    from ..serving.command_line import parse_settings
    from ..tools.run_batch import run_batch as run
    from .logs import quiet_transformers

    try:
        settings = parse_settings(context.args, prog="hf-paged run-batch", also=_OWN)
    except HfPagedError as error:
        raise UsageError(str(error)) from None
    if settings.model is None and not settings.demo:
        raise UsageError("name a MODEL (a folder or a name on the Hub), or give --demo.")
    quiet_transformers()
    summary = run(settings, input_file, output_file, overwrite=overwrite, max_in_flight=max_in_flight)
    text = json_format.dumps(dataclasses.asdict(summary)) if json else summary.describe()
    typer.echo(text, err=output_file == "-")
    if summary.failed:
        raise typer.Exit(exits.FAILED)
