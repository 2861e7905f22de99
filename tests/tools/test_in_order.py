"""Many things at the same time, with results in order, whatever ends them."""

from __future__ import annotations

import asyncio

import pytest

from hf_paged.tools.in_order import InOrder


def test_results_come_in_the_order_of_what_was_asked():
    async def do(number: int) -> int:
        await asyncio.sleep(0.001 * (3 - number % 4))
        return number

    taken: list[int] = []
    asyncio.run(InOrder(do, 3).run(range(20), taken.append))
    assert taken == list(range(20))


def test_a_taker_that_fails_gets_no_more_and_what_runs_is_cancelled():
    ended: list[int] = []
    taken: list[int] = []

    async def all_of_it() -> None:
        all_begun = asyncio.Event()
        with pytest.raises(OSError, match="no room"):
            await InOrder(lambda number: do(number, all_begun), 5).run(range(100), take)
        assert len(asyncio.all_tasks()) == 1  # this one

    async def do(number: int, all_begun: asyncio.Event) -> int:
        try:
            if number == 4:
                all_begun.set()
            await all_begun.wait()
            if number >= 3:
                await asyncio.Event().wait()
            return number
        finally:
            ended.append(number)

    def take(number: int) -> None:
        taken.append(number)
        raise OSError("no room")

    asyncio.run(all_of_it())
    assert taken == [0] and set(ended) >= set(range(5))


def test_results_that_are_there_are_handed_on_when_it_is_cancelled():
    async def do(number: int) -> int:
        if number in (0, 3):
            await asyncio.Event().wait()
        return number

    async def work() -> list[int]:
        taken: list[int] = []
        in_order = InOrder(do, 4)
        running = asyncio.create_task(in_order.run(range(4), taken.append))
        while len(in_order._running) != 2:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return taken

    assert asyncio.run(work()) == [1, 2]
