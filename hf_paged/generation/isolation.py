"""After a step that raised: which of its requests is at fault. No torch."""

from __future__ import annotations

import collections
from collections.abc import Sequence


class Isolation:
    """The requests of a step that raised run again in halves, until those at fault have failed alone.

        a b c d e f g h   raises     the step is taken back
        a b c d           goes well
                e f g h   raises
                e f       goes well
                    g     raises     g fails, and nobody else
                      h   goes well

    An exception that does not come again costs two steps. Whoever is not in the group waits meanwhile.
    """

    def __init__(self) -> None:
        self._groups: collections.deque[frozenset[str]] = collections.deque()

    @property
    def group(self) -> frozenset[str] | None:
        """Returns the requests that run now, by id; `None` while nobody is under suspicion."""
        return self._groups[0] if self._groups else None

    def split(self, request_ids: Sequence[str]) -> None:
        """A step with several requests has raised: they are to run again, apart.

        Args:
            request_ids (`Sequence[str]`):
                Its requests, in schedule order.
        """
        self.settle()
        middle = len(request_ids) // 2
        self._groups.extendleft((frozenset(request_ids[middle:]), frozenset(request_ids[:middle])))

    def settle(self) -> None:
        """The group has run, or there is nothing left of it to run."""
        if self._groups:
            self._groups.popleft()

    def clear(self) -> None:
        """Suspects nobody."""
        self._groups.clear()
