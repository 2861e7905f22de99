"""Which of several waiting threads runs the steps."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator

from ..errors import EngineError

_IDLE_WAIT = 0.05
_LONGEST_WAIT = 1.0


class Turns:
    """Threads that wait for something take turns at the work that brings it about: one works, the others sleep.

        thread A   |works works works done|
        thread B   |sleeps .............  |works works done|

    Args:
        on_turn_end (`Callable[[], None]`):
            Called after each piece of work, under the lock, however the work ended.
    """

    def __init__(self, on_turn_end: Callable[[], None]):
        # Taken directly, and not through the condition, whose methods are Python code in which Ctrl-C could strike just
        # after the lock was taken.
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)  # to wait and to notify
        self._on_turn_end = on_turn_end
        self._worker: int | None = None
        self._pausing: list[int] = []  # the threads that keep everybody from working
        _all_turns.add(self)

    def run_until(self, done: Callable[[], bool], work: Callable[[], bool]) -> None:
        """Works, or sleeps while another thread works, until a condition holds.

        Args:
            done (`Callable[[], bool]`):
                The condition.
            work (`Callable[[], bool]`):
                One piece of work; returns whether there was anything to do.

        Raises:
            EngineError: If the calling thread is at work already, and would wait for itself.
        """
        while True:
            if self._is_working_here():  # outside of the `try`: the turn belongs to the work that called this
                if done():
                    return
                raise self._own_work_error()
            worked = at_work = False
            try:
                with self.mutex:
                    self.wait_for_turn(done)
                    if done():
                        return
                    at_work = True
                    self._worker = threading.get_ident()
                worked = work()
            finally:
                at_work = False  # noqa: F841 - read by `_is_working_here`, from the frame
                # Wherever Ctrl-C struck, a turn that was taken is given back, first of all by one plain assignment.
                if self._worker == threading.get_ident():
                    self._worker = None
                    with self.mutex:
                        self._on_turn_end()
                        self.lock.notify_all()
            if not worked and not done():
                with self.mutex:
                    self.lock.wait(_IDLE_WAIT)

    def wait_for_turn(self, done: Callable[[], bool] = lambda: False) -> None:
        """Sleeps while another thread works. The caller holds the lock.

        Args:
            done (`Callable[[], bool]`):
                Ends the sleep too.

        Raises:
            EngineError: If the calling thread is at work already, and would wait for itself.
        """
        while (self._worker is not None or self._pausing) and not done():
            if self.is_paused_by_me() or self._is_working_here():
                raise self._own_work_error()
            if self._worker is None and not self._pausing:
                return
            # The time limit only matters if a thread was interrupted before it could wake the others.
            self.lock.wait(_LONGEST_WAIT)

    def _own_work_error(self) -> EngineError:
        return EngineError(
            "This was called from within a step of the engine (a callback, or a hook of the model) or a pause, whose "
            "end it would have to wait for. Do it afterwards, or in another thread."
        )

    def check_outside(self, code: types.CodeType, owner: object) -> None:
        """Refuses a call from within itself, which shows in the stack.

        Args:
            code (`types.CodeType`):
                Of the method that called this.
            owner (`object`):
                Its `self`.

        Raises:
            EngineError: If the method is under way already, in this thread.
        """
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code is code and frame.f_locals.get("self") is owner:
                raise self._own_work_error()
            frame = frame.f_back  # type: ignore[assignment]

    def _is_working_here(self) -> bool:
        """Returns whether the calling thread is the one that works, and forgets a turn that Ctrl-C kept from its end.

        An interrupt at the first line of a `finally` leaves the turn taken; that work is over shows in the stack.
        """
        if self._worker != threading.get_ident():
            return False
        frame, code = sys._getframe(1), Turns.run_until.__code__
        while frame is not None:
            if frame.f_code is code and frame.f_locals.get("self") is self and frame.f_locals.get("at_work"):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        self._worker = None
        return False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps everybody from working meanwhile. Several threads may do so at a time; the last one lets work go on.

        Raises:
            EngineError: If the calling thread is at work already, and would wait for itself.
        """
        with self.mutex:
            self._pausing.append(threading.get_ident())
            try:
                while self._worker is not None:
                    if self.is_mine():
                        raise EngineError("A step of the engine cannot pause the engine: it would wait for itself.")
                    self.lock.wait(_LONGEST_WAIT)
            except BaseException:
                self._end_pause()
                raise
        try:
            yield
        finally:
            with self.mutex:
                self._end_pause()

    def _end_pause(self) -> None:
        self._pausing.remove(threading.get_ident())
        self.lock.notify_all()

    def is_mine(self) -> bool:
        """Returns whether the calling thread is the one that works: whether this is called from within a step."""
        return self._worker == threading.get_ident() and self._is_working_here()

    def is_paused_by_me(self) -> bool:
        """Returns whether the calling thread is inside `paused`."""
        return threading.get_ident() in self._pausing

    def notify(self) -> None:
        """Makes every sleeping thread look again at what it waits for."""
        with self.mutex:
            self.lock.notify_all()


_all_turns: weakref.WeakSet[Turns] = weakref.WeakSet()


def _forget_other_threads() -> None:
    """A forked process has none of the threads that held a lock or were at work, so they will never let go."""
    for turns in _all_turns:
        turns.mutex = threading.RLock()
        turns.lock, turns._worker, turns._pausing = threading.Condition(turns.mutex), None, []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
