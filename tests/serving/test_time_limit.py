"""Code in a worker thread ends when its time is over, and the thread goes on with other work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time

import pytest

from hf_paged.serving.time_limit import Interrupted, TimeLimit


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _work(limit: TimeLimit, seconds: float) -> int:
    with limit:
        _spin(seconds)
    _spin(0.002)
    return threading.get_ident()


def test_what_takes_too_long_is_ended_and_the_thread_lives_on():
    async def run() -> None:
        loop = asyncio.get_running_loop()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for seconds in (30.0, 0.0, 30.0, 0.0):
                limit = TimeLimit(loop, 0.05)
                call = loop.run_in_executor(pool, _work, limit, seconds)
                if seconds:
                    start = time.monotonic()
                    with pytest.raises(Interrupted):
                        await call
                    assert time.monotonic() - start < 20
                else:
                    assert await call
                limit.cancel()

    asyncio.run(run())


def test_an_exception_never_hits_what_the_thread_does_next():
    async def run() -> tuple[int, int]:
        loop, ended, passed = asyncio.get_running_loop(), 0, 0
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for _ in range(150):  # ends of block and time meet
                limit = TimeLimit(loop, 0.003)
                try:
                    await loop.run_in_executor(pool, _work, limit, 0.003)
                    passed += 1
                except Interrupted:
                    ended += 1
                assert await loop.run_in_executor(pool, _spin, 0.001) is None
                limit.cancel()
        return ended, passed

    ended, passed = asyncio.run(run())
    assert ended + passed == 150


def test_the_limit_holds_when_nobody_waits_any_more():
    ended = threading.Event()

    def work(limit: TimeLimit) -> None:
        try:
            _work(limit, 30)
        except Interrupted:
            ended.set()

    async def run() -> None:
        limit = TimeLimit(asyncio.get_running_loop(), 0.2)
        call = asyncio.get_running_loop().run_in_executor(None, work, limit)
        await asyncio.sleep(0.05)
        call.cancel()  # as the client of a template that takes long may leave
        limit.cancel()
        assert await asyncio.to_thread(ended.wait, 20)

    asyncio.run(run())


def test_an_end_that_the_code_swallowed_is_told_all_the_same():
    def stubborn(limit: TimeLimit) -> None:
        with limit:
            try:
                _spin(30)
            except BaseException:
                return

    async def run() -> None:
        limit = TimeLimit(asyncio.get_running_loop(), 0.02)
        with pytest.raises(Interrupted):
            await asyncio.to_thread(stubborn, limit)

    asyncio.run(run())


def test_the_interpreter_is_left_as_it_was():
    async def run() -> None:
        limit = TimeLimit(asyncio.get_running_loop(), 0.02)
        with pytest.raises(Interrupted):
            await asyncio.to_thread(_work, limit, 30)

    asyncio.run(run())
    sys.setprofile(lambda *_: None)  # with a signal left behind, a profiled call never begins
    try:
        _spin(0.01)
    finally:
        sys.setprofile(None)
