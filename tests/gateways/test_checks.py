"""Blackouts, aborts, mistakes: what makes a gateway unfit, and what does not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from examples.gateways.common.checks import (
    AFTER,
    BEFORE,
    SPIKE,
    Findings,
    Phase,
    Size,
    check,
    first_success,
    leave_answers,
    leave_streams,
)
from examples.gateways.common.load import Outcome
from examples.gateways.common.report import make_report, percentile
from examples.gateways.common.servers import Engines
from tests.gateways.fake_gateway import NEVER, FakeServer, Script, Unfinished, full, gateway, http, right, stream

LONG = 50  # tokens of answers that clients leave
WARM_UP, STEADY, IN_SPIKE = 8, 4, 10


def phase(name: str, **kinds: int) -> Phase:
    return Phase(name, [Outcome(kind, "503: said", 1.0) for kind, count in kinds.items() for _ in range(count)])


def good() -> Findings:
    """What is found at a gateway without fault."""
    phases = [phase(BEFORE, answered=4), phase(SPIKE, answered=2, refused=8), phase(AFTER, answered=4)]
    return Findings(phases, 0.1, 0, (2, 2), (2, 2), True, {"a mistake": 400}, phase("after mistakes", answered=1))


def test_refusals_in_the_spike_and_clients_that_nobody_missed_are_no_problem():
    assert good().problems() == []
    assert dataclasses.replace(good(), left_answers=(2, 0)).problems() == []


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "lost in the spike": ({"phases": [phase(SPIKE, answered=2, lost=1)]}, "spike: 1 lost"),
    "refused before": ({"phases": [phase(BEFORE, answered=2, refused=3)]}, "before: 3 refused by idle servers"),
    "refused after": ({"phases": [phase(AFTER, answered=2, refused=1)]}, "after: 1 refused by idle servers"),
    "a blackout": ({"refused_before": 30, "seconds_to_first_success": 15.2}, "30 requests refused after the spike"),
    "no end of it": ({"seconds_to_first_success": None}, "no answer after the spike"),
    "blocks": ({"blocks_free": False}, "blocks were still held"),
    "a 5xx for a mistake": ({"mistakes": {"max_tokens -1": 500}}, "answered with 500: max_tokens -1"),
    "a mistake that passes": ({"mistakes": {"max_tokens -1": 200}}, "answered with 200: max_tokens -1"),
    "mistakes that hurt": ({"after_mistakes": phase("after mistakes", refused=1)}, "after mistakes: 1 refused"),
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_a_problem_is_named(what):
    changed, expected = PROBLEMS[what]
    (problem,) = dataclasses.replace(good(), **changed).problems()
    assert expected in problem


def after(refusals: int) -> Script:
    return lambda number, body: full() if number < refusals else right(number, body)


@pytest.mark.parametrize("refusals", [0, 3])
def test_the_first_answer_after_a_spike_is_waited_for(refusals):
    async def work() -> tuple[float | None, int]:
        async with gateway(after(refusals)) as client:
            return await first_success(client, 30, pause=0.01)

    seconds, failed = asyncio.run(work())
    assert seconds is not None and failed == refusals


def test_a_blackout_without_end_is_given_up():
    async def work() -> tuple[float | None, int]:
        async with gateway(after(10**6)) as client:
            return await first_success(client, 0.2, pause=0.01)

    seconds, failed = asyncio.run(work())
    assert seconds is None and failed >= 1


def test_metrics_of_all_servers_are_added_and_other_reasons_and_aliases_are_not():
    engines = Engines([FakeServer(running=2, aborted=3), FakeServer(running=1, aborted=4, usage=0.5)])
    assert (engines.busy, engines.aborted, engines.blocks_in_use) == (3, 7, 0.5)


def test_waiting_for_idle_servers_ends_when_they_are_and_when_it_takes_too_long():
    busy, server = FakeServer(running=1), FakeServer()
    assert not asyncio.run(Engines([busy]).wait_until_idle(0.05))
    assert asyncio.run(Engines([server]).wait_until_idle(0.05))


@pytest.mark.parametrize("is_told", [True, False])
def test_clients_that_leave_are_counted_as_the_engine_counts_them(is_told):
    beginning = Unfinished(stream().partition(b"data: [DONE]")[0])

    async def work() -> tuple[tuple[int, int], tuple[int, int]]:
        server = FakeServer(aborted=7, is_told=is_told)
        engines = Engines([server])

        def script(number: int, body: dict[str, Any]) -> bytes:
            return beginning if body.get("stream") else NEVER

        async with gateway(script, server) as client:
            return await leave_streams(client, engines, 100, count=3), await leave_answers(
                client, engines, 100, count=2
            )

    assert asyncio.run(work()) == (((3, 3), (2, 2)) if is_told else ((3, 0), (2, 0)))


def is_right(body: dict[str, Any]) -> bool:
    """What a server would make of it."""
    fields = {"model", "messages", "max_tokens", "temperature", "ignore_eos", "stream", "stream_options"}
    return (
        bool(body.get("messages"))
        and set(body) <= fields
        and (body["model"], body["temperature"]) == ("demo", 0)
        and body["max_tokens"] > 0
        and len(body["messages"][0]["content"]) < 1000
    )


def everything(status_of_mistakes: int) -> Findings:
    """What is found at a gateway that refuses half of a spike, as full queues do."""
    beginning = Unfinished(stream().partition(b"data: [DONE]")[0])

    def script(number: int, body: dict[str, Any]) -> bytes:
        if not is_right(body):
            return http(status_of_mistakes, b"{}")
        if body["max_tokens"] == LONG:
            return beginning if body.get("stream") else NEVER
        if 0 <= number - WARM_UP - STEADY < IN_SPIKE and number % 2:
            return full(503, "Retry-After: 1")
        return right(number, body)

    async def work() -> Findings:
        server = FakeServer()
        async with gateway(script, server) as client:
            return await check(client, Engines([server]), Size(STEADY, IN_SPIKE, 30, LONG), lambda text: None)

    return asyncio.run(work())


def test_a_good_gateway_passes_every_check_and_its_table_says_so():
    found = everything(400)
    report = make_report("A gateway", found, "two cores")
    rows = {row["system"]: row for row in report.rows}
    assert {name: (row["sent"], row["answered"], row["refused"], row["lost"]) for name, row in rows.items()} == {
        BEFORE: (4, 4, 0, 0),
        SPIKE: (10, 5, 5, 0),
        AFTER: (4, 4, 0, 0),
        "after mistakes": (8, 8, 0, 0),
    }
    assert rows[SPIKE]["with_retry_after"] == 5
    assert found.left_streams == found.left_answers == (6, 6)
    assert (found.seconds_to_first_success or 0) > 0 and found.refused_before == 0 and found.blocks_free
    assert len(found.mistakes) == 8 and set(found.mistakes.values()) == {400}
    assert found.problems() == [] and report.notes[-1] == "nothing lost, no blackout"
    assert json.loads(json.dumps(report.to_dict()))["problems"] == []


def test_a_gateway_that_makes_a_5xx_of_mistakes_is_not_fit():
    found = everything(500)
    assert len(found.problems()) == 8 and all("500" in problem for problem in found.problems())
    assert "NOT FIT: see above" in make_report("A gateway", found, "two cores").notes


def test_percentiles_are_values_that_were_measured():
    assert percentile([], 0.5) is None
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.0, 4.0, 4.0]
