"""The requests that an engine is running: what a step did to them, who is told, and what is counted."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..cache.block_manager import BlockManager
from ..errors import EngineError, InvalidRequestError, NonFiniteLogitsError, StepFailedError
from .answer import RequestState
from .outputs import SamplerOutput, StepResult
from .plan import EnginePlan
from .policies import SchedulingPolicy
from .request import FinishReason, Request, RequestStatus
from .sampling.criteria import stops
from .sampling.logprobs import prompt_logprobs
from .sampling.sampler import Sampler
from .scheduler import Scheduler, SchedulerConfig
from .stats import EngineStats
from .step import ScheduledRequest, SchedulerOutput
from .structured.grammars import Grammars
from .structured.masks import follow

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class StepTokens:
    """Who gets a token in a step, in schedule and branch order.

    Args:
        requests (`list[Request]`):
            Those whose tokens the sampler chooses.
        rows (`list[int]`):
            For each of them its row of the logits.
        chosen_elsewhere (`list[tuple[Request, int]]`):
            Those whose tokens their sessions choose, with their rows.
    """

    requests: list[Request]
    rows: list[int]
    chosen_elsewhere: list[tuple[Request, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """Gives a request to the scheduler, when it is called.

    Args:
        live (`LiveRequests`):
            The requests.
        state (`RequestState`):
            The new one.
    """

    live: LiveRequests
    state: RequestState

    def __call__(self) -> None:
        self.live.add(self.state)


class LiveRequests:
    """Everything of an engine that needs no model: its requests, their scheduler and blocks, and the statistics.

    Args:
        plan (`EnginePlan`):
            The limits.
        policy (`Callable[[], SchedulingPolicy]`):
            Makes the scheduling policy.
        num_groups (`int`):
            Layer groups.
        sampler (`Sampler`):
            Forgets the requests that have ended.
        grammars (`Grammars`):
            Those of the requests.
    """

    def __init__(
        self,
        plan: EnginePlan,
        policy: Callable[[], SchedulingPolicy],
        num_groups: int,
        sampler: Sampler,
        grammars: Grammars,
    ):
        self.states: dict[str, RequestState] = {}
        self.ids: set[str] = set()  # of the requests and of their branches
        self._host_bound: set[str] = set()  # the requests some of whose tokens only the host can choose, or uses
        self._plan = plan
        self._policy = policy
        self._num_groups = num_groups
        self._sampler = sampler
        self.grammars = grammars
        self._make_scheduler()
        self.reset_stats()

    def _make_scheduler(self) -> None:
        plan = self._plan
        self.block_manager = BlockManager(
            [plan.num_blocks] * self._num_groups, plan.block_size, plan.enable_prefix_caching
        )
        config = SchedulerConfig(
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            enable_chunked_prefill=plan.enable_chunked_prefill,
        )
        self.scheduler = Scheduler(config, self.block_manager, self._policy())

    # ------------------------------------------------------------------ coming and going

    def add(self, state: RequestState) -> None:
        """Gives a request to the scheduler.

        Args:
            state (`RequestState`):
                A request that is in `states` and whose ids are in `ids`.
        """
        if state.group.is_finished:  # all was forgotten while it was being queued
            return
        self.scheduler.add(state.group)
        first = state.group.requests[0]  # the branches are alike
        if first.needs_host_tokens or not self._sampler.can_start([first]):
            self._host_bound.add(state.request_id)
        if not first.ready:
            self.grammars.start(state)

    def take_grammar(self, state: RequestState, grammar: Any, error: BaseException | None) -> None:
        """A request that waited for its grammar may run, or fails.

        Args:
            state (`RequestState`):
                The request; one that has ended meanwhile is fine.
            grammar (`CompiledGrammar`, *optional*):
                The grammar.
            error (`BaseException`, *optional*):
                Why there is none.
        """
        for request in state.group.requests:
            if request.is_finished:
                continue
            if error is not None:
                self._fail(request, error)
            else:
                request.grammar = grammar
                self.scheduler.set_ready(request)
        if error is not None and self.states.get(state.request_id) is state:
            self._settle(state)

    @property
    def needs_host(self) -> bool:
        """Returns whether a request is there that must see each of its tokens before its next step."""
        return bool(self._host_bound)

    def abort(self, request_id: str) -> None:
        """Ends a request; unknown and finished ones are ignored.

        Args:
            request_id (`str`):
                Which.
        """
        state = self.states.get(request_id)
        if state is not None:
            self.scheduler.abort(request_id)
            for request in state.group.requests:  # one that Ctrl-C kept from the scheduler has ended all the same
                if not request.is_finished:
                    request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
            self._settle(state)

    def end(self, states: Iterable[RequestState]) -> None:
        """Ends requests whose caller has had enough.

        Args:
            states (`Iterable[RequestState]`):
                The requests; those that have ended already are fine.
        """
        for state in states:
            for request in state.group.requests:
                self.scheduler.finish(request, FinishReason.STOP)
            self.abort(state.request_id)
            if self.states.get(state.request_id) is not state:
                state.finished = True  # also if Ctrl-C kept it from ever being queued

    def forget_all(self, error: EngineError, reason: FinishReason, arriving: Sequence[RequestState] = ()) -> None:
        """Ends all requests without asking the scheduler, and forgets all blocks. May be done again if interrupted.

        Args:
            error (`EngineError`):
                What those who wait are told.
            reason (`FinishReason`):
                Why the requests ended.
            arriving (`Sequence[RequestState]`, *optional*):
                Requests that the scheduler will be given later; they are spared.
        """
        spared = set(map(id, arriving))
        forgotten = [state for state in list(self.states.values()) if id(state) not in spared]
        for state in forgotten:
            for request in state.group.requests:
                if not request.is_finished:
                    request.error, request.finish_reason = error, reason
                    request.status = RequestStatus.FINISHED
        self.reset()
        for state in forgotten:  # callers' callbacks run: all is in order by now
            try:
                self._settle(state)
            except Exception:
                logger.exception("could not tell the caller of request %r that it ended", state.request_id)

    def reset(self) -> None:
        """Forgets all blocks; nobody may be running. What was counted so far still counts."""
        self._num_preemptions -= self.scheduler.num_preemptions
        self._num_queried -= self.block_manager.num_queried_tokens
        self._num_hits -= self.block_manager.num_hit_tokens
        self._make_scheduler()

    # ------------------------------------------------------------------ a step

    def tokens_of(self, output: SchedulerOutput) -> StepTokens:
        """Returns who gets a token in a step.

        Args:
            output (`SchedulerOutput`):
                The step, when it has just been scheduled.
        """
        everyone = [self.scheduler.requests[i] for share in output.scheduled for i in share.sample_ids]
        pairs = list(zip(everyone, output.sample_rows, strict=True))
        chosen_elsewhere = [pair for pair in pairs if pair[0].session is not None]
        if not chosen_elsewhere:
            return StepTokens(everyone, output.sample_rows, [])
        mine = [pair for pair in pairs if pair[0].session is None]
        return StepTokens([request for request, _ in mine], [row for _, row in mine], chosen_elsewhere)

    def embeds_of(self, output: SchedulerOutput) -> dict[str, Any]:
        """Returns the prompts of a step that were given as embeddings, by request.

        Args:
            output (`SchedulerOutput`):
                The step.
        """
        return {
            share.request_id: self.scheduler.requests[share.request_id].extras.prompt_embeds
            for share in output.scheduled
            if share.embeds
        }

    def take_prompt_logprobs(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[tuple[Request, NonFiniteLogitsError]]:
        """Takes in what a step says about prompts.

        Args:
            output (`SchedulerOutput`):
                The step.
            result (`StepResult`):
                What it computed.

        Returns:
            The requests whose logits were not finite, and the error of each.
        """
        refused = []
        for share in output.scheduled:
            if share.request_id in result.prompt_rows:
                try:
                    self._take_chunk(share, result)
                except NonFiniteLogitsError as error:
                    refused.append((self.scheduler.requests[share.request_id], error))
        return refused

    def _take_chunk(self, share: ScheduledRequest, result: StepResult) -> None:
        request = self.scheduler.requests[share.request_id]
        begin, end = result.prompt_rows[share.request_id]
        first = share.num_computed_tokens
        # The logits at position p are about the token at p + 1; beyond the prompt they are about the answer.
        about = request.token_ids[first + 1 : min(first + 1 + end - begin, request.num_prompt_tokens)]
        if about:
            entries = prompt_logprobs(
                result.logits[begin : begin + len(about)], about, request.params.prompt_logprobs or 0
            )
            _state_of(request).add_prompt_logprobs(first + 1, entries)

    def collect(
        self,
        output: SchedulerOutput,
        result: StepResult,
        tokens_of: StepTokens,
        choice: SamplerOutput,
        refused: Iterable[tuple[Request, Exception]],
        read_kv: Callable[[str, int], Any],
    ) -> None:
        """A step has run: its tokens are appended, texts and log-probabilities follow, and everybody is told.

        Args:
            output (`SchedulerOutput`):
                The step.
            result (`StepResult`):
                What it computed.
            tokens_of (`StepTokens`):
                Who gets a token.
            choice (`SamplerOutput`):
                The tokens, in the order of `tokens_of.requests`.
            refused (`Iterable[tuple[Request, NonFiniteLogitsError]]`):
                What `take_prompt_logprobs` returned.
            read_kv (`Callable[[str, int], Any]`):
                Copies the K/V of a request's first tokens out of its blocks.
        """
        requests = tokens_of.requests
        failed = {*choice.failed_rows, *choice.errors}
        unchosen = {*failed, *choice.ended_rows}
        tokens = {
            request.request_id: token
            for row, (request, token) in enumerate(zip(requests, choice.token_ids, strict=True))
            if row not in unchosen
        }
        touched = {}
        errors = {row: choice.errors.get(row) or _no_token(requests[row], row in choice.emptied_rows) for row in failed}
        for request, error in [*refused, *((requests[row], error) for row, error in errors.items())]:
            self._fail(request, error)
            touched[id(request.group)] = _state_of(request)
        for row in choice.ended_rows:
            self.scheduler.finish(requests[row], FinishReason.STOP)
        self._take_recorded(output, result)
        for request in self.scheduler.update_from_output(output, tokens):
            if request.grammar is not None and not request.is_finished:
                self._follow_grammar(request)
        self._observe(output, len(tokens) + len(tokens_of.chosen_elsewhere))
        for request, row in tokens_of.chosen_elsewhere:
            if not request.is_finished:
                request.session.take_logits(request, result.logits[row])
        for row, request in enumerate(requests):
            state = _state_of(request)
            if not (request.is_finished or state.answers[request.branch].follows_tokens):
                continue
            touched[id(request.group)] = state
            self._follow(request, row, choice, read_kv)
        for state in touched.values():
            self._settle(state)

    def _follow_grammar(self, request: Request) -> None:
        """A token has been appended: the answer ends if its grammar can go no further."""
        try:
            if follow(request):
                self.scheduler.finish(request, FinishReason.STOP)
        except (InvalidRequestError, EngineError) as error:
            self._fail(request, error)

    def _follow(self, request: Request, row: int, choice: SamplerOutput, read_kv: Callable[[str, int], Any]) -> None:
        """Does what comes after a token: its scores, criteria, log-probabilities and text."""
        if request.error is None:
            self._ask_criteria(request, choice.scores.get(row))
        if request.error is None:
            try:
                self._advance(request, choice.logprobs[row] if choice.logprobs is not None else None, read_kv)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a tokenizer's panic is no `Exception`
                self._fail_text(request, error)

    def _ask_criteria(self, request: Request, scores: torch.Tensor | None) -> None:
        """Keeps a token's scores, and ends the request if its caller's criteria say so, or raise."""
        answer = _state_of(request).answers[request.branch]
        if answer.scores is not None and scores is not None:
            answer.scores.append(scores)
        if request.is_finished or not request.extras.stopping_criteria:
            return
        try:
            if stops(
                request, tuple(row[None] for row in answer.scores) if answer.scores else None, self._sampler.device
            ):
                self.scheduler.finish(request, FinishReason.STOP)
        except Exception as error:
            self._fail(request, error)

    def _advance(self, request: Request, logprobs: Any, read_kv: Callable[[str, int], Any]) -> None:
        state = _state_of(request)
        answer = state.answers[request.branch]
        if request.is_finished and request.extras.keep_kv:
            # Its blocks are free since a moment, but nobody can have taken them before the next schedule.
            answer.kv = read_kv(request.request_id, request.num_tokens - 1)
        if logprobs is not None:
            answer.add_logprobs(logprobs)
        stop = answer.advance()
        if stop is not None and not request.is_finished:
            self.scheduler.finish(request, FinishReason.STOP, stop_reason=stop)
        elif stop is not None:
            request.finish_reason, request.stop_reason = FinishReason.STOP, stop

    def _take_recorded(self, output: SchedulerOutput, result: StepResult) -> None:
        for share in output.scheduled if result.recorded else ():
            recorded = result.recorded.get(share.request_id)
            if recorded is None:
                continue
            request = self.scheduler.requests[share.request_id]
            if request.session is not None:
                request.session.take_recorded(request, recorded)
            else:
                _state_of(request).take_recorded(request, recorded)

    def fail_step(
        self, output: SchedulerOutput, cause: Exception, error_type: type[StepFailedError] = StepFailedError
    ) -> None:
        """A step has raised: its requests fail with the cause, and all others go on.

        Args:
            output (`SchedulerOutput`):
                The step.
            cause (`Exception`):
                What it raised.
            error_type (`type[StepFailedError]`, defaults to `StepFailedError`):
                What its requests are told.
        """
        logger.debug("a step failed", exc_info=cause)
        self.counters.num_failed_steps += 1
        requests = self.scheduler.cancel(output)
        for request in requests:
            error = error_type(
                f"A step with {len(output.scheduled)} requests and {output.num_scheduled_tokens} tokens failed: "
                f"{type(cause).__name__}: {cause}{error_type.advice}"
            )
            error.__cause__ = cause
            self._fail(request, error)
        for state in {id(request.group): _state_of(request) for request in requests}.values():
            self._settle(state)

    # ------------------------------------------------------------------ telling

    def _fail(self, request: Request, error: BaseException) -> None:
        self.scheduler.finish(request, FinishReason.ERROR, error=error)

    def _settle(self, state: RequestState) -> None:
        """Tells the caller about news, and lets go of a request whose answers have all ended."""
        if state.group.is_finished and self.states.get(state.request_id) is state:
            for answer in state.answers:
                try:
                    answer.advance()
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    self._fail_text(answer.request, error)
                self._sampler.forget(answer.request.request_id)
                self.grammars.let_go(answer.request)
            self.ids -= ids_of(state)
            self._host_bound.discard(state.request_id)
            self.counters.num_finished += 1
            state.finished = True
            del self.states[state.request_id]  # last: interrupted before, it is done again
        if state.on_update is not None:
            try:
                state.on_update(state)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # its `SystemExit` would end the requests of all others
                self._fail_callback(state, error)

    def _fail_text(self, request: Request, cause: BaseException) -> None:
        """A request whose tokenizer raises fails alone."""
        error = EngineError(f"The text of request {request.request_id!r} failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._fail(request, error)
        request.error = request.error or error

    def _fail_callback(self, state: RequestState, cause: BaseException) -> None:
        """Whoever waits for a request by a callback that raises is told so by the request, and nobody else is."""
        state.on_update = None
        error = EngineError(f"The callback of request {state.request_id!r} raised {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        for request in state.group.requests:
            self._fail(request, error)
            request.error = request.error or error
        self._settle(state)

    # ------------------------------------------------------------------ counting

    def _observe(self, output: SchedulerOutput, num_tokens: int) -> None:
        counters = self.counters
        counters.observe_step(output.num_scheduled_tokens)
        counters.num_generated_tokens += num_tokens
        counters.peak_running = max(counters.peak_running, len(output.scheduled))
        manager = self.block_manager
        counters.observe_blocks(manager.num_blocks_held, manager.num_tokens_stored, self._plan.block_size)

    def stats(self) -> EngineStats:
        """Returns counters and timers since the engine was made or since `reset_stats`."""
        counters = self.counters
        counters.num_preemptions = self.scheduler.num_preemptions - self._num_preemptions
        counters.num_prompt_tokens = self.block_manager.num_queried_tokens - self._num_queried
        counters.num_cached_tokens = self.block_manager.num_hit_tokens - self._num_hits
        return counters

    def reset_stats(self) -> None:
        """Sets all counters and timers back."""
        self.counters = EngineStats(bytes_per_block=self._plan.bytes_per_block, pool_bytes=self._plan.pool_bytes)
        # What the scheduler and the blocks had counted by now.
        self._num_preemptions = self.scheduler.num_preemptions
        self._num_queried = self.block_manager.num_queried_tokens
        self._num_hits = self.block_manager.num_hit_tokens


def ids_of(state: RequestState) -> set[str]:
    """Returns the ids of a request and its branches.

    Args:
        state (`RequestState`):
            The request.
    """
    return {state.request_id, *(request.request_id for request in state.group.requests)}


def _state_of(request: Request) -> RequestState:
    assert request.group is not None, "every request of an engine belongs to a group"
    return request.group.context


def _no_token(request: Request, all_forbidden: bool) -> InvalidRequestError | NonFiniteLogitsError:
    if all_forbidden:
        return InvalidRequestError(
            f"Request {request.request_id!r} has no token left to choose after {request.num_output_tokens}: each one "
            "is forbidden by `allowed_token_ids`, `bad_words`, `min_tokens` or a logits processor."
        )
    return NonFiniteLogitsError(
        f"The logits of request {request.request_id!r} at position {request.num_tokens} leave no token to choose: they "
        "hold NaN or infinite numbers, or every token is forbidden. Other requests are not touched."
    )
