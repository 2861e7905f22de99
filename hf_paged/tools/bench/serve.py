"""`hf-paged bench serve`: load for any server that speaks OpenAI's API, and what became of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.table import Table

from ...errors import ConfigurationError, HfPagedError
from .machine import load_average, processor_info
from .plots import check_target, plot_report
from .report import log_console, write_json
from .serve_arrivals import arrival_times
from .serve_client import HttpClient
from .serve_dataset import ServeRequest, make_requests
from .serve_load import request_body, send_all, send_one
from .serve_records import RequestRecord
from .serve_settings import KEY_VARIABLES, NAME_BY_ITSELF, ServeBenchSettings
from .serve_statistics import DETAILS, summarize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

READY_INTERVAL = 0.5
SHORTEST_WAIT = 1.0  # seconds that a server has for an answer, however few it has to get ready
TITLES = {
    "ttft": "time to first token, ms",
    "tpot": "per output token but the first, ms",
    "itl": "between chunks, ms",
    "e2el": "whole answer, ms",
}
_T = TypeVar("_T")


class ServerNotReadyError(HfPagedError):
    """The server did not answer a first request."""


@dataclasses.dataclass
class ServeRun:
    """A finished run.

    Args:
        result (`dict[str, Any]`):
            Its figures, under vLLM's names.
        records (`list[RequestRecord]`):
            Each request.
    """

    result: dict[str, Any]
    records: list[RequestRecord]


def run_serve_benchmark(settings: ServeBenchSettings) -> ServeRun:
    """Sends load to a server.

    Args:
        settings (`ServeBenchSettings`):
            Which server, which load.

    Raises:
        ConfigurationError: If the settings do not fit the server, or a figure could not be written.
        MissingDependencyError: If a figure is wanted that could not be drawn afterwards.
        ServerNotReadyError: If the server does not answer.
    """
    if settings.plot is not None:
        check_target(settings.result_dir / "plot.png" if settings.plot == NAME_BY_ITSELF else settings.plot)
    return run_loop(_run(settings))


def write_files(settings: ServeBenchSettings, run: ServeRun) -> list[Path]:
    """Writes the files that are wanted, the figures first.

    Args:
        settings (`ServeBenchSettings`):
            Which they are.
        run (`ServeRun`):
            What `run_serve_benchmark` returned.

    Returns:
        `list[Path]`: What was written.
    """
    saved = _result_path(settings, run.result)
    if saved is not None:
        details = () if settings.save_detailed else DETAILS
        write_json(saved, {key: value for key, value in run.result.items() if key not in details})
    figure = settings.plot
    if figure == NAME_BY_ITSELF:
        figure = (saved or settings.result_dir / _own_name(settings, run.result)).with_suffix(".png")
    if figure is not None:
        plot_report(run.result, figure)
    return [path for path in (saved, figure) if path is not None]


def run_loop(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine on uvloop, where that is installed: less time of the processor for each chunk.

    Args:
        work (`Coroutine`):
            What to run.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def make_client(settings: ServeBenchSettings) -> HttpClient:
    """Returns a client for the server, with its key.

    Args:
        settings (`ServeBenchSettings`):
            Where the server is.
    """
    headers = ({"Authorization": f"Bearer {settings.key}"} if settings.key else {}) | dict(settings.header)
    return HttpClient(settings.url, headers, insecure=settings.insecure)


async def _run(settings: ServeBenchSettings) -> ServeRun:
    client, log = make_client(settings), log_console()
    card = await _first_model(client, settings)
    model = settings.served_model_name or settings.model or card["id"]
    requests = await asyncio.to_thread(make_requests, settings, lambda: _load_tokenizer(settings, card))
    bodies = [request_body(request, model, settings) for request in requests]
    await _wait_until_ready(client, settings, request_body(_short(requests[0]), model, settings))
    if settings.num_warmups:
        log.print(f"{settings.num_warmups} requests to warm up ...")
        warm = [bodies[i % len(bodies)] for i in range(settings.num_warmups)]
        await send_all(
            client, settings.path, warm, [0.0] * len(warm), max_concurrency=settings.max_concurrency,
            timeout=settings.request_timeout,
        )  # fmt: skip
    times = arrival_times(len(bodies), settings.request_rate, settings.burstiness, settings.seed)
    with _progress(len(bodies), settings.disable_tqdm) as bar:
        records, duration, cost = await send_all(
            client,
            settings.path,
            bodies,
            times,
            max_concurrency=settings.max_concurrency,
            timeout=settings.request_timeout,
            on_end=lambda record: bar.update(),
        )
    client.close()
    for record, request in zip(records, requests, strict=True):
        if record.prompt_tokens is None:
            record.prompt_tokens = request.prompt_len
    figures = summarize(
        records,
        duration,
        percentiles=settings.metric_percentiles,
        metrics=settings.percentile_metrics,
        goodput=settings.goodput,
        cost=cost,
    )
    return ServeRun(_about(settings, model) | figures, records)


def _about(settings: ServeBenchSettings, model: str) -> dict[str, Any]:
    """The head of vLLM's result file."""
    rate = settings.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": settings.backend,
        "backend": settings.backend,
        "label": settings.label,
        "model_id": model,
        "tokenizer_id": settings.tokenizer or model,
        "num_prompts": settings.num_prompts,
        **dict(settings.metadata),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": "inf" if math.isinf(settings.burstiness) else settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "base_url": settings.url,
        "endpoint": settings.path,
        "dataset_name": settings.dataset_name,
        "seed": settings.seed,
        "machine": processor_info(),  # the client's
        "load_average": [load_average()],
    }


