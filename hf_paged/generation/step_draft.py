"""A step while it is put together, and how it is told to a runner that remembers the steps before. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..cache.block_manager import Allocation, BlockManager
from .request import Request
from .step import ScheduledRequest, SchedulerOutput


@dataclasses.dataclass(slots=True, eq=False)
class Share:
    """One request's part of a step.

    Args:
        request (`Request`):
            Whose.
        num_tokens (`int`):
            Tokens that it computes.
        allocation (`Allocation`):
            What that changes in its blocks.
        admitted (`bool`):
            Whether it starts to run in this step.
        sampling (`tuple[Request, ...]`):
            Who gets a token: the request if it catches up, then the branches that fork from it.
    """

    request: Request
    num_tokens: int
    allocation: Allocation
    admitted: bool = False
    sampling: tuple[Request, ...] = ()

    @property
    def catches_up(self) -> bool:
        """Returns whether all tokens of the request are computed after this step."""
        return self.num_tokens == self.request.num_pending_tokens


@dataclasses.dataclass(slots=True, eq=False)
class StepDraft:
    """A step while it is put together, and until it has run.

    Args:
        step_id (`int`):
            Its number.
        budget (`int`):
            Tokens that it may still give out.
        shares (`dict[str, Share]`):
            Its shares by request, in schedule order.
        partial (`dict[str, Request]`):
            Running requests more than a token behind; a share may bring them to their end nevertheless.
        preempted (`bool`):
            Whether anybody lost blocks for it.
        ended (`list[Request]`):
            Requests of the step that ended while it was in flight.
    """

    step_id: int
    budget: int
    shares: dict[str, Share] = dataclasses.field(default_factory=dict)
    partial: dict[str, Request] = dataclasses.field(default_factory=dict)
    preempted: bool = False
    ended: list[Request] = dataclasses.field(default_factory=list)

    @property
    def num_left_partial(self) -> int:
        """Returns how many requests this step leaves behind, as it stands."""
        shares = (self.shares.get(request_id) for request_id in self.partial)
        return sum(share is None or not share.catches_up for share in shares)

    @property
    def requests(self) -> list[Request]:
        """Returns who takes part and has not ended: with their branches, in schedule and branch order."""
        everyone = [(share.request, *share.sampling[1:]) for share in self.shares.values()]
        return [request for branches in everyone for request in branches if not request.is_finished]

    @property
    def sampling(self) -> list[Request]:
        """Returns who gets a token, in schedule and branch order."""
        return [request for share in self.shares.values() for request in share.sampling]

    def uses(self, request: Request) -> bool:
        """Returns whether a request takes part.

        Args:
            request (`Request`):
                The request.
        """
        return request.request_id in self.shares or any(request in share.sampling for share in self.shares.values())


class RunnerView:
    """What the runner has been told of each request, so that a step tells only what is new.

    Args:
        block_manager (`BlockManager`):
            Knows the block tables.
    """

    def __init__(self, block_manager: BlockManager):
        self._blocks = block_manager
        self._told: dict[str, tuple[int, int]] = {}  # tokens and blocks
        self._removed: dict[str, None] = {}

    def forget(self, request: Request) -> None:
        """Has the runner told to forget a request, if it may know it.

        Args:
            request (`Request`):
                The request.
        """
        if self._told.pop(request.request_id, None) is not None:
            self._removed[request.request_id] = None

    def tell_again(self, request: Request) -> None:
        """Has the runner told everything about a request anew: its tokens and blocks are others now.

        Args:
            request (`Request`):
                The request.
        """
        if request.request_id in self._told:
            self._told[request.request_id] = (0, 0)

    def remind(self, removed_ids: Iterable[str]) -> None:
        """Repeats what a step said that the runner may not have heard.

        Args:
            removed_ids (`Iterable[str]`):
                That step's `removed_ids`.
        """
        self._removed.update(dict.fromkeys(removed_ids))

    def output(self, step: StepDraft) -> SchedulerOutput:
        """Returns a step as the runner shall hear it. An empty one says nothing; who may be forgotten waits.

        Args:
            step (`StepDraft`):
                The step.
        """
        if not step.shares:
            return SchedulerOutput(step.step_id, ())
        shares, groups = step.shares.values(), range(self._blocks.num_groups)
        cleared = [share.allocation.cleared_blocks for share in shares if share.allocation.cleared_blocks]
        copies = [share.allocation.block_copies for share in shares if share.allocation.block_copies]
        removed, self._removed = tuple(self._removed), {}
        return SchedulerOutput(
            step_id=step.step_id,
            scheduled=tuple([self._tell(share) for share in shares]),
            cleared_blocks=tuple(tuple(block_ids[group] for block_ids in cleared) for group in groups),
            block_copies=tuple(tuple(pairs[group] for pairs in copies) for group in groups),
            removed_ids=removed,
        )

    def _tell(self, share: Share) -> ScheduledRequest:
        request = share.request
        block_ids = self._blocks.block_table(request)
        # A copy-on-write changes the middle of a table, so the runner is told all of it.
        told = (0, 0) if share.allocation.block_copies else self._told.get(request.request_id, (0, 0))
        num_tokens, num_blocks = told
        self._told[request.request_id] = (len(request.token_ids), len(block_ids[0]))
        return ScheduledRequest(
            request_id=request.request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_scheduled_tokens=share.num_tokens,
            new_token_ids=tuple(request.token_ids[num_tokens:]),
            new_block_ids=tuple([tuple(group[num_blocks:]) for group in block_ids]),
            is_new=num_tokens == 0,
            sample_ids=tuple([sampling.request_id for sampling in share.sampling]),
            prompt_logits=request.needs_prompt_logits,
            hidden_states=request.extras.hidden_states,
            attentions=request.extras.attentions,
            embeds=request.extras.prompt_embeds is not None,
        )
