"""Serving, draining, stopping.

loading    a signal ends the process
serving    SIGTERM or SIGINT -> draining; the engine dies -> draining, then exit code 3
draining   new requests get 503; running ones end, or are aborted with an error after `--shutdown-timeout`
stopped    exit code 0
at any time after the first signal, a second one ends the process at once: 128 + its number
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import psutil
import uvicorn

from .errors import overloaded
from .middleware.draining import Work
from .service import Service

logger = logging.getLogger(__name__)

STOPPED, FAILED, WRONG_USAGE, ENGINE_DIED = 0, 1, 2, 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# For probes to see that the engine is dead, and for answers to be sent.
_DEAD_SECONDS = 2.0
_GOODBYE_SECONDS = 5
_CUT_SECONDS = 2  # for what was cut to end
_CLOSING_SECONDS = 20.0


class Server(uvicorn.Server):
    """uvicorn's server, which listens on while it drains, and ends when the engine does.

    Args:
        config (`uvicorn.Config`):
            The application and how to listen.
        service (`Service`):
            Its engine.
        work (`Work`):
            What is being answered.
        on_ready (`Callable[[], None]`, *optional*):
            Called when connections are taken.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, work: Work, on_ready: Callable[[], None] | None = None
    ):
        super().__init__(config)
        self._on_ready = on_ready
        self._service = service
        self._work = work
        self._drained_by: float | None = None
        self.exit_code = STOPPED

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `Signals`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen.

        Args:
            sockets (`list[socket.socket]`, *optional*):
                Where.
        """
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Says goodbye; connections of clients that do not take their answers are cut.

        Args:
            sockets (`list[socket.socket]`, *optional*):
                Where it listened.
        """
        timer = asyncio.get_running_loop().call_later(_GOODBYE_SECONDS, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def stop(self, timeout: float) -> None:
        """Takes no new requests, and ends when the running ones have. May be called from anywhere.

        Args:
            timeout (`float`):
                Seconds until they are aborted.
        """
        self._service.draining = True
        self._drained_by = time.monotonic() + timeout

    async def on_tick(self, counter: int) -> bool:
        """Looks, ten times a second, whether it is time to end.

        Args:
            counter (`int`):
                Ticks so far.
        """
        if await super().on_tick(counter):
            return True
        engine = self._service.engine
        if self.exit_code == STOPPED and not engine.is_alive:
            self.exit_code = ENGINE_DIED
            self.stop(_DEAD_SECONDS)
        if self._drained_by is None:
            return False
        late = time.monotonic() >= self._drained_by
        if late:
            engine.abort_all(overloaded("The server is shutting down; the request was aborted.", "shutting_down"))
        return late or (self._work.num_running == 0 and self.exit_code == STOPPED)


def make_server(app: Any, service: Service, protocol: Any, on_ready: Callable[[], None] | None = None) -> Server:
    """Returns a server for an application.

    Args:
        app (`Callable`):
            The ASGI application, with `app.state.work`.
        service (`Service`):
            Its engine and settings.
        protocol (`type`):
            What reads and writes HTTP.
        on_ready (`Callable[[], None]`, *optional*):
            Called when connections are taken.
    """
    settings = service.settings
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=settings.backlog,
        timeout_keep_alive=settings.timeout_keep_alive,  # type: ignore[arg-type]  # seconds of any length
        timeout_graceful_shutdown=_GOODBYE_SECONDS + _CUT_SECONDS,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
    )
    return Server(config, service, app.state.work, on_ready)


class Signals:
    """What SIGINT and SIGTERM do, from the start of the process to its end."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._timeout = 0.0
        self._num_received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def serve(self, server: Server, timeout: float) -> None:
        """From now on, the first signal drains.

        Args:
            server (`Server`):
                Which.
            timeout (`float`):
                Seconds for what runs.
        """
        self._server, self._timeout = server, timeout

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._num_received += 1
        if self._num_received > 1:
            _leave(number, "stopped at once by a second signal")
        if self._server is None:
            _leave(number, "stopped while starting")
        else:
            logger.info("Stopping: running requests have %g s to end; a second signal stops at once.", self._timeout)
            self._server.stop(self._timeout)


@contextlib.contextmanager
def ended_anyway(code: int, seconds: float = _CLOSING_SECONDS) -> Iterator[None]:
    """Ends the process if what is done meanwhile does not end: a step of the engine may hang in a driver.

    Args:
        code (`int`):
            The exit code then.
        seconds (`float`, defaults to 20):
            How long it may take.
    """

    def give_up() -> None:
        _say(f"the engine's step did not end within {seconds:g} s; the process ends without it")
        os._exit(code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(what: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"hf-paged: {what}\n".encode())


def _leave(number: int, why: str) -> None:
    """Ends the process without waiting for anything, as a thread may be deep in a computation."""
    _say(why)
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(128 + number)