async def _first_model(client: HttpClient, settings: ServeBenchSettings) -> dict[str, Any]:
    """What `/v1/models` says of the model; a server that is still starting is given its time."""
    end = time.monotonic() + settings.ready_check_timeout_sec
    while True:
        try:
            async with asyncio.timeout(max(end - time.monotonic(), SHORTEST_WAIT)):
                answer = await client.send("GET", "/v1/models")
            if answer.status == 200:
                cards = json.loads(answer.body)["data"]
                named = [card for card in cards if card.get("id") == settings.model]
                return (named or cards)[0]
            problem = f"{settings.url}/v1/models answered {answer.status}: {answer.body[:200].decode(errors='replace')}"
            if answer.status == 401:
                raise _refused(settings)
            if answer.status < 500:
                break
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"{settings.url}/v1/models: {error!r}"
        if time.monotonic() >= end:
            break
        await asyncio.sleep(READY_INTERVAL)
    if settings.model is not None:
        return {"id": settings.model}
    raise ServerNotReadyError(f"No model is known: {problem}. Name one with `--model`, or see `--base-url`.")


async def _wait_until_ready(client: HttpClient, settings: ServeBenchSettings, body: bytes) -> None:
    end = time.monotonic() + settings.ready_check_timeout_sec
    while True:
        patience = min(settings.request_timeout, max(end - time.monotonic(), SHORTEST_WAIT))
        record = await send_one(client, settings.path, body, time.perf_counter(), patience)
        if record.succeeded:
            return
        if record.error_kind == "http 401":
            raise _refused(settings)
        retriable = record.error_kind in ("no connection", "connection lost", "http 503")
        if not retriable or time.monotonic() >= end:
            raise ServerNotReadyError(
                f"{settings.url}{settings.path} did not answer a first request: {record.error_kind}: {record.error}"
            )
        await asyncio.sleep(READY_INTERVAL)


def _refused(settings: ServeBenchSettings) -> ServerNotReadyError:
    place = settings.key_place
    problem = f"the key of {place} is none of its keys" if place else "it needs a key, and none was given"
    return ServerNotReadyError(
        f"{settings.url} answered 401: {problem}; the first of `--api-key`, {' and '.join(KEY_VARIABLES)} is sent."
    )


