"""Servers for tests: in a thread of the test's process with a real socket, and as a process of their own."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import torch

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds; a machine may be busy


def make_tiny_service(checkpoint: Path, **settings: Any) -> Any:
    """A service around a tiny random model in float32, called "tiny"."""
    from hf_paged.llm import LLM
    from hf_paged.serving.loading import make_service
    from hf_paged.serving.settings import ServerSettings

    chosen = ServerSettings(**{"model": str(checkpoint), "num_blocks": 256, "disable_log_stats": True, **settings})
    llm = LLM(str(checkpoint), dtype=torch.float32, paged_config=chosen.paged_config(), device="cpu")
    return make_service(llm.model, llm.tokenizer, chosen, chosen.served_model_name or ("tiny",))


class ServerThread:
    """A server with a real socket in a thread of this process: `service` and `app` can be looked into."""

    def __init__(self, service: Any, port: int = 0):
        from hf_paged.serving.app import make_app
        from hf_paged.serving.http_protocol import make_protocol
        from hf_paged.serving.lifecycle import make_server

        self.service = service
        self.app = make_app(service)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one comes after another at a port
        self._socket.bind(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        protocol = make_protocol(service.settings.read_timeout, service.settings.max_body_bytes)
        self.server = make_server(self.app, service, protocol)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> ServerThread:
        self.thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.stop(0)
        self.thread.join(PATIENCE)
        self.service.close()
        self._socket.close()

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client of this server."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def connect(self) -> socket.socket:
        """A plain connection, for requests that no client library makes."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class ServerProcess:
    """`python -m hf_paged.serving.api_server ...`: `url` is known once it is ready."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None):
        variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_PAGED_PORT")}
        variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hf_paged.serving.api_server", *arguments],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._found: queue.Queue[str | None] = queue.Queue()
        for name in self._lines:
            threading.Thread(target=self._read, args=(name,), daemon=True).start()
        self.url = ""

    def _read(self, name: str) -> None:
        for line in getattr(self.process, name):
            self._lines[name].append(line)
            found = re.match(r"Serving .* at (\S+) \(", line)
            if found:
                self._found.put(found[1])
        if name == "stdout":
            self._found.put(None)

    @property
    def stdout(self) -> str:
        return "".join(self._lines["stdout"])

    @property
    def stderr(self) -> str:
        return "".join(self._lines["stderr"])

    def wait_until_ready(self) -> ServerProcess:
        url = self._found.get(timeout=PATIENCE)
        assert url is not None, f"the server did not start: {self.stderr}"
        self.url = url
        return self

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(timeout)
        time.sleep(0.05)  # for the readers to see the last lines
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)


def wait_until(condition: Any, timeout: float = PATIENCE) -> None:
    """Waits for something to be true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


@contextlib.contextmanager
def ended(processes: list[ServerProcess]) -> Iterator[None]:
    """Ends processes, whatever happens."""
    try:
        yield
    finally:
        for process in processes:
            process.end()


def chat(content: str = "Hello", **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
