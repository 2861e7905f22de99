"""vllm-router (PyPI `vllm-router`, written in Rust) in front of two of our servers.

python examples/gateways/vllm_router/run.py
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.serving.servers import Command, free_port
from examples.gateways.common.environments import python_environment
from examples.gateways.common.program import Front, Gateway, Setup, end
from examples.gateways.common.servers import gateway_process, without_ours

NAME, VERSION = "vllm_router", "0.1.17"
# Its circuit breaker takes a 503 for a failure of the server, and after ten leaves it alone for a minute; its retries
# make a spike longer for everybody.
RECOMMENDED = ("--disable-circuit-breaker", "--disable-retries", "--policy", "round_robin")


def prepare(log: Callable[[str], None]) -> Path:
    """Installs it, once."""
    return python_environment(NAME, (f"vllm-router=={VERSION}",), log)


@contextlib.contextmanager
def start(setup: Setup) -> Iterator[Front]:
    """Starts it and waits until it is ready."""
    words = [str(setup.environment / "vllm-router"), "--host", "127.0.0.1"]
    words += ["--worker-urls", *(server.url for server in setup.servers)]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    words += ["--worker-startup-check-interval", "1"]
    command = Command("vllm-router", (*words, *(RECOMMENDED if setup.recommended else ())), without_ours())
    with gateway_process(command, setup.folder) as router:
        yield Front(router.url)


if __name__ == "__main__":
    end(Gateway(f"vllm-router {VERSION}", prepare, start))
