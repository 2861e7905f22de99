"""`transformers serve` on the paged engine: Transformers' own server, with our models behind its model manager."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from .. import compat
from ..auto import AutoPagedModelForCausalLM
from ..configuration import PagedConfig
from ..errors import (
    ConfigurationError,
    InvalidRequestError,
    MissingDependencyError,
    QueueFullError,
    UnsupportedModelError,
)

logger = logging.getLogger(__name__)

_CHOICES = ("--continuous-batching", "--no-continuous-batching")


def serve(arguments: Sequence[str], paged_config: str | None = None) -> None:
    """Runs the command line of `transformers serve`, until Ctrl-C.

    Args:
        arguments (`Sequence[str]`):
            What would follow `transformers serve`. Continuous batching is on unless it says otherwise.
        paged_config (`str`, *optional*):
            Fields of `PagedConfig`, as a JSON object.

    Raises:
        MissingDependencyError: If the server's packages are not installed.
        ConfigurationError: If `paged_config` makes no sense.
    """
    import typer

    config = _paged_config(paged_config)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_command())
    if not set(arguments) & set(_CHOICES):
        arguments = [*arguments, _CHOICES[0]]
    with compat.served_through(lambda model: _page(model, config), _answer_errors):
        app(args=list(arguments), prog_name="transformers serve")


def make_server(model: str, paged_config: PagedConfig | None = None, **options: Any) -> Any:
    """Starts a server in a thread of this process.

    Args:
        model (`str`):
            A folder or a name on the Hub.
        paged_config (`PagedConfig`, *optional*):
            Settings of the engine.
        options (`Any`):
            Arguments of Transformers' `Serve`: `host`, `port`, `dtype`, ...

    Returns:
        `transformers.cli.serve.Serve`: Running; `kill_server()` ends it.

    Raises:
        MissingDependencyError: If the server's packages are not installed.
    """
    command, config = _command(), paged_config or PagedConfig()
    with compat.served_through(lambda loaded: _page(loaded, config), _answer_errors):
        return command(force_model=model, **{"continuous_batching": True, **options}, non_blocking=True)


def _command() -> Any:
    command = compat.serve_command()
    if command is None:
        raise MissingDependencyError(
            "`transformers serve` needs fastapi, uvicorn, openai and pydantic; "
            "install them with `pip install 'hf-paged[transformers-serve]'`."
        )
    return command


def _paged_config(text: str | None) -> PagedConfig:
    if text is None:
        return PagedConfig()
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"`--paged-config` is not JSON ({error}): {text!r}.") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"`--paged-config` must be a JSON object of PagedConfig fields, got {text!r}.")
    return PagedConfig.from_dict(values)


def _page(model: Any, config: PagedConfig) -> Any:
    """What the engine cannot run is served as Transformers serves it."""
    try:
        return AutoPagedModelForCausalLM.from_model(model, paged_config=config)
    except UnsupportedModelError as error:
        logger.warning("%s It is served by Transformers alone.", error)
        return model


def _answer_errors(app: Any) -> None:
    """Tells clients what was wrong with their request, which Transformers calls an internal error."""
    from fastapi.responses import JSONResponse

    def answer(request: Any, error: Exception) -> JSONResponse:
        busy = isinstance(error, QueueFullError)
        kind = "server_overloaded" if busy else "invalid_request_error"
        return JSONResponse({"error": {"message": str(error), "type": kind}}, status_code=503 if busy else 400)

    for kind in (InvalidRequestError, NotImplementedError):
        app.add_exception_handler(kind, answer)
