"""A time limit for Python code in a worker thread: an exception that another thread sends into it."""

from __future__ import annotations

import asyncio
import ctypes
import threading


class Interrupted(BaseException):
    """Raised inside code that takes too long; not an `Exception`, so that nothing in between catches it."""


class TimeLimit:
    """Ends a block of Python code in a worker thread, if it takes too long, with `Interrupted`.

    One long call of a library in C ends first; the exception is raised at the next instruction of Python.

    Args:
        loop (`asyncio.AbstractEventLoop`):
            Of another thread, which looks at the time.
        seconds (`float`):
            From entering the block.

    Example:

    ```python
    limit = TimeLimit(asyncio.get_running_loop(), 5.0)      # in the event loop
    with limit:                                             # in the worker
        work()
    limit.cancel()                                          # in the event loop, whether or not the block has ended
    ```
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float):
        self._loop = loop
        self._seconds = seconds
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._sent = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._loop.call_soon_threadsafe(self._arm)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with self._lock:
            self._thread = None  # nothing is sent from now on
        if self._sent and kind is not Interrupted:
            for _ in range(1_000_000):  # it is on its way, and must not hit what this thread does next
                pass
            raise Interrupted

    def _arm(self) -> None:
        if self._thread is not None:
            self._timer = self._loop.call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        with self._lock:
            if self._thread is not None:
                self._sent = True
                # Taking one back (by sending NULL) leaves the interpreter in a state that slows it down for ever.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(Interrupted))

    def cancel(self) -> None:
        """Stops looking at the time, unless the block still runs: whoever waited for it may have been cancelled."""
        if self._timer is not None and self._thread is None:
            self._timer.cancel()
