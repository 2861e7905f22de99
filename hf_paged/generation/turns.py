"""Which of several waiting threads runs the steps."""

from __future__ import annotations

import contextlib
import os
import threading
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
        self.lock = threading.Condition()  # reentrant
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
            worked = False
            try:
                with self.lock:
                    self.wait_for_turn(done)
                    if done():
                        return
                    self._worker = threading.get_ident()
                worked = work()
            finally:
                # Wherever Ctrl-C struck, a turn that was taken is given back, first of all by one plain assignment.
                if self._worker == threading.get_ident():
                    self._worker = None
                    with self.lock:
                        self._on_turn_end()
                        self.lock.notify_all()
            if not worked and not done():
                with self.lock:
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
            if self.is_mine() or self.is_paused_by_me():
                raise EngineError(
                    "This was called from within a step of the engine (a callback, or a hook of the model) or a pause, "
                    "whose end it would have to wait for. Do it afterwards, or in another thread."
                )
            # The time limit only matters if a thread was interrupted before it could wake the others.
            self.lock.wait(_LONGEST_WAIT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps everybody from working meanwhile. Several threads may do so at a time; the last one lets work go on.

        Raises:
            EngineError: If the calling thread is at work already, and would wait for itself.
        """
        with self.lock:
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
            with self.lock:
                self._end_pause()

    def _end_pause(self) -> None:
        self._pausing.remove(threading.get_ident())
        self.lock.notify_all()

    def is_mine(self) -> bool:
        """Returns whether the calling thread is the one that works."""
        return self._worker == threading.get_ident()

    def is_paused_by_me(self) -> bool:
        """Returns whether the calling thread is inside `paused`."""
        return threading.get_ident() in self._pausing

    def notify(self) -> None:
        """Makes every sleeping thread look again at what it waits for."""
        with self.lock:
            self.lock.notify_all()


_all_turns: weakref.WeakSet[Turns] = weakref.WeakSet()


def _forget_other_threads() -> None:
    """A forked process has none of the threads that held a lock or were at work, so they will never let go."""
    for turns in _all_turns:
        turns.lock, turns._worker, turns._pausing = threading.Condition(), None, []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
