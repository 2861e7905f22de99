"""Who runs next, and who gives way when blocks run out. No torch.

A policy is one order over requests. The waiting request that comes first in it runs next; the running request that
comes last in it is preempted. Using one order for both is what makes every request finish: the first of all never
gives way, so it ends, and then the next one is first.

A preempted request returns to its place in the same order: before everybody who arrived after it (and, under
"priority", is not more urgent).
"""

from __future__ import annotations

import abc
import heapq
from collections.abc import Iterable

from ..registry import Registry
from .request import Request

SCHEDULING_POLICIES: Registry[type[SchedulingPolicy]] = Registry("scheduling policy")


class SchedulingPolicy(abc.ABC):
    """The waiting requests in the policy's order. To add a policy, say in `order` what the order is."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple, int, Request]] = []
        self._serials: dict[str, int] = {}  # of the entries that count; others are skipped when they come up
        self._next_serial = 0

    @abc.abstractmethod
    def order(self, request: Request) -> tuple:
        """Returns a key: the request with the smaller one runs earlier and is preempted later.

        Args:
            request (`Request`):
                A request that was added (its `arrival_number` is set). The key must not change while it waits.
        """

    def __len__(self) -> int:
        return len(self._serials)

    def push(self, request: Request) -> None:
        """Adds a waiting request, new or preempted, at its place. O(log n).

        Args:
            request (`Request`):
                A request that is not waiting here yet.
        """
        assert request.request_id not in self._serials, f"{request.request_id} is waiting already"
        self._next_serial += 1
        self._serials[request.request_id] = self._next_serial
        heapq.heappush(self._heap, (self.order(request), self._next_serial, request))

    def peek(self) -> Request | None:
        """Returns the request that runs next, or None. O(1) unless requests were removed."""
        while self._heap:
            _, serial, request = self._heap[0]
            if self._serials.get(request.request_id) == serial:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Takes out the request that runs next. O(log n)."""
        request = self.peek()
        assert request is not None, "nobody is waiting; peek first"
        heapq.heappop(self._heap)
        del self._serials[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Takes out any request; nothing happens if it is not waiting. O(1) on average.

        Args:
            request (`Request`):
                The request.
        """
        if self._serials.pop(request.request_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._serials) + 64:  # do not keep what was aborted for ever
            self._heap = [entry for entry in self._heap if self._serials.get(entry[2].request_id) == entry[1]]
            heapq.heapify(self._heap)

    def victim(self, running: Iterable[Request]) -> Request:
        """Returns the running request that gives its blocks back.

        Args:
            running (`Iterable[Request]`):
                At least one request.
        """
        return max(running, key=self.order)


@SCHEDULING_POLICIES.register("fcfs")
class FCFSPolicy(SchedulingPolicy):
    """First come, first served: by arrival."""

    def order(self, request: Request) -> tuple:
        return (request.arrival_number,)


@SCHEDULING_POLICIES.register("priority")
class PriorityPolicy(SchedulingPolicy):
    """The lower priority value first; by arrival among equals."""

    def order(self, request: Request) -> tuple:
        return (request.priority, request.arrival_number)
