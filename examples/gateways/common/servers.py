"""Two of our servers on the loopback, with small queues, and what they say of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.serving.servers import Command, RunningServer, Server, our_command, serving

MODEL_NAME = "demo"
NUM_SERVERS = 2
QUEUE_LIMIT = 8
MAX_NUM_SEQS = 4
# Longer than gateways keep idle connections: none sends a request into one that the server is about to close.
KEEP_ALIVE_SECONDS = 180
FLAGS = {
    "--served-model-name": MODEL_NAME,
    "--max-num-queued-reqs": QUEUE_LIMIT,
    "--max-num-seqs": MAX_NUM_SEQS,
    "--max-model-len": 2048,
    "--timeout-keep-alive": KEEP_ALIVE_SECONDS,
    "--shutdown-timeout": 10,
}
PATIENCE = 180.0
START_TIMEOUT = 300.0
# What a gateway has started may take so long to end after it.
END_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Engines:
    """What the servers count, added up.

    Args:
        servers (`Sequence[Server]`):
            Ours, without the gateway.
    """

    servers: Sequence[Server]

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric over all servers.

        Args:
            name (`str`):
                Without its prefix.
            labels (`str`):
                Only series that carry these.
        """
        return sum(
            value
            for server in self.servers
            for series, value in server.metrics().items()
            if series.split("{")[0] == f"hf_paged:{name}"
            and all(f'{label}="{wanted}"' in series for label, wanted in labels.items())
        )

    @property
    def aborted(self) -> float:
        """Returns how many requests have ended because their clients left."""
        return self.total("request_success_total", finished_reason="abort")

    @property
    def busy(self) -> float:
        """Returns how many requests run or wait."""
        return self.total("num_requests_running") + self.total("num_requests_waiting")

    @property
    def blocks_in_use(self) -> float:
        """Returns the share of blocks that requests hold, of all servers together."""
        return self.total("kv_cache_usage_perc")

    async def wait_until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Waits for something to be true and returns whether it came true.

        Args:
            condition (`Callable[[], bool]`):
                What to wait for; it may ask the servers.
            seconds (`float`, defaults to 180.0):
                How long at most.
        """
        end = time.monotonic() + seconds
        while not await asyncio.to_thread(condition):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.1)
        return True

    async def wait_until_idle(self, seconds: float = PATIENCE) -> bool:
        """Waits until no request runs or waits and all blocks are free; returns whether it came so.

        Args:
            seconds (`float`, defaults to 180.0):
                How long at most.
        """
        return await self.wait_until(lambda: self.busy == 0 and self.blocks_in_use == 0, seconds)


@contextlib.contextmanager
def our_servers(model: Path, logs: Path) -> Iterator[list[RunningServer]]:
    """Starts the servers and ends them.

    Args:
        model (`Path`):
            A Transformers folder.
        logs (`Path`):
            Folder for what they print.
    """
    flags = [str(word) for pair in FLAGS.items() for word in pair]
    command = our_command(model, *flags, threads=max(1, len(os.sched_getaffinity(0)) // NUM_SERVERS))
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving(command, logs / f"server-{n}.log")) for n in range(1, NUM_SERVERS + 1)]


@contextlib.contextmanager
def gateway_process(command: Command, logs: Path) -> Iterator[RunningServer]:
    """Starts a gateway, waits until it answers, and ends it with all that it started.

    Args:
        command (`Command`):
            How.
        logs (`Path`):
            Folder for what it prints.

    Raises:
        RuntimeError: If it does not start, or if processes outlived it; those are killed.
    """
    family: set[psutil.Process] = set()
    with serving(command, logs / "gateway.log", timeout=START_TIMEOUT) as running:
        try:
            yield running
        finally:
            family |= _family(running.process.pid)
    _, left = psutil.wait_procs(family, timeout=END_SECONDS)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if left:
        raise RuntimeError(f"{command.title} left {len(left)} processes running, which were killed: {left}")


def _family(pid: int) -> set[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return {parent, *parent.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def without_ours(**further: str) -> dict[str, str]:
    """Returns this process's environment variables without those that are meant for hf_paged and its Python.

    Args:
        further (`str`):
            Variables to add.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_PAGED_", "PYTHON"))}
    return own | further
