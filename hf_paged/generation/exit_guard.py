"""Ends threads that run a model before the interpreter ends: one that it kills inside torch takes the process along."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol


class RunsThread(Protocol):
    """Whoever has a daemon thread that runs a model."""

    def end_at_exit(self) -> None:
        """Ends the thread, and waits for that, but not for ever."""


_running: weakref.WeakSet[RunsThread] = weakref.WeakSet()


def guard(owner: RunsThread) -> None:
    """Has a thread ended when the interpreter ends, after all threads that are not daemons. Safe to call twice.

    Args:
        owner (`RunsThread`):
            Whose thread; it is not kept alive.
    """
    _running.add(owner)


@atexit.register
def _end_all() -> None:
    for owner in list(_running):
        with contextlib.suppress(Exception):  # nobody is left to be told, and the others must end too
            owner.end_at_exit()


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_running.clear)
