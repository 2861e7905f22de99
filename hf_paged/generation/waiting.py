"""Who waits, and for what: for a seat, for something being made, or for a sibling to compute the prompt. No torch."""

from __future__ import annotations

from collections.abc import Collection

from .policies import SchedulingPolicy
from .request import Request, RequestGroup


class WaitingRoom:
    """The requests that do not run.

        in the policy's queue   may be admitted
        not ready               something they need (a grammar) is still being made; they hold up nobody
        unforked                branches of a prompt that the group's first live branch computes, or waits to compute
        parked                  lost their blocks while their session was choosing tokens; they hold up nobody

    Args:
        policy (`SchedulingPolicy`):
            Keeps the queue.
    """

    def __init__(self, policy: SchedulingPolicy):
        self.queue = policy
        self._not_ready: dict[str, Request] = {}
        self._unforked: dict[str, list[Request]] = {}  # by group
        self._parked: dict[str, Request] = {}

    def __len__(self) -> int:
        """The requests that wait for admission; the branches of a group count once until they have forked."""
        return len(self.queue) + len(self._not_ready) + len(self._parked)

    def add(self, branches: list[Request]) -> None:
        """The first branch waits for admission, the others for the end of its prompt.

        Args:
            branches (`list[Request]`):
                The live branches of a group that has not forked.
        """
        first, *others = branches
        self.keep_unforked(first, others)
        if all(request.ready for request in branches):
            self.queue.push(first)
        else:
            self._not_ready[first.request_id] = first

    def requeue(self, request: Request) -> None:
        """A request has lost its blocks, or did not get them: it waits again, once somebody waits for it.

        Args:
            request (`Request`):
                The request.
        """
        if request.session is None or request.session.awaits_logits:
            self.queue.push(request)
        else:
            self._parked[request.request_id] = request

    def unpark(self, request: Request) -> None:
        """A request's session goes on.

        Args:
            request (`Request`):
                The request, wherever it is.
        """
        if self._parked.pop(request.request_id, None) is not None:
            self.queue.push(request)

    def set_ready(self, request: Request) -> None:
        """What a request was waiting for is there. Its group is queued once all branches are ready.

        Args:
            request (`Request`):
                The request.
        """
        request.ready = True
        for first in group_of(request).requests:
            if self._not_ready.pop(first.request_id, None) is not None:
                self.add([first, *self.take_unforked(first)])

    def num_seats(self, requests: Collection[Request]) -> int:
        """Returns the seats that requests take, with those kept for the branches that will fork from them.

        Args:
            requests (`Collection[Request]`):
                Running requests, or those to be admitted.
        """
        if not self._unforked:
            return len(requests)
        return sum(1 + len(self._unforked.get(group_of(request).group_id, ())) for request in requests)

    def take_unforked(self, request: Request) -> list[Request]:
        """Takes out the branches that wait for a request's prompt.

        Args:
            request (`Request`):
                The branch that computes it.
        """
        return self._unforked.pop(group_of(request).group_id, []) if self._unforked else []

    def keep_unforked(self, request: Request, branches: list[Request]) -> None:
        """Lets branches wait for the end of a request's prompt.

        Args:
            request (`Request`):
                The branch that computes it.
            branches (`list[Request]`):
                The others; may be empty.
        """
        if branches:
            self._unforked[group_of(request).group_id] = branches

    def leave(self, request: Request) -> None:
        """A request has ended. If it was to compute its group's prompt, the next branch does.

        Args:
            request (`Request`):
                The request, wherever it was.
        """
        self.queue.remove(request)
        self._not_ready.pop(request.request_id, None)
        self._parked.pop(request.request_id, None)
        unforked = self.take_unforked(request)
        remaining = [branch for branch in unforked if branch is not request]
        if len(remaining) < len(unforked):
            self.keep_unforked(request, remaining)
        elif remaining:
            self.add(remaining)


def group_of(request: Request) -> RequestGroup:
    """Returns a request's group.

    Args:
        request (`Request`):
            A request that was added.
    """
    assert request.group is not None, f"{request.request_id} belongs to no RequestGroup"
    return request.group
