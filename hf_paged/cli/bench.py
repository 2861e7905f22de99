"""`hf-paged bench NAME`: one command for each benchmark, all with the same options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..configuration import KV_CACHE_DTYPES, PagedConfig
from ..errors import ConfigurationError, UnknownNameError
from ..tools.bench import BENCHMARK_HELP
from . import exits
from .examples import examples
from .help import Command, command_with, flags_of, style
from .options import gathered, keyword
from .usage import UsageError, refuse_unknown

PLOT_HELP = "Draw the figures into a file: .png, .svg or .pdf. Needs matplotlib (the extra `bench`)."
PICTURE_HELP = "Another picture than the main one, such as pool or memory; a wrong name lists what there is."

_NOISE = typer.Option(
    metavar="SHARE",
    min=0.0,
    max=1.0,
    help="Of a copy whose weights carry noise of this share of each, seeded: 0.01 undoes that they were 4-bit once.",
)
_ONLY = typer.Option(metavar="NAMES", help="Only these rows, separated by commas; a wrong name lists what there is.")
# Flags that one benchmark has alone.
_MORE = {
    "quantization": [
        keyword("noise", Annotated[float | None, _NOISE]),
        keyword("only", Annotated[str | None, _ONLY]),
    ]
}
_EXAMPLE_FLAGS = {"quantization": "--only gptq-int4 --noise 0.01 --runs 1 --count 2"}

app = typer.Typer(
    help="Measure speed and memory, alone or beside stock Transformers.",
    epilog=examples("hf-paged bench latency --runs 1 --count 2"),
    no_args_is_help=True,
    rich_markup_mode=style(),
)


@contextlib.contextmanager
def _wrong_usage() -> Iterator[None]:
    """A picture or a file that cannot be is a mistake in the flags."""
    try:
        yield
    except (ConfigurationError, UnknownNameError) as error:
        raise UsageError(str(error)) from error


def _make_command(name: str) -> Callable[..., None]:
    def command(  # noqa: PLR0913 - an option each
        model: Annotated[
            str | None,
            typer.Option(metavar="PATH_OR_ID", help="A model folder or hub id instead of the packaged model."),
        ] = None,
        compare: Annotated[
            str | None, typer.Option(metavar="PEER", help="Measure a peer in turns with hf_paged: transformers.")
        ] = None,
        json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures to a file as well.")] = None,
        runs: Annotated[int, typer.Option(min=1, help="Measurements; their median is shown.")] = 3,
        count: Annotated[int | None, typer.Option(min=1, help="Another number of requests.")] = None,
        dtype: Annotated[str, typer.Option(help="Dtype of the weights.")] = "bfloat16",
        attn_backend: Annotated[str | None, typer.Option(metavar="NAME", help="An attention backend by name.")] = None,
        kv_cache_dtype: Annotated[
            str, typer.Option(metavar="NAME", help=f"How K/V are stored: {', '.join(KV_CACHE_DTYPES)}.")
        ] = "auto",
        plot: Annotated[Path | None, typer.Option(metavar="FILE", help=PLOT_HELP)] = None,
        picture: Annotated[str | None, typer.Option(metavar="NAME", help=PICTURE_HELP)] = None,
        *,
        more: dict[str, Any],
    ) -> None:
        from ..tools.bench.plots import check_target, check_writable, choose_picture, plot_report

        # Before the measurement, and before torch is loaded for it.
        with _wrong_usage():
            config = PagedConfig(attn_backend=attn_backend, kv_cache_dtype=kv_cache_dtype)
            choose_picture(name, picture)
            if plot is not None:
                check_target(plot)
            if json is not None:
                check_writable(json, "--json")
        if model is not None:
            from ..serving.preflight import check_model

            check_model(model)
        from ..tools.bench.report import log_console, output_console, write_json
        from ..tools.bench.session import BenchOptions, run_benchmark
        from .logs import quiet_transformers

        quiet_transformers()
        log = log_console()
        options = BenchOptions(
            model=model,
            compare=compare,
            runs=runs,
            count=count,
            dtype=dtype,
            config=config,
            log=lambda message: log.print(message, highlight=False, markup=False),
            **more,
        )
        report = run_benchmark(name, options)
        report.print(output_console())
        if json is not None:
            write_json(json, report.to_dict())
        if plot is not None:
            plot_report(report.to_dict(), plot, picture)
            log.print(f"written: {plot}", highlight=False, markup=False)

    return gathered(command, "more", _MORE.get(name, []))


for _name, _help in BENCHMARK_HELP.items():
    _example = f"hf-paged bench {_name} {_EXAMPLE_FLAGS.get(_name, '--runs 1 --count 2')}"
    app.command(_name, help=_help, epilog=examples(_example), cls=Command)(_make_command(_name))


@app.command(
    "plot",
    epilog=examples(
        "hf-paged bench latency --runs 1 --count 2 --json latency.json", "hf-paged bench plot latency.json"
    ),
    cls=Command,
)
def plot(
    report: Annotated[Path, typer.Argument(metavar="FILE.json", help="What `--json` or `--save-result` wrote.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"{PLOT_HELP} By default a PNG beside the report.")
    ] = None,
    picture: Annotated[str | None, typer.Option(metavar="NAME", help=PICTURE_HELP)] = None,
) -> None:
    """Draw the figures of an earlier measurement; nothing is measured."""
    from ..tools.bench.plots import plot_file

    with _wrong_usage():
        written = plot_file(report, plot, picture)
    typer.echo(f"written: {written}", err=True)


def _serve_flags() -> list[tuple[str, str]]:
    from ..tools.bench.serve_settings import make_parser

    return flags_of(make_parser())


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    cls=command_with(_serve_flags),
)
def serve(context: typer.Context) -> None:
    """Load for a running server, ours or any that speaks OpenAI's API; flags as of `vllm bench serve`."""
    if {"-h", "--help"} & set(context.args):
        typer.echo(serve_help())
        return
    refuse_unknown(context.args, [name for name, _ in _serve_flags()])
    from ..serving.process_list import hide
    from ..tools.bench.report import log_console, output_console
    from ..tools.bench.serve import print_result, run_serve_benchmark, write_files
    from ..tools.bench.serve_settings import parse_settings

    settings = parse_settings(context.args)
    if settings.api_key:
        hide([settings.api_key])
    run = run_serve_benchmark(settings)
    print_result(output_console(), run.result, settings.metric_percentiles)  # first: a file may not be writable
    written = write_files(settings, run)
    if written:
        log_console().print(f"written: {', '.join(map(str, written))}", highlight=False, markup=False)
    if not run.result["completed"]:
        raise typer.Exit(exits.FAILED)


def serve_help() -> str:
    """Returns the help of `hf-paged bench serve`."""
    from ..tools.bench.serve_settings import make_parser

    load = "--port 8000 --num-prompts 16 --input-len 32 --output-len 16"
    return f"{make_parser().format_help()}\n{examples(f'hf-paged bench serve {load}')}"
