"""Whether the manager's thread runs, ends or has died, with the names that Transformers' programs read."""

from __future__ import annotations

import threading


class BackgroundThreadStatus:
    """The state of the manager's thread.

    `fatal_error` is the exception that ended it, or `None`. A step that fails is not fatal: its requests fail with the
    cause, and the thread goes on.
    """

    DONT_STOP = 0
    FLUSH_AND_STOP = 1
    HARD_STOP = 2
    STOPPED = 3

    def __init__(self) -> None:
        self.fatal_error: BaseException | None = None
        self._lock = threading.Lock()
        self._status = self.DONT_STOP

    @property
    def local_status(self) -> int:
        """Returns one of the constants above; between starts it only grows."""
        return self._status

    @property
    def tp_status(self) -> int:
        """Returns the same: one process has no others to agree with."""
        return self._status

    def clear(self) -> None:
        """Forgets everything, before a start."""
        with self._lock:
            self._status, self.fatal_error = self.DONT_STOP, None

    def request_stop(self, status: int) -> None:
        """Asks the thread to end.

        Args:
            status (`int`):
                `FLUSH_AND_STOP` or `HARD_STOP`.
        """
        with self._lock:
            self._status = max(self._status, status)

    def record_fatal_error(self, error: BaseException) -> None:
        """Keeps the exception that ended the thread; the first one counts.

        Args:
            error (`BaseException`):
                The exception.
        """
        with self._lock:
            self.fatal_error = self.fatal_error or error

    def mark_as_stopped(self) -> None:
        """Says that the thread has ended."""
        with self._lock:
            self._status = self.STOPPED

    def can_accept_new_requests(self) -> str | None:
        """Returns why no request is taken now, or `None` if one is."""
        if self.fatal_error is not None:
            return f"the manager's thread died: {self.fatal_error}"
        return None if self._status == self.DONT_STOP else "the manager is stopping, or has stopped"
