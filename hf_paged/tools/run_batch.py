"""`hf-paged run-batch`: the lines of a file, answered by an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from ..errors import ConfigurationError, EngineError
from ..serving.app import make_app
from ..serving.loading import load_service
from ..serving.service import Service
from ..serving.settings import ServerSettings
from .asgi_call import post_json
from .batch_lines import AnswerLine, Batch, BatchSummary
from .packaged_model import MODEL_NAME, packaged_model_path

logger = logging.getLogger(__name__)


def run_batch(
    settings: ServerSettings,
    source: str,
    target: str,
    *,
    overwrite: bool = False,
    max_in_flight: int | None = None,
) -> BatchSummary:
    """Answers a file of requests.

    Args:
        settings (`ServerSettings`):
            Of the model and its engine; what they say about connections has no effect.
        source (`str`):
            The file with the requests.
        target (`str`):
            The file for the answers; `"-"` is the standard output.
        overwrite (`bool`, defaults to `False`):
            Whether a file that is there may be replaced.
        max_in_flight (`int`, *optional*):
            Requests that are being answered or wait in the engine; by default twice as many as it runs.

    Raises:
        ConfigurationError: If a file cannot be used.
        EngineError: If the engine dies.
    """
    total = _check_files(source, target, overwrite)
    service = load_service(_without_clients(settings))
    try:
        in_flight = max_in_flight or 2 * service.engine.engine.plan.max_num_seqs
        batch = Batch(_answerer(service), in_flight)
        with open(source, "rb") as lines, _opened(target) as out, _progress(total) as bar:

            def write(line: bytes) -> None:
                out.write(line)
                out.flush()  # whole lines, whatever ends the process
                bar.update()

            try:
                asyncio.run(_until_terminated(batch.run(lines, write)))
            except (KeyboardInterrupt, asyncio.CancelledError):
                logger.warning("interrupted: %s", batch.summary.describe())
                raise KeyboardInterrupt from None
        return batch.summary
    finally:
        service.close()


def _without_clients(settings: ServerSettings) -> ServerSettings:
    """Nobody needs a key, or has to be told to come back later."""
    if settings.demo:
        names = settings.served_model_name or (MODEL_NAME,)
        settings = dataclasses.replace(settings, demo=False, model=str(packaged_model_path()), served_model_name=names)
    return dataclasses.replace(
        settings,
        api_key=None,
        allowed_hosts=None,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        stream_on_accept=False,
        disable_uvicorn_access_log=True,
    )


async def _until_terminated(work: Awaitable[None]) -> None:
    """Does something. Ctrl-C and SIGTERM end it by cancelling it, so that what is there is written."""
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            # Not everywhere, and not in every thread.
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await work


def _answerer(service: Service) -> AnswerLine:
    app = make_app(service)

    async def answer(url: str, body: dict[str, Any]) -> tuple[int, str, Any]:
        try:
            result = await post_json(app, url, body)
        except Exception:  # a mistake of ours; the other lines are not to suffer from it
            logger.exception("a line could not be answered")
            result = (
                500,
                "",
                {"error": {"message": "Something went wrong; the log says what.", "code": "internal_error"}},
            )
        if not service.engine.is_alive:  # all further lines would fail
            raise EngineError(f"The engine has ended: {service.engine.cause}") from service.engine.cause
        return result

    return answer


def _check_files(source: str, target: str, overwrite: bool) -> int:
    """Refuses files that cannot be used, before a model is loaded. Returns the number of requests."""
    if "://" in source or "://" in target:
        raise ConfigurationError("Input and output are files, not URLs: fetch the input first.")
    try:
        with open(source, "rb") as lines:
            total = sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConfigurationError(f"`--input-file` {source!r} cannot be read: {error.strerror}.") from None
    if target == "-":
        return total
    path = Path(target)
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"`--output-file` {target!r} is in no folder that exists.")
    if path.exists():
        if path.samefile(source):
            raise ConfigurationError(f"`--output-file` is the input, {source!r}; name another file.")
        if path.is_file() and path.stat().st_size and not overwrite:
            raise ConfigurationError(f"`--output-file` {target!r} exists; name another, or give `--overwrite`.")
    return total


@contextlib.contextmanager
def _opened(target: str) -> Iterator[IO[bytes]]:
    if target == "-":
        yield sys.stdout.buffer
        return
    with open(target, "wb") as out:
        yield out


def _progress(total: int) -> tqdm:
    return tqdm(total=total, unit="req", desc="answers", disable=not sys.stderr.isatty())
