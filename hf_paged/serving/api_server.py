"""The server's process: `python -m hf_paged.serving.api_server --model MODEL` and `hf-paged serve MODEL`.

    settings -> keys hidden -> socket bound -> model loaded -> ready line -> serving -> draining -> exit code

`lifecycle.py` says what signals do and which exit codes there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import shlex
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from ..errors import ConfigurationError, HfPagedError, MissingDependencyError
from . import process_list
from .command_line import UsageError, parse_settings
from .listening import allow_successors, bind, url
from .preflight import check_flags, check_model
from .settings import ServerSettings

if TYPE_CHECKING:
    from .lifecycle import Signals
    from .service import Service

logger = logging.getLogger("hf_paged.serving.api_server")  # also where this is `__main__`

_LOCAL = ("127.", "localhost", "::1")


def main(
    arguments: Sequence[str] | None = None,
    prog: str = "python -m hf_paged.serving.api_server",
    demo_model: Callable[[], tuple[str, str]] | None = None,
    debug: bool = False,
) -> int:
    """Serves until a signal comes.

    Args:
        arguments (`Sequence[str]`, *optional*):
            Of the command line; the process's own by default.
        prog (`str`, defaults to `"python -m hf_paged.serving.api_server"`):
            What `--help` calls the program.
        demo_model (`Callable[[], tuple[str, str]]`, *optional*):
            Fetches the model of `--demo`: its folder and its name.
        debug (`bool`, defaults to `False`):
            Whether a failure shows its traceback, as it does with `--log-level debug`.

    Returns:
        `int`: The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        settings = parse_settings(arguments, prog=prog)
        _hide_keys(settings, arguments)
        if settings.demo and demo_model is None:
            raise ConfigurationError("`--demo` is a flag of `hf-paged serve`; name a MODEL here.")
        if settings.model is None and not settings.demo:
            raise ConfigurationError("Name a MODEL to serve (a folder or a name on the Hub), or give `--demo`.")
        check_flags(settings)
    except HfPagedError as error:
        print(f"hf-paged: {error}", file=sys.stderr)
        return 2
    try:
        if settings.demo and demo_model is not None:
            path, name = demo_model()
            names = settings.served_model_name or (name,)
            settings = dataclasses.replace(settings, demo=False, model=path, served_model_name=names)
        return _run(settings)
    except UsageError as error:  # flags that do not go with this model
        print(f"hf-paged: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        # Whatever a checkpoint, a hub or a disk has against us is one line, not thirty.
        print(f"hf-paged: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        if debug or settings.log_level == "debug":
            traceback.print_exception(error)
        elif not isinstance(error, HfPagedError):
            print(f"({type(error).__name__}; --log-level debug shows where)", file=sys.stderr)
        return 1


def _hide_keys(settings: ServerSettings, arguments: Sequence[str]) -> None:
    keys = [key for key in settings.api_key or () if any(key in argument for argument in arguments)]
    if keys:
        hidden = process_list.hide(keys)
        print(
            "hf-paged: a key on the command line "
            + ("was to be seen in the process list for a moment" if hidden else "is to be seen in the process list")
            + "; HF_PAGED_API_KEY and --api-key-file keep it out.",
            file=sys.stderr,
        )


def _run(settings: ServerSettings) -> int:
    started = time.monotonic()
    _check_dependencies()
    _check_certificate(settings)
    _allow_many_connections()
    bound = bind(settings)
    try:
        assert settings.model is not None, "of a demo, too"
        check_model(settings.model, settings.revision)
        from .access_log import configure_logging
        from .lifecycle import Signals

        configure_logging("json" if settings.log_format == "json" else "text", settings.log_level)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are what clients send
        with Signals() as signals:
            return _serve(settings, bound, signals, started)
    finally:
        bound.close()
        if settings.uds is not None:
            _remove(settings.uds)


def _serve(settings: ServerSettings, bound: socket.socket, signals: Signals, started: float) -> int:
    from .app import make_app
    from .http_protocol import make_protocol
    from .lifecycle import ENGINE_DIED, ended_anyway, make_server
    from .loading import load_service

    logger.info("Loading %s ...", settings.model)
    service = load_service(settings)
    try:
        server = make_server(
            make_app(service),
            service,
            make_protocol(settings.read_timeout, settings.max_body_bytes),
            on_ready=lambda: _announce(service, url(settings, bound), time.monotonic() - started),
        )
        signals.serve(server, settings.shutdown_timeout)
        service.engine.start()
        allow_successors(bound)
        _settle_memory()
        server.run(sockets=[bound])
    finally:
        with ended_anyway(ENGINE_DIED):
            service.close()
    if server.exit_code == ENGINE_DIED:
        cause = service.engine.cause
        print(f"hf-paged: the engine died: {type(cause).__name__}: {cause}", file=sys.stderr)
    else:
        logger.info("Stopped.")
    return server.exit_code


def _settle_memory() -> None:
    """Hides what was loaded from the garbage collector.

    A full collection looks at each of half a million objects that live as long as the process: a quarter of a second
    in which no request gets a token.
    """
    gc.collect()
    gc.freeze()


def _announce(service: Service, address: str, seconds: float) -> None:
    """The ready line, and what to try."""
    settings, plan = service.settings, service.engine.engine.plan
    if settings.uds is None and not settings.host.startswith(_LOCAL) and not settings.api_key:
        logger.warning("Everybody who can reach %s can use this server: no key is set (--api-key-file).", settings.host)
    print(
        f"Serving {service.model_names[0]} at {address} ({plan.num_blocks} blocks of {plan.block_size} tokens, context "
        f"of {plan.max_model_len} tokens, {plan.max_num_seqs} requests at the same time; ready in {seconds:.1f} s)\n"
        f"Try: {_example(service, address)}",
        flush=True,
    )
    if settings.page and settings.uds is None:
        print(f"Page: {address}/", flush=True)


def _example(service: Service, address: str) -> str:
    body: dict[str, object] = {"model": service.model_names[0]}
    if getattr(service.tokenizer, "chat_template", None):
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
    else:
        path, body["prompt"] = "completions", "Once upon a time"
    words = ["curl"]
    if service.settings.uds is not None:
        words += ["--unix-socket", shlex.quote(service.settings.uds)]
        address = "http://localhost"
    words += [f"{address}/v1/{path}", "-H", "'Content-Type: application/json'"]
    if service.settings.api_key:
        words += ["-H", "'Authorization: Bearer YOUR_KEY'"]
    return " ".join([*words, "-d", shlex.quote(json.dumps(body))])


def _check_dependencies() -> None:
    for name in ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client"):
        try:
            __import__(name)
        except ImportError as error:
            raise MissingDependencyError(
                f"The server needs the package {name.replace('_', '-')}: pip install 'hf-paged[serve]'."
            ) from error


def _check_certificate(settings: ServerSettings) -> None:
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return
    import ssl

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigurationError(
            f"`--ssl-certfile` {settings.ssl_certfile!r} and `--ssl-keyfile` {settings.ssl_keyfile!r} do not make a "
            f"certificate: {error}."
        ) from None


def _allow_many_connections() -> None:
    """Raises the limit of open files to what the system allows: each connection is one."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ImportError, OSError, ValueError):
        logger.debug("the limit of open files stays as it is")


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def leave(code: int) -> NoReturn:
    """Ends the process, once `main` has returned: everything that needs an end has had it.

    What Python does at its end, which is to take a million objects apart one by one, takes seconds on a busy machine.

    Args:
        code (`int`):
            The exit code.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
