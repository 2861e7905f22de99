"""What the sampler remembers of requests from step to step, whatever batches they are in."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from ..request import Request

T = TypeVar("T")
_TAIL = 16


class Memory:
    """Things kept for requests under names; another request of the same id starts with nothing."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Request, dict[Hashable, Any]]] = {}

    def recall(self, request: Request, name: Hashable, make: Callable[[Request], T]) -> T:
        """Returns what is kept of a request under a name, and makes it if there is nothing.

        Args:
            request (`Request`):
                Which request.
            name (`Hashable`):
                What is asked for.
            make (`Callable[[Request], T]`):
                Makes it.
        """
        owner, kept = self._kept.get(request.request_id, (None, {}))
        if owner is not request:
            kept = {}
            self._kept[request.request_id] = (request, kept)
        if name not in kept:
            kept[name] = make(request)
        return kept[name]

    def forget(self, request_id: str) -> None:
        """Drops all that is kept of a request; unknown ids are fine.

        Args:
            request_id (`str`):
                Which request.
        """
        self._kept.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._kept)


class TokenReader:
    """Takes in the tokens of one request, each once.

    Its tokens may grow, and its last ones may be taken back (the last 16 that were seen are compared, and all is read
    again if they differ).

    Args:
        request (`Request`):
            The request.
    """

    def __init__(self, request: Request):
        self.request = request
        self._start()

    def _start(self) -> None:
        self._num_seen = 0
        self._tail: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Forgets all tokens; part of construction too."""
        raise NotImplementedError

    def read(self, index: int) -> None:
        """Takes in a token.

        Args:
            index (`int`):
                Its place among the request's tokens.
        """
        raise NotImplementedError

    def update(self) -> None:
        """Takes in the tokens that the request got since the last time."""
        token_ids = self.request.token_ids
        if token_ids[max(self._num_seen - len(self._tail), 0) : self._num_seen] != self._tail:
            self._start()
        for index in range(self._num_seen, len(token_ids)):
            self.read(index)
        self._num_seen = len(token_ids)
        self._tail = token_ids[-_TAIL:]
