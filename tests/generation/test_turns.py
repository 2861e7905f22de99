"""Waiting threads take turns at the work: one at a time, nobody is forgotten, whatever happens."""

from __future__ import annotations

import threading
import time

import pytest

from hf_paged import EngineError
from hf_paged.generation.turns import Turns


def in_threads(*calls) -> list:
    results: list = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:  # handed to the test
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a thread waits for ever"
    return results


def test_one_thread_works_at_a_time_and_all_get_what_they_wait_for():
    done, working, most = 0, 0, 0
    workers: set[int] = set()

    def work() -> bool:
        nonlocal done, working, most
        working += 1
        most = max(most, working)
        workers.add(threading.get_ident())
        time.sleep(0.001)
        done += 1
        working -= 1
        return True

    turns = Turns(lambda: None)
    in_threads(*[lambda n=n: turns.run_until(lambda: done >= n, work) for n in (5, 10, 15, 20)])
    assert done == 20 and most == 1 and workers


def test_work_that_raises_passes_the_turn_on():
    done, ended = 0, []

    def work() -> bool:
        nonlocal done
        done += 1
        if done == 3:
            raise LookupError
        return True

    turns = Turns(lambda: ended.append(turns.is_mine()))
    results = in_threads(*[lambda: turns.run_until(lambda: done >= 10, work)] * 2)
    assert sorted(map(str, map(type, results))) == sorted(map(str, (LookupError, type(None))))
    assert done == 10 and len(ended) == 10 and not any(ended)


def test_nothing_to_do_waits_until_somebody_brings_work():
    queue, done = [], []

    def work() -> bool:
        worked = bool(queue)
        done.extend(queue)
        queue.clear()
        return worked

    def bring() -> None:
        time.sleep(0.05)
        queue.append(1)
        turns.notify()

    turns = Turns(lambda: None)
    in_threads(lambda: turns.run_until(lambda: bool(done), work), bring)
    assert done == [1]


def test_what_is_done_already_needs_no_turn():
    turns = Turns(lambda: pytest.fail("nobody worked"))
    turns.run_until(lambda: True, lambda: pytest.fail("nothing to do"))


def test_waiting_for_a_turn_ends_with_the_work():
    order: list[str] = []
    started = threading.Event()

    def work() -> bool:
        started.set()
        assert turns.is_mine()
        time.sleep(0.05)
        order.append("work")
        return True

    def wait() -> None:
        started.wait(10)
        with turns.lock:
            turns.wait_for_turn()
            order.append("turn")

    turns = Turns(lambda: None)
    in_threads(lambda: turns.run_until(lambda: bool(order), work), wait)
    assert order == ["work", "turn"]


def test_a_pause_keeps_everybody_from_working_until_the_last_one_ends():
    turns, worked = Turns(lambda: None), []

    def work() -> bool:
        worked.append(True)
        return True

    worker = threading.Thread(target=turns.run_until, args=(lambda: bool(worked), work))
    with turns.paused():
        with turns.paused():
            assert turns.is_paused_by_me()
            worker.start()
            worker.join(0.05)
        worker.join(0.05)
        assert worker.is_alive() and not worked
        with pytest.raises(EngineError, match="a pause"):
            turns.run_until(lambda: False, work)
    worker.join(10)
    assert worked == [True] and not turns.is_paused_by_me()


def test_work_cannot_pause_itself():
    turns, seen = Turns(lambda: None), []

    def work() -> bool:
        with pytest.raises(EngineError, match="cannot pause"), turns.paused():
            pass
        seen.append(True)
        return True

    turns.run_until(lambda: bool(seen), work)
    with turns.paused():
        pass


def test_call_from_within_the_work_leaves_the_turn_where_it_is():
    """The refusal once gave the outer turn back, so that others worked at the same time."""
    turns, refused, workers = Turns(lambda: None), [], []

    def work() -> bool:
        for _ in range(3):
            with pytest.raises(EngineError):
                turns.run_until(lambda: False, lambda: True)
            refused.append(turns.is_mine())
        workers.append(threading.get_ident())
        return True

    turns.run_until(lambda: bool(workers), work)
    assert refused == [True] * 3 and not turns.is_mine()


def test_condition_that_holds_already_may_be_waited_for_from_within_the_work():
    turns, done = Turns(lambda: None), []
    turns.run_until(lambda: bool(done), lambda: turns.run_until(lambda: True, lambda: False) or done.append(1) or True)


def test_turn_that_ctrl_c_kept_from_its_end_is_taken_again():
    turns, done = Turns(lambda: None), []
    turns._worker = threading.get_ident()  # as an interrupt at the first line of `finally` leaves it
    turns.run_until(lambda: bool(done), lambda: done.append(1) or True)
    assert done == [1] and not turns.is_mine()
