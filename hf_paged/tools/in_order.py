"""Many things done at the same time, a bounded number of them, with results in the order of what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_WAITING_RESULTS = 8  # times as many results as are in flight may wait for one before them


class InOrder(Generic[T, R]):
    """Does something for each of a stream of things, of any length, in the memory that those in flight need.

    Args:
        do (`Callable[[T], Awaitable[R]]`):
            Does it for one. What it raises ends the whole.
        max_in_flight (`int`):
            At the same time.
    """

    def __init__(self, do: Callable[[T], Awaitable[R]], max_in_flight: int):
        self._do = do
        self._slots = asyncio.Semaphore(max_in_flight)
        self._in_order: asyncio.Queue[asyncio.Task[R] | None] = asyncio.Queue(_WAITING_RESULTS * max_in_flight)
        self._running: set[asyncio.Task[R]] = set()

    async def run(self, things: Iterable[T] | AsyncIterator[T], take: Callable[[R], Any]) -> None:
        """Does all. If it is cancelled, results that are there are still handed on.

        Args:
            things (`Iterable` or `AsyncIterator`):
                Read as there is room.
            take (`Callable[[R], Any]`):
                Gets each result. What it raises ends the whole, and it gets no more.
        """
        reader = asyncio.create_task(self._read(things))
        can_take = True

        def hand_on(result: R) -> None:
            nonlocal can_take
            try:
                take(result)
            except Exception:
                can_take = False
                raise

        try:
            while (task := await self._in_order.get()) is not None:
                hand_on(await task)
            await reader
        finally:
            reader.cancel()
            try:
                while can_take and not self._in_order.empty():
                    task = self._in_order.get_nowait()
                    if task is not None and task.done() and not task.cancelled() and task.exception() is None:
                        hand_on(task.result())
            finally:
                for task in self._running:
                    task.cancel()
                await asyncio.gather(reader, *self._running, return_exceptions=True)

    async def _read(self, things: Iterable[T] | AsyncIterator[T]) -> None:
        try:
            if isinstance(things, AsyncIterator):
                async for thing in things:
                    await self._begin(thing)
            else:
                for thing in things:
                    await self._begin(thing)
        finally:
            await self._in_order.put(None)

    async def _begin(self, thing: T) -> None:
        await self._slots.acquire()
        task: asyncio.Task[R] = asyncio.ensure_future(self._do(thing))
        self._running.add(task)
        task.add_done_callback(self._has_ended)
        await self._in_order.put(task)

    def _has_ended(self, task: asyncio.Task[R]) -> None:
        self._running.discard(task)
        self._slots.release()
