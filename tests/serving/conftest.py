"""Served tiny models. One server for each module; those with flags of their own are made by `make_client` and others.

client          starlette's TestClient around the application: no socket
make_client     the same with settings of one's own
server          a thread of this process with a real socket: streams, clients that leave, broken HTTP
make_server     the same with settings of one's own
start_process   a real process: flags, signals, exit codes
observed        no server: a module's one engine whose requests are watched, with metrics of each test's own
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.observed import Observed
from tests.serving.servers import ServerProcess, ServerThread, ended, make_tiny_service
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401


@contextlib.contextmanager
def _client(checkpoint: Path, **settings: Any) -> Iterator[Any]:
    from starlette.testclient import TestClient

    from hf_paged.serving.app import make_app

    service = make_tiny_service(checkpoint, **settings)
    try:
        with TestClient(make_app(service), raise_server_exceptions=False) as client:
            yield client
    finally:
        service.close()


@pytest.fixture(scope="module")
def client(tiny_checkpoint: Path) -> Iterator[Any]:  # noqa: F811
    """A client of an application with default settings; `client.app.state.service` is its service."""
    with _client(tiny_checkpoint) as client:
        yield client


@pytest.fixture(scope="module")
def make_client(tiny_checkpoint: Path) -> Iterator[Callable[..., Any]]:  # noqa: F811
    """Makes clients of applications with other settings."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(_client(tiny_checkpoint, **settings))


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Iterator[ServerThread]:  # noqa: F811
    """A server on a socket with default settings."""
    with ServerThread(make_tiny_service(tiny_checkpoint)) as server:
        yield server


@pytest.fixture(scope="module")
def make_server(tiny_checkpoint: Path) -> Iterator[Callable[..., ServerThread]]:  # noqa: F811
    """Makes servers on sockets with other settings."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(ServerThread(make_tiny_service(tiny_checkpoint, **settings)))


@pytest.fixture
def start_process(tiny_checkpoint: Path) -> Iterator[Callable[..., ServerProcess]]:  # noqa: F811
    """Starts processes that serve the tiny checkpoint as "tiny" on a free port, with further flags."""
    processes: list[ServerProcess] = []

    def start(*flags: str, **options: Any) -> ServerProcess:
        process = ServerProcess(
            *("--model", str(tiny_checkpoint), "--served-model-name", "tiny", "--port", "0", "--num-blocks", "256"),
            *flags,
            **options,
        )
        processes.append(process)
        return process

    with ended(processes):
        yield start


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    observed = Observed()
    yield observed
    observed.engine.close()


@pytest.fixture
def observed(shared: Observed) -> Observed:
    shared.start_over()
    return shared
