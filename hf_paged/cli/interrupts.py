"""Ctrl-C and SIGTERM at any moment: while Python imports, a model loads, or an answer is made.

The first one raises `KeyboardInterrupt`, so that what is open gets its end: files, requests, child processes. Libraries
turn that into errors of their own, or into nothing at all, when it hits them in the middle of an import. So it is noted
here, and whoever ends the process asks. If that takes too long, or a second signal comes, the process ends at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_PATIENCE = 10.0  # seconds: a step of an engine may take so long
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []
_timers: list[threading.Timer] = []


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def received() -> int | None:
    """Returns the number of the first signal that came, if any did."""
    return _received[0] if _received else None


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handles signals meanwhile; outside of the main thread, and where a signal was ignored, nothing changes."""
    _received.clear()
    before = {}
    if threading.current_thread() is threading.main_thread():
        wanted = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, _receive) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        while _timers:
            _timers.pop().cancel()


@contextlib.contextmanager
def stopping_only() -> Iterator[None]:
    """Ctrl-C is an everyday `KeyboardInterrupt` meanwhile, which the caller lives on after."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not _receive:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _receive(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if len(_received) > 1:
        _leave()
    timer = threading.Timer(_PATIENCE, _leave)
    timer.daemon = True
    _timers.append(timer)
    with contextlib.suppress(RuntimeError):  # at the very end no thread can be started any more
        timer.start()
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _leave() -> None:
    """Ends the process, and what it has started, without waiting for anything."""
    with contextlib.suppress(OSError):
        os.write(2, b"hf-paged: stopped at once\n")
    _kill_children()
    os._exit(128 + _received[0])


def _kill_children() -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
