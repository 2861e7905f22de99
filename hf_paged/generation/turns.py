"""Which of several waiting threads runs the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
        while self._worker is not None and not done():
            if self.is_mine():
                raise EngineError(
                    "This was called from within a step of the engine (a callback, or a hook of the model), which it "
                    "would have to wait for. Do it after the step, or in another thread."
                )
            # The time limit only matters if a thread was interrupted before it could wake the others.
            self.lock.wait(_LONGEST_WAIT)

    def is_mine(self) -> bool:
        """Returns whether the calling thread is the one that works."""
        return self._worker == threading.get_ident()

    def notify(self) -> None:
        """Makes every sleeping thread look again at what it waits for."""
        with self.lock:
            self.lock.notify_all()
