"""`hf-paged quantize`."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_format
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from .examples import examples
from .options import Demo
from .usage import UsageError

EXAMPLES = examples(
    "hf-paged quantize --demo smollm2-int8 --bits 8",
    "hf-paged quantize --demo smollm2-gptq --method gptq --group-size 32 --num-samples 4 --seq-length 64",
)


def quantize(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL OUT", help="A dense model (a folder or a hub id), and the folder to write."),
    ] = None,
    demo: Demo = False,
    method: Annotated[
        Literal["rtn", "gptq", "awq", "fp8"],
        typer.Option(help="Round to the nearest, GPTQ, AWQ, or round to float8."),
    ] = "rtn",
    bits: Annotated[
        int | None, typer.Option(help="Of a number: 4 or 8 (rtn), 2, 3, 4 or 8 (gptq), 4 (awq).", show_default="4")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Neighbouring inputs that share a scale, or -1 for a whole row.",
            show_default="the first of 128, 64, 32 that divides all rows",
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Zero in the middle of the codes, or where it is best: more exact, and not read by all.",
            show_default="symmetric for rtn and fp8",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text for gptq and awq, plain or JSON lines with a `text`; by default English that Python brings.",
        ),
    ] = None,
    num_samples: Annotated[int, typer.Option(metavar="N", min=1, help="Pieces of that text.")] = 64,
    seq_length: Annotated[int, typer.Option(metavar="N", min=8, help="Tokens of a piece.")] = 512,
    json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Write a quantized copy of a model, in a layout that Transformers and vLLM load.

    rtn and fp8 write the layout of compressed-tensors, gptq and awq their own; each with a README.md that says how it
    was made. OUT appears when it is complete: Ctrl-C leaves nothing.
    """
    model, out = _model_and_out(list(words or ()), demo)
    from ..errors import ConfigurationError
    from ..quantization.recipes import Recipe
    from ..tools.quantize import QuantizeJob, check_out, quantize_checkpoint

    try:
        check_out(out)
        recipe = Recipe(method, bits or (8 if method == "fp8" else 4), group_size, symmetric)
        job = QuantizeJob(model or "", out, recipe, calibration, num_samples, seq_length)
    except ConfigurationError as error:
        raise UsageError(str(error)) from None
    if model is None:
        from ..tools.packaged_model import packaged_model_path

        job = dataclasses.replace(job, model=str(packaged_model_path()))
    else:
        from ..serving.preflight import check_model

        check_model(model)
    from .logs import quiet_transformers

    quiet_transformers()
    with _bar() as progress:
        result = quantize_checkpoint(job, progress, log=lambda message: None)
    typer.echo(json_format.dumps(dataclasses.asdict(result), indent=2) if json else result.describe())


def _model_and_out(words: list[str], demo: bool) -> tuple[str | None, Path]:
    if len(words) != (1 if demo else 2):
        expected = "OUT alone, as --demo is the model" if demo else "MODEL and OUT"
        raise UsageError(f"Give {expected}; got {len(words)} words.")
    return (None if demo else words[0]), Path(words[-1])


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], object]]:
    """A progress bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, count: None
        return
    from tqdm import tqdm

    with tqdm(unit="layer", desc="quantizing") as bar:

        def show(done: int, count: int) -> None:
            bar.total = count
            bar.update(done - bar.n)

        yield show
