"""What is asked of a gateway with our servers behind it: steady load, a spike, steady load; leaving; mistakes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from .load import ANSWERED, LEFT, LOST, REFUSED, Client, Outcome
from .servers import NUM_SERVERS, QUEUE_LIMIT, Engines

STEADY_WORKERS = 4
PROBE_SECONDS = 0.5
LEAVING = 6


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is asked.

    Args:
        steady (`int`):
            Requests of a steady load.
        spike (`int`):
            Requests that come at once.
        longest_blackout (`float`):
            Seconds after the spike in which an answer is waited for.
        long_answer (`int`):
            Tokens of an answer that a client leaves.
    """

    steady: int = 32
    spike: int = 10 * QUEUE_LIMIT * NUM_SERVERS
    longest_blackout: float = 90.0
    long_answer: int = 300


QUICK = Size(steady=12, longest_blackout=60.0, long_answer=200)


@dataclasses.dataclass
class Phase:
    """Some requests and what became of them.

    Args:
        name (`str`):
            For the table.
        outcomes (`list[Outcome]`):
            One for each request.
    """

    name: str
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)

    def count(self, kind: str) -> int:
        """Returns how many ended so.

        Args:
            kind (`str`):
                answered, refused, lost or left.
        """
        return sum(outcome.kind == kind for outcome in self.outcomes)

    @property
    def latencies(self) -> list[float]:
        """Returns seconds of those that were answered, the shortest first."""
        return sorted(outcome.seconds for outcome in self.outcomes if outcome.kind == ANSWERED)


@dataclasses.dataclass
class Findings:
    """Everything that was found.

    Args:
        phases (`list[Phase]`):
            Loads, in their order.
        seconds_to_first_success (`float`, *optional*):
            From the end of the spike to the first answer; `None` if none came.
        refused_before (`int`):
            Requests refused after the spike before that answer.
        left_streams (`tuple[int, int]`):
            Clients that left streams, and how many of them the engines noticed before the answers' end.
        left_answers (`tuple[int, int]`):
            The same of clients that left before an answer in one piece.
        blocks_free (`bool`):
            Whether all blocks were free after they had left.
        mistakes (`dict[str, int]`):
            Status by what was wrong.
        after_mistakes (`Phase`):
            Requests without fault, right after the mistakes.
    """

    phases: list[Phase] = dataclasses.field(default_factory=list)
    seconds_to_first_success: float | None = None
    refused_before: int = 0
    left_streams: tuple[int, int] = (0, 0)
    left_answers: tuple[int, int] = (0, 0)
    blocks_free: bool = False
    mistakes: dict[str, int] = dataclasses.field(default_factory=dict)
    after_mistakes: Phase = dataclasses.field(default_factory=lambda: Phase("after mistakes"))

    def problems(self) -> list[str]:
        """Returns what must not be: with any of these a gateway is not fit for service."""
        found = []
        everything = [*self.phases, self.after_mistakes]
        for phase in everything:
            if phase.count(LOST):
                detail = next(outcome.detail for outcome in phase.outcomes if outcome.kind == LOST)
                found.append(f"{phase.name}: {phase.count(LOST)} lost, such as: {detail}")
        for phase in everything:
            if phase.name != SPIKE and phase.count(REFUSED):
                detail = next(outcome.detail for outcome in phase.outcomes if outcome.kind == REFUSED)
                found.append(f"{phase.name}: {phase.count(REFUSED)} refused by idle servers, such as: {detail}")
        if self.seconds_to_first_success is None:
            found.append("blackout: no answer after the spike")
        elif self.refused_before:
            until = f"{self.seconds_to_first_success:.1f} s"
            found.append(f"blackout: {self.refused_before} requests refused after the spike, for {until}")
        found += [
            f"a mistake was answered with {status}: {what}"
            for what, status in self.mistakes.items()
            if not 400 <= status < 500
        ]
        if not self.blocks_free:
            found.append("blocks were still held after all clients had left")
        return found


BEFORE, SPIKE, AFTER = "before", "spike", "after"


async def steady(client: Client, name: str, count: int, workers: int = STEADY_WORKERS) -> Phase:
    """Sends requests, a few at a time, every second one as a stream.

    Args:
        client (`Client`):
            Of the gateway.
        name (`str`):
            Of the phase.
        count (`int`):
            How many.
        workers (`int`, defaults to 4):
            How many at a time.
    """
    phase, numbers = Phase(name), iter(range(count))

    async def work() -> None:
        for number in numbers:
            phase.outcomes.append(await client.ask(stream=number % 2 == 1))

    await asyncio.gather(*(work() for _ in range(workers)))
    return phase


async def spike(client: Client, count: int) -> Phase:
    """Sends requests all at once, every second one as a stream.

    Args:
        client (`Client`):
            Of the gateway.
        count (`int`):
            How many.
    """
    return Phase(SPIKE, list(await asyncio.gather(*(client.ask(stream=number % 2 == 1) for number in range(count)))))


