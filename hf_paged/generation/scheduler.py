"""What each step computes: every running request catches up with its tokens, within a token budget. No torch.

There is no prefill phase and no decode phase. A request has `num_tokens - num_computed_tokens` tokens to catch up
with; a decoding one is one token behind, a new prompt far behind, a prefix hit starts further ahead, a preempted
request has fallen back to zero. A step gives out its budget in this order:

    1. running requests one token behind        each gets its token; may preempt
    2. running requests further behind          at most a fair share each; may preempt
    3. waiting requests in policy order         only if all their tokens fit beside what the running ones still need
    4. the requests that a fair share held back what is left of the budget

Preempting happens before admitting, and a step that preempted admits nobody, so nobody ever shares blocks with a
request that loses them in the same step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ..cache.block_manager import BlockManager, PrefixHit
from ..errors import InvalidRequestError
from .policies import SchedulingPolicy
from .request import FinishReason, Request, RequestGroup, RequestStatus
from .scheduler_config import SchedulerConfig
from .step import SchedulerOutput
from .step_draft import RunnerView, Share, StepDraft
from .throttle import Throttle
from .waiting import WaitingRoom, group_of

WATERMARK = 100  # one block in so many stays free at an admission, so that the running requests can grow


class Scheduler:
    """Decides what each step computes. The engine calls `schedule`, runs the step and reports how it went.

    Each output of `schedule` with shares must be given back: to `update_from_output`, or to `cancel` if it failed.
    Requests may be added, finished and aborted in between. One step may be scheduled before the last one is given back,
    if `assume` has been told that it is on its way; then each of its requests has one token in flight, of which only
    the runner knows which it is.

    Args:
        config (`SchedulerConfig`):
            Limits of a step.
        block_manager (`BlockManager`):
            The blocks. Nobody else allocates from it.
        policy (`SchedulingPolicy`):
            Who runs next, and who gives way.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager, policy: SchedulingPolicy):
        self.config = config
        self.num_preemptions = 0
        self.num_finished = dict.fromkeys(FinishReason, 0)
        self.requests: dict[str, Request] = {}  # all that have not ended
        self._blocks = block_manager
        self._policy = policy
        self._waiting = WaitingRoom(policy)
        self._running: dict[str, Request] = {}
        self._groups: dict[str, RequestGroup] = {}
        self._runner = RunnerView(block_manager)
        self.focus: frozenset[str] | None = None  # if set, only these requests have a share of the next steps
        self.throttle = Throttle(config.max_num_seqs, config.max_num_batched_tokens)
        self._in_flight: StepDraft | None = None
        self._assumed: StepDraft | None = None  # on its way too: the step before it
        self._last_output = SchedulerOutput(-1, ())
        self._next_step_id = 0
        self._next_arrival_number = 0

    # --- from outside a step -----------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Returns whether any request has not ended."""
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        """Returns the requests waiting to be admitted; a group of branches counts once until it has forked."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Returns the requests that hold blocks."""
        return len(self._running)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Returns whether the K/V of so many tokens fit into the pool when nobody else runs.

        Args:
            num_tokens (`int`):
                Tokens whose K/V are stored: prompt and output without the last output token.
        """
        return self._blocks.blocks_needed(num_tokens) <= self._blocks.num_blocks

    def add(self, group: RequestGroup) -> None:
        """Queues the branches of a prompt. They are admitted together.

        Args:
            group (`RequestGroup`):
                The branches; one for most requests.

        Raises:
            PromptTooLongError: If it can never run to its end, whatever else ends.
            InvalidRequestError: If an id is in use, or there are more branches than requests may run.
        """
        used = [request.request_id for request in group.requests if request.request_id in self.requests]
        if used or group.group_id in self._groups:
            raise InvalidRequestError(f"The id {(used or [group.group_id])[0]!r} is in use; choose another.")
        self.config.check(group, self._blocks)
        self._groups[group.group_id] = group
        for request in group.requests:
            request.arrival_number = self._next_arrival_number
            self._next_arrival_number += 1
            self.requests[request.request_id] = request
        self._waiting.add(group.requests)

    def extend(self, request: Request, token_ids: Sequence[int]) -> None:
        """Appends tokens that a request's session has chosen. Outside of a step that the request takes part in.

        Args:
            request (`Request`):
                A request with a session.
            token_ids (`Sequence[int]`):
                The tokens.
        """
        request.token_ids.extend(token_ids)
        self._waiting.unpark(request)
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = time.perf_counter()

    def reorder(self, requests: Sequence[Request], parents: Sequence[Request]) -> None:
        """Makes each request a copy of another: its tokens, and by reference its blocks.

        Args:
            requests (`Sequence[Request]`):
                The requests of a session, none of them in a step.
            parents (`Sequence[Request]`):
                For each of them the request that it continues; may be itself.
        """
        moved = [(request, parent) for request, parent in zip(requests, parents, strict=True) if request is not parent]
        states = [
            (list(p.token_ids), p.num_prompt_tokens, list(p.block_hashes), p.num_computed_tokens) for _, p in moved
        ]
        running = {request.request_id for request in requests if request.request_id in self._running}
        self._blocks.reassign([(r, p) for r, p in moved if {r.request_id, p.request_id} <= running])
        for (request, parent), (token_ids, num_prompt, hashes, num_computed) in zip(moved, states, strict=True):
            request.token_ids, request.num_prompt_tokens, request.block_hashes = token_ids, num_prompt, hashes
            if request.request_id not in running:
                continue  # it was preempted, and will be computed anew from its tokens
            if parent.request_id in running:
                request.num_computed_tokens = num_computed
                self._runner.tell_again(request)
            else:
                self._take_blocks(request)

    def set_ready(self, request: Request) -> None:
        """What a request was waiting for is there. Requests that are not ready are passed by.

        Args:
            request (`Request`):
                A request that was added with `ready = False`.
        """
        self._waiting.set_ready(request)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Ends a request. Safe at any time; nothing happens if it has ended, or was never added.

        Its blocks are free at once, or when the step that uses them is over.

        Args:
            request (`Request`):
                The request.
            reason (`FinishReason`):
                Why.
            stop_reason (`int` or `str`, *optional*):
                The stop token or stop string that ended it.
            error (`BaseException`, *optional*):
                What went wrong.
        """
        if self.requests.get(request.request_id) is not request:
            return
        del self.requests[request.request_id]
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        request.stop_reason, request.error = stop_reason, error
        request.metrics.finished_time = time.perf_counter()
        self.num_finished[reason] += 1
        self._running.pop(request.request_id, None)
        self._runner.forget(request)
        self._waiting.leave(request)
        if group_of(request).is_finished:
            self._groups.pop(group_of(request).group_id, None)
        if self._in_flight is not None and self._in_flight.uses(request):
            self._in_flight.ended.append(request)
        else:
            self._blocks.free(request)

    def abort(self, any_id: str) -> list[Request]:
        """Ends a request, or all branches of a group.

        Args:
            any_id (`str`):
                A `group_id` or `request_id`; a group's if it is both. Unknown and ended ones are no error.

        Returns:
            `list[Request]`: The requests that this ended.
        """
        group, request = self._groups.get(any_id), self.requests.get(any_id)
        requests = list(group.requests) if group else [request] if request else []
        ended = [request for request in requests if not request.is_finished]
        for request in ended:
            self.finish(request, FinishReason.ABORT)
        return ended

    # --- a step ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decides what the next step computes. An empty one says nothing and need not be given back.

        Returns:
            `SchedulerOutput`: The step.
        """
        assert self._in_flight is None, "the last step is still in flight: update_from_output or cancel comes first"
        step = StepDraft(self._next_step_id, self.throttle.num_tokens)
        self._next_step_id += 1
        self._schedule_decodes(step)
        fair_share = self._fair_share(step)
        self._schedule_prefills(step, fair_share)
        if not step.preempted:
            self._admit_waiting(step, fair_share)
        if not step.shares and self._assumed is None and self.focus is None:
            self._resolve_stall(step, fair_share)
        self._hand_out_rest(step)
        for share in step.shares.values():
            if share.catches_up:
                share.sampling = (share.request, *self._fork(share.request))
        self._in_flight = step if step.shares else None
        self._last_output = self._runner.output(step)
        return self._last_output

    def assume(self, output: SchedulerOutput) -> None:
        """The step is on its way: moves its requests forward already, so that the next one can be scheduled.

        `update_from_output` appends the tokens when they are known. What runs on the device runs in order, so the
        blocks that this frees may be taken by the next step.

        Args:
            output (`SchedulerOutput`):
                The step; `update_from_output` has seen the one before.
        """
        assert self._assumed is None, "at most one step runs ahead of the tokens"
        step = self._assumed = self._land(output)
        self._move_forward(step)
        for request in step.sampling:
            if request.is_finished:
                continue
            request.num_in_flight_tokens = 1
            if self._is_full(request, request.num_output_tokens + 1, request.num_tokens + 1):
                # It ends whatever its last token is, of which nothing will be computed.
                del self._running[request.request_id]
                self._runner.forget(request)
                self._blocks.free(request)

    def update_from_output(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> list[Request]:
        """The step has run: moves its requests forward, appends their tokens and ends those that are done.

        Args:
            output (`SchedulerOutput`):
                The step.
            sampled (`Mapping[str, int]`):
                A token for each id in the shares' `sample_ids`; requests that have ended, or whose session chooses
                their tokens, need none.

        Returns:
            `list[Request]`: The requests that got a token, in schedule order.
        """
        step, self._assumed = self._assumed, None
        if step is None:
            step = self._land(output)
            self._move_forward(step)
        assert step.step_id == output.step_id, f"step {step.step_id} is older than step {output.step_id}"
        self.throttle.relax()
        now = time.perf_counter()
        updated = [request for request in step.sampling if not request.is_finished and request.session is None]
        for request in updated:
            assert request.request_id in sampled, f"{request.request_id} got no token; finish it if it failed"
            self._append(request, sampled[request.request_id], now)
        return updated

    def recover(self, launched: SchedulerOutput | None = None) -> bool:
        """Cancels a step that will never be given back, because whoever ran it was interrupted.

        Args:
            launched (`SchedulerOutput`, *optional*):
                The newest step that is on its way and will be given back.

        Returns:
            `bool`: Whether there was one.
        """
        if self._in_flight is None or self._last_output is launched:
            return False
        self.cancel(self._last_output)
        return True

    def cancel(self, output: SchedulerOutput) -> list[Request]:
        """The step did not run to its end: the requests are as before, and will be scheduled again.

        Who was admitted or forked in it goes back to waiting, since the blocks that it shares may be empty.

        Args:
            output (`SchedulerOutput`):
                The step. After `assume` there is no way back: all of its requests have to be ended.

        Returns:
            `list[Request]`: The requests of the step that have not ended.
        """
        if self._assumed is not None and self._assumed.step_id == output.step_id:
            step, self._assumed = self._assumed, None
            for share in step.shares.values():
                self._blocks.disown(share.allocation)
            return step.requests
        step = self._land(output)
        for share in step.shares.values():
            self._undo_fork(share)
            self._blocks.rollback(share.request)
            self._runner.forget(share.request)
            if share.admitted:
                self._undo_admission(share.request)
        self._runner.remind(output.removed_ids)
        self._free_ended(step)
        return step.requests

    def take_back(self, output: SchedulerOutput) -> bool:
        """The step raised: cancels it, if its requests can run again apart from each other.

        Args:
            output (`SchedulerOutput`):
                The step.

        Returns:
            `bool`: Whether they can; if not, nothing happened.
        """
        requests = [self.requests.get(share.request_id) for share in output.scheduled]  # some may have ended meanwhile
        # The rows of a session wait for each other.
        if self._assumed is not None or any(request and request.session for request in requests):
            return False
        self.cancel(output)
        return True

    def back_off(self, output: SchedulerOutput) -> bool:
        """The step ran out of memory: cancels it and preempts so many that only half as much runs for a while.

        Args:
            output (`SchedulerOutput`):
                The step.

        Returns:
            `bool`: Whether there was anything left to give up; if not, nothing happened and the step has failed.
        """
        if self._assumed is not None or not self.throttle.shrink(len(output.scheduled), output.num_scheduled_tokens):
            return False
        self.cancel(output)
        # The rows of a session wait for each other, so they run together or not at all.
        running = [request for request in self._running.values() if request.session is None]
        while len(running) > self.throttle.num_seqs:
            victim = self._policy.victim(running)
            running.remove(victim)
            self._take_blocks(victim)
        return True

    # --- putting a step together -------------------------------------------------------------------------------

    def _schedule_decodes(self, step: StepDraft) -> None:
        for request in tuple(self._running.values()):
            if self.focus is not None and request.request_id not in self.focus:
                continue
            num_pending = request.num_pending_tokens
            if num_pending > 1:
                step.partial[request.request_id] = request
            elif num_pending and step.budget > 0 and request.request_id in self._running:
                self._give(step, request, 1)

    def _schedule_prefills(self, step: StepDraft, fair_share: int) -> None:
        for request in tuple(step.partial.values()):
            if step.budget > 0 and request.request_id in self._running:
                self._blocks.adopt_prefix(request)
                self._give(step, request, self._chunk(request, 0, self._limit(step, request, 0, fair_share)))

    def _admit_waiting(self, step: StepDraft, fair_share: int) -> None:
        max_partial = self.config.max_partial_prefills
        while step.budget > 0 and (request := self._policy.peek()) is not None:
            if request.num_in_flight_tokens or not self._has_seats(request):
                return
            if self.focus is not None and request.request_id not in self.focus:
                return
            hit = self._blocks.find_prefix(request)
            num_tokens = self._first_chunk(step, request, hit.num_tokens, fair_share)
            partial = hit.num_tokens + num_tokens < request.num_tokens
            if num_tokens == 0 or (partial and step.num_left_partial >= max_partial):
                return
            if not self._blocks.can_admit(request, hit, self._num_reserved_blocks(step, request)):
                return
            self._start(self._policy.pop(), hit)
            allocation = self._blocks.allocate_slots(request, num_tokens)
            assert allocation is not None, "can_admit has counted the blocks"
            step.shares[request.request_id] = Share(request, num_tokens, allocation, admitted=True)
            step.budget -= num_tokens
            if partial:
                step.partial[request.request_id] = request

    def _hand_out_rest(self, step: StepDraft) -> None:
        for request in step.partial.values():
            share = step.shares.get(request.request_id)
            if share is None or step.budget == 0:
                continue
            num_tokens = self._chunk(request, 0, share.num_tokens + step.budget)
            if num_tokens == share.num_tokens:
                continue
            allocation = self._blocks.allocate_slots(request, num_tokens)
            if allocation is not None:  # nobody is preempted for a rest
                step.budget -= num_tokens - share.num_tokens
                share.num_tokens, share.allocation = num_tokens, allocation

    # --- how much, and whether -----------------------------------------------------------------------------------

    def _fair_share(self, step: StepDraft) -> int:
        """Tokens that a prefill gets while others compete for the budget; a lone one gets all."""
        competing = len(step.partial) + len(self._policy)
        return max(1, -(-step.budget // max(1, min(competing, self.config.max_partial_prefills))))

    def _chunk(self, request: Request, num_cached_tokens: int, limit: int) -> int:
        num_tokens = request.num_tokens - request.num_computed_tokens - num_cached_tokens
        return min(num_tokens, limit, self.config.prompt_logits_chunk if request.needs_prompt_logits else limit)

    def _first_chunk(self, step: StepDraft, request: Request, num_cached_tokens: int, fair_share: int) -> int:
        num_tokens = request.num_tokens - num_cached_tokens
        whole = num_tokens <= self.throttle.num_tokens and not request.needs_prompt_logits
        if whole and not self.config.enable_chunked_prefill:
            return num_tokens if num_tokens <= step.budget else 0
        return self._chunk(request, num_cached_tokens, self._limit(step, request, num_cached_tokens, fair_share))

    def _limit(self, step: StepDraft, request: Request, num_cached_tokens: int, fair_share: int) -> int:
        """What a prefill may take before the others had theirs: a short one everything, a long one its share."""
        num_tokens = request.num_tokens - request.num_computed_tokens - num_cached_tokens
        is_short = num_tokens <= self.throttle.num_tokens // 2
        return min(num_tokens if is_short else fair_share, step.budget)

    def _has_seats(self, request: Request) -> bool:
        """Whether a new request and its branches may run beside the others. Whoever would be alone always may."""
        num_running = self._waiting.num_seats(self._running.values())
        is_bound = num_running > 0 and request.session is None
        limit = self.throttle.num_seqs if is_bound else self.config.max_num_seqs
        return num_running + self._waiting.num_seats([request]) <= limit

    def _num_reserved_blocks(self, step: StepDraft, request: Request) -> int:
        """Free blocks that a new request must leave: what started prompts still need, and some room to grow."""
        if not self._running:
            return 0
        needed = self._blocks.blocks_needed
        started = sum(needed(r.num_tokens) - self._blocks.num_blocks_of(r) for r in step.partial.values())
        # The rows of a session wait for each other, so none of them may wait for room that the others hold.
        return started + (0 if request.session is not None else -(-self._blocks.num_blocks // WATERMARK))

    def _resolve_stall(self, step: StepDraft, fair_share: int) -> None:
        """Makes room for the next request if all running ones wait for rows of their sessions that do not run.

        A session that has all its rows will go on by itself, unless its caller takes very long.
        """
        if step.preempted:
            self._admit_waiting(step, fair_share)  # nobody is in the step who could share lost blocks
        while not step.shares and (head := self._policy.peek()) is not None:
            running = list(self._running.values())
            if not running or any(r.session is None or r.session.is_choosing for r in running):
                return
            others = [request for request in running if request.session is not head.session]
            # Rows of one session fit together, if they share what they can; those of now may hold copies of it.
            for victim in [self._policy.victim(others)] if others else running:
                self._preempt(step, victim)
            self._admit_waiting(step, fair_share)

    # --- moving requests between states --------------------------------------------------------------------------

    def _start(self, request: Request, hit: PrefixHit) -> None:
        self._blocks.admit(request, hit)
        self._running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        if request.metrics.num_preemptions == 0:
            request.metrics.num_cached_tokens = hit.num_tokens
            request.metrics.first_scheduled_time = time.perf_counter()

    def _give(self, step: StepDraft, request: Request, num_tokens: int) -> None:
        """Adds a running request to the step; preempts until there are blocks, in the end the request itself."""
        while (allocation := self._blocks.allocate_slots(request, num_tokens)) is None:
            victim = self._policy.victim(self._running.values())
            self._preempt(step, victim)
            if victim is request:
                return
        step.shares[request.request_id] = Share(request, num_tokens, allocation)
        step.budget -= num_tokens

    def _preempt(self, step: StepDraft, request: Request) -> None:
        share = step.shares.pop(request.request_id, None)
        if share is not None:
            step.budget += share.num_tokens
        self._blocks.rollback(request)
        step.partial.pop(request.request_id, None)
        step.preempted = True
        self._take_blocks(request)

    def _take_blocks(self, request: Request) -> None:
        self.num_preemptions += 1
        request.metrics.num_preemptions += 1
        self._blocks.free(request)
        self._runner.forget(request)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        del self._running[request.request_id]
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED if request.metrics.num_preemptions else RequestStatus.WAITING
        self._waiting.requeue(request)

    def _undo_admission(self, request: Request) -> None:
        self._blocks.undo_admission(request)
        if not request.is_finished:
            self._requeue(request)

    def _fork(self, request: Request) -> list[Request]:
        """The prompt will be done: the other branches continue from here, on the same blocks."""
        children = self._waiting.take_unforked(request)
        for child in children:
            self._blocks.fork(request, child)
            self._running[child.request_id] = child
            child.status = RequestStatus.RUNNING
            child.metrics.num_cached_tokens = request.metrics.num_cached_tokens
            child.metrics.first_scheduled_time = request.metrics.first_scheduled_time
        return children

    def _undo_fork(self, share: Share) -> None:
        children = [child for child in share.sampling[1:] if not child.is_finished]
        for child in children:
            self._blocks.free(child)
            del self._running[child.request_id]
            child.status = RequestStatus.WAITING
        if children and share.request.is_finished:
            self._waiting.add(children)
        else:
            self._waiting.keep_unforked(share.request, children)

    def _move_forward(self, step: StepDraft) -> None:
        for share in step.shares.values():
            self._blocks.commit(share.request)
            share.request.num_computed_tokens += share.num_tokens
            for request in share.sampling:
                request.num_computed_tokens = share.request.num_computed_tokens
        self._free_ended(step)

    def _is_full(self, request: Request, num_output_tokens: int, num_tokens: int) -> bool:
        return num_output_tokens >= request.max_tokens or num_tokens >= self.config.max_model_len

    def _append(self, request: Request, token_id: int, now: float) -> None:
        request.token_ids.append(token_id)
        request.num_in_flight_tokens = 0
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        if token_id in request.stop_token_ids and request.num_output_tokens >= request.params.min_tokens:
            asked = token_id in (request.params.stop_token_ids or ())  # the end-of-sequence token is no stop reason
            self.finish(request, FinishReason.STOP, stop_reason=token_id if asked else None)
        elif self._is_full(request, request.num_output_tokens, request.num_tokens):
            self.finish(request, FinishReason.LENGTH)

    def _land(self, output: SchedulerOutput) -> StepDraft:
        if not output.scheduled:
            return StepDraft(output.step_id, 0)
        step, self._in_flight = self._in_flight, None
        assert step is not None and step.step_id == output.step_id, f"step {output.step_id} is not in flight"
        return step

    def _free_ended(self, step: StepDraft) -> None:
        for request in step.ended:
            self._blocks.free(request)
