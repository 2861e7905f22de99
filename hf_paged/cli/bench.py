"""`hf-paged bench NAME`: one command for each benchmark, all with the same options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..tools.bench import BENCHMARK_HELP

PLOT_HELP = "Draw the figures into a file: .png, .svg or .pdf. Needs matplotlib (the extra `bench`)."
PICTURE_HELP = "Another picture than the main one, such as pool or memory; a wrong name lists what there is."

app = typer.Typer(help="Measure speed and memory, alone or beside stock Transformers.", no_args_is_help=True)


def _make_command(name: str) -> Callable[..., None]:
    def command(
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
        plot: Annotated[Path | None, typer.Option(metavar="FILE", help=PLOT_HELP)] = None,
        picture: Annotated[str | None, typer.Option(metavar="NAME", help=PICTURE_HELP)] = None,
    ) -> None:
        from ..tools.bench.plots import check_target, check_writable, choose_picture, plot_report

        # Before the measurement, and before torch is loaded for it.
        choose_picture(name, picture)
        if plot is not None:
            check_target(plot)
        if json is not None:
            check_writable(json, "--json")
        from ..configuration import PagedConfig
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
            config=PagedConfig(attn_backend=attn_backend),
            log=lambda message: log.print(message, highlight=False, markup=False),
        )
        report = run_benchmark(name, options)
        report.print(output_console())
        if json is not None:
            write_json(json, report.to_dict())
        if plot is not None:
            plot_report(report.to_dict(), plot, picture)
            log.print(f"written: {plot}", highlight=False, markup=False)

    return command


for _name, _help in BENCHMARK_HELP.items():
    app.command(_name, help=_help)(_make_command(_name))


@app.command("plot")
def plot(
    report: Annotated[Path, typer.Argument(metavar="FILE.json", help="What `--json` or `--save-result` wrote.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"{PLOT_HELP} By default a PNG beside the report.")
    ] = None,
    picture: Annotated[str | None, typer.Option(metavar="NAME", help=PICTURE_HELP)] = None,
) -> None:
    """Draw the figures of an earlier measurement; nothing is measured."""
    from ..tools.bench.plots import plot_file

    typer.echo(f"written: {plot_file(report, plot, picture)}", err=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def serve(context: typer.Context) -> None:
    """Load for a running server, ours or any that speaks OpenAI's API; flags as of `vllm bench serve`."""
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
        raise typer.Exit(1)