def _short(request: ServeRequest) -> ServeRequest:
    return dataclasses.replace(request, output_len=min(request.output_len or 2, 2))


def _load_tokenizer(settings: ServeBenchSettings, card: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that was named, or that of the folder or id which the server names as the model's root."""
    from transformers import AutoTokenizer

    from ..packaged_model import MODEL_NAME, packaged_model_path

    name = settings.tokenizer or card.get("root") or card["id"]
    if name == MODEL_NAME:  # of a server that was started with `--demo`
        name = str(packaged_model_path())
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"`--dataset-name {settings.dataset_name}` needs the model's tokenizer, and {name!r} has none here; name a "
            "folder with `--tokenizer`, or use `--dataset-name packaged`."
        ) from error


def _progress(count: int, disabled: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=count, unit="request", disable=disabled, mininterval=0.5)


def _result_path(settings: ServeBenchSettings, result: dict[str, Any]) -> Path | None:
    """The file for the figures, if one was wanted."""
    if settings.save_result is None:
        return None
    name = settings.save_result if settings.save_result != NAME_BY_ITSELF else _own_name(settings, result)
    return settings.result_dir / name


def _own_name(settings: ServeBenchSettings, result: dict[str, Any]) -> str:
    """The file's name as vLLM makes it, where none was given."""
    base = str(result["model_id"]).rstrip("/").rpartition("/")[2]
    label = settings.label or settings.backend
    return settings.result_filename or f"{label}-{settings.request_rate}qps-{base}-{result['date']}.json"


def _caption(result: dict[str, Any]) -> str:
    return (
        f"{result['model_id']} at {result['base_url']}{result['endpoint']}; {result['num_prompts']} requests of "
        f"{result['dataset_name']}, rate {result['request_rate']}, {result['date']}"
    )


def print_result(console: Console, result: dict[str, Any], percentiles: tuple[float, ...]) -> None:
    """Prints figures as tables.

    Args:
        console (`Console`):
            Where to.
        result (`dict[str, Any]`):
            The figures.
        percentiles (`tuple[float, ...]`):
            Which are there.
    """
    table = Table(title=_caption(result), title_justify="left", show_header=False)
    rows = [
        ("answered", f"{result['completed']:,} of {result['completed'] + result['failed']:,}"),
        ("seconds", f"{result['duration']:,.2f}"),
        ("prompt tokens", f"{result['total_input_tokens']:,}"),
        ("output tokens", f"{result['total_output_tokens']:,}"),
        ("requests per second", f"{result['request_throughput']:,.2f}"),
        ("output tokens per second", f"{result['output_throughput']:,.1f}"),
        ("all tokens per second", f"{result['total_token_throughput']:,.1f}"),
        ("output tokens in the busiest second", f"{result['max_output_tokens_per_s']:,.0f}"),
        ("most requests at a time", f"{result['max_concurrent_requests']:,}"),
    ]
    if result["request_goodput"] is not None:
        rows.append(("requests per second within all objectives", f"{result['request_goodput']:,.2f}"))
    rows += [(f"failed: {kind}", f"{count:,}") for kind, count in sorted(result["error_kinds"].items())]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(_latencies(result, percentiles))
    for kind, words in sorted(result["error_examples"].items()):
        console.print(f"{kind}, for example: {words}", highlight=False, markup=False)
    busy = result["client_cpu_seconds"] / result["duration"]
    console.print(
        f"the client itself: {busy:.0%} of one processor"
        + ("; the server's tokens were counted by chunks" if result["tokens_counted_by"] == "chunks" else ""),
        highlight=False,
    )


def _latencies(result: dict[str, Any], percentiles: tuple[float, ...]) -> Table:
    words = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    table = Table("", *words, title="Latencies", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in TITLES.items():
        if f"mean_{name}_ms" in result:
            table.add_row(title, *(f"{result[f'{word}_{name}_ms']:,.2f}" for word in words))
    return table