async def first_success(client: Client, longest: float, pause: float = PROBE_SECONDS) -> tuple[float | None, int]:
    """Asks until there is an answer; returns seconds until then (`None`: it never came), and how many failed before.

    Args:
        client (`Client`):
            Of the gateway.
        longest (`float`):
            Seconds after which to give up.
        pause (`float`, defaults to 0.5):
            Seconds between tries.
    """
    begin, failed = time.perf_counter(), 0
    while time.perf_counter() - begin < longest:
        if (await client.ask()).kind == ANSWERED:
            return time.perf_counter() - begin, failed
        failed += 1
        await asyncio.sleep(pause)
    return None, failed


async def leave_streams(client: Client, engines: Engines, tokens: int, count: int = LEAVING) -> tuple[int, int]:
    """Lets clients leave their streams; returns how many left, and how many of these the engines noticed.

    Args:
        client (`Client`):
            Of the gateway.
        engines (`Engines`):
            Behind it.
        tokens (`int`):
            Of the answers that nobody waits for.
        count (`int`, defaults to 6):
            How many.
    """
    before = await asyncio.to_thread(lambda: engines.aborted)
    outcomes = await asyncio.gather(*(client.leave_stream(tokens) for _ in range(count)))
    return sum(outcome.kind == LEFT for outcome in outcomes), await _noticed(engines, before)


async def leave_answers(client: Client, engines: Engines, tokens: int, count: int = LEAVING) -> tuple[int, int]:
    """Lets clients leave before their answer, once an engine has taken their requests; returns the same.

    Args:
        client (`Client`):
            Of the gateway.
        engines (`Engines`):
            Behind it.
        tokens (`int`):
            Of the answers that nobody waits for.
        count (`int`, defaults to 6):
            How many.
    """
    before, leave = await asyncio.to_thread(lambda: engines.aborted), asyncio.Event()
    clients = [asyncio.create_task(client.leave_whole(tokens, leave)) for _ in range(count)]
    await engines.wait_until(lambda: engines.busy >= count)
    leave.set()
    outcomes = await asyncio.gather(*clients)
    return sum(outcome.kind == LEFT for outcome in outcomes), await _noticed(engines, before)


async def _noticed(engines: Engines, before: float) -> int:
    """An engine that noticed nothing ends its answers, all the same: then it is idle, too."""
    await engines.wait_until_idle()
    return round(await asyncio.to_thread(lambda: engines.aborted) - before)


def mistakes(client: Client) -> Mapping[str, bytes]:
    """Returns wrong requests by what is wrong with them.

    Args:
        client (`Client`):
            Makes right ones.
    """
    no_schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": 7}}
    changed: dict[str, dict[str, Any]] = {
        "temperature -1": {"temperature": -1},
        "temperature -1 in a stream": {"temperature": -1, "stream": True},
        "max_tokens -1": {"max_tokens": -1},
        "no messages": {"messages": []},
        "a prompt beyond the context": {"messages": [{"role": "user", "content": "so " * 4000}]},
        "a schema that is none": {"response_format": no_schema},
        "an unknown model": {"model": "no-such-model"},
    }
    bodies = {what: json.dumps(client.body() | fields).encode() for what, fields in changed.items()}
    return {**bodies, "a body that is not JSON": b'{"model": '}


async def check(client: Client, engines: Engines, size: Size, log: Callable[[str], None]) -> Findings:
    """Does all of it, one after the other.

    Args:
        client (`Client`):
            Of the gateway.
        engines (`Engines`):
            Behind it.
        size (`Size`):
            How much.
        log (`Callable[[str], None]`):
            Told what is being done.
    """
    found = Findings()
    log("warming up")
    await steady(client, "warm-up", 2 * STEADY_WORKERS)
    log(f"steady load: {size.steady} requests, {STEADY_WORKERS} at a time")
    found.phases.append(await steady(client, BEFORE, size.steady))
    log(f"a spike: {size.spike} requests at once")
    found.phases.append(await spike(client, size.spike))
    await engines.wait_until_idle()
    found.seconds_to_first_success, found.refused_before = await first_success(client, size.longest_blackout)
    log(f"steady load again: {size.steady} requests")
    found.phases.append(await steady(client, AFTER, size.steady))
    log(f"{LEAVING} clients leave their streams, {LEAVING} others before their answer")
    found.left_streams = await leave_streams(client, engines, size.long_answer)
    found.left_answers = await leave_answers(client, engines, size.long_answer)
    found.blocks_free = await engines.wait_until_idle()
    log("mistakes")
    for what, body in mistakes(client).items():
        found.mistakes[what] = await client.post(body)
    found.after_mistakes = await steady(client, "after mistakes", 2 * STEADY_WORKERS)
    return found
