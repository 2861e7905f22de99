"""The engine: one step is schedule, launch, collect; requests come in at any time and leave when they are done.

There is no thread behind it. Whoever waits for a request runs the steps, for everybody: of several waiting threads
one drives and the others sleep until it has news for them or stops driving.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..cache.block_manager import BlockManager
from ..cache.layer_discovery import find_layers
from ..configuration import PagedConfig
from ..errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    NonFiniteLogitsError,
    NotSupportedError,
    QueueFullError,
    StepFailedError,
)
from ..kernels import describe_backends, select_backend
from ..modeling.layer_groups import inspect_configuration, num_embeddings
from .admission import Limits, bad_words_ids, check_params, check_prompt, check_room, make_group
from .answer import RequestState
from .model_runner import ModelRunner
from .model_state import eos_token_ids, fingerprint, sampling_defaults, training_obstacle
from .outputs import RequestOutput, SamplerOutput, StepResult
from .plan import attention_spec, default_block_size, make_plan
from .policies import SCHEDULING_POLICIES
from .probe import activation_bytes, check_against_stock, evaluating
from .request import FinishReason, Request, RequestStatus
from .sampling.logprobs import prompt_logprobs
from .sampling.params import SamplingParams
from .sampling.sampler import Sampler
from .scheduler import Scheduler, SchedulerConfig
from .stats import EngineStats
from .step import ScheduledRequest, SchedulerOutput

logger = logging.getLogger(__name__)

_IDLE_WAIT = 0.05


class Engine:
    """Runs a Transformers model on a paged K/V cache with continuous batching.

    Use it through `model.engine`, `model.generate`, `model.generate_batch` or `LLM`.

    Args:
        model (`PreTrainedModel`):
            The model, with our attention implementation set. The engine does not keep it alive.
        config (`PagedConfig`, *optional*):
            What the user asked for.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Makes texts of tokens; needed for stop strings.

    Raises:
        UnsupportedModelError: If the paged engine cannot run this model correctly; names the layer and why.
        NotEnoughMemoryError: If not even one block fits.
        UnsupportedAttentionError: If no attention backend has what the model needs.
    """

    scheduler: Scheduler
    _block_manager: BlockManager

    def __init__(self, model: PreTrainedModel, config: PagedConfig | None = None, *, tokenizer: Any = None):
        self.config = config or PagedConfig()
        self.tokenizer = tokenizer
        self._model = weakref.ref(model)
        policy = SCHEDULING_POLICIES.get(self.config.scheduling_policy)
        inspect_configuration(model)
        with evaluating(model):
            self._groups = find_layers(model)
            block_size = default_block_size(self.config)
            spec = attention_spec(self._groups, block_size, self.config.batch_invariant)
            self.backend = select_backend(spec, self.config.attn_backend)
            rejected = {d.name: d.reason for d in describe_backends(spec) if d.reason and d.name != self.backend.name}
            check_against_stock(model, self._groups, self.backend, block_size)
            self.plan = make_plan(
                model,
                self._groups,
                self.config,
                attn_backend=self.backend.name,
                rejected_backends=rejected,
                activation_bytes=activation_bytes(model, self._groups, self.backend, block_size, self.config),
            )
        self.sampler = Sampler(self.limits.vocab_size, self._groups[0].device)
        self._policy = policy
        self._states: dict[str, RequestState] = {}
        self._ids: set[str] = set()  # of the live requests and their branches
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._condition = threading.Condition()
        self._driving = False
        self._driver: int | None = None  # the thread that runs the steps
        self._asleep = False
        self._closed = False
        self._pid = os.getpid()
        self._runner: ModelRunner | None = None
        self._weights = fingerprint(model)
        self.reset_stats()
        self._reset_bookkeeping()

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        priority: int = 0,
        extra_keys: tuple = (),
        tokenizer: Any = None,
        on_update: Callable[[RequestState], None] | None = None,
        banned: tuple[tuple[int, ...], ...] = (),
        keep_kv: bool = False,
    ) -> RequestState:
        """Checks a request and queues it. Thread-safe; touches no other request.

        Args:
            prompt_token_ids (`Sequence[int]`):
                The prompt.
            params (`SamplingParams`, *optional*):
                How to sample; fields that were not given come from the model's generation configuration.
            request_id (`str`, *optional*):
                Unique among live requests; a new one by default.
            prompt (`str`, *optional*):
                The prompt's text, to be handed back with the output.
            priority (`int`, defaults to 0):
                Lower runs earlier under the priority policy.
            extra_keys (`tuple`, defaults to `()`):
                What else the K/V depend on; requests share blocks only with requests of equal keys.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                Instead of the engine's own.
            on_update (`Callable[[RequestState], None]`, *optional*):
                Called after each token and at the end, by the thread that runs the steps.
            banned (`tuple[tuple[int, ...], ...]`, defaults to `()`):
                Token sequences that must not be generated, beside the parameters' `bad_words`.
            keep_kv (`bool`, defaults to `False`):
                Whether the answers keep a copy of their K/V when they end.

        Returns:
            `RequestState`: To be waited for with `wait`.

        Raises:
            InvalidRequestError: If something is wrong with the request; says what, and the limit.
            QueueFullError: If too many requests wait.
            EngineClosedError: If the engine was closed or sleeps.
        """
        self._check_usable()
        tokenizer = tokenizer if tokenizer is not None else self.tokenizer
        tokens, params = self._checked(prompt_token_ids, params, tokenizer)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"`priority` must be a whole number, got {priority!r}.")
        if params.bad_words:
            banned += bad_words_ids(params.bad_words, tokenizer)
        group = make_group(
            tokens,
            params,
            self.limits,
            request_id=request_id,
            priority=priority,
            extra_keys=extra_keys,
            banned=banned,
        )
        state = RequestState(group, prompt, tokenizer, on_update, keep_kv)
        self._enqueue(state)
        return state

    def check(self, prompt_token_ids: Any, params: SamplingParams | None = None, *, exact_room: bool = False) -> None:
        """Checks a request without queueing it.

        Args:
            prompt_token_ids (`Any`):
                The prompt.
            params (`SamplingParams`, *optional*):
                How to sample.
            exact_room (`bool`, defaults to `False`):
                Refuse an answer that may outgrow `max_model_len`, instead of ending it there.

        Raises:
            InvalidRequestError: If something is wrong with the request; says what, and the limit.
        """
        tokens, params = self._checked(prompt_token_ids, params, self.tokenizer)
        if exact_room and params.max_tokens is not None:
            check_room(len(tokens), params.max_tokens, self.plan)

    def _checked(
        self, prompt_token_ids: Any, params: SamplingParams | None, tokenizer: Any
    ) -> tuple[list[int], SamplingParams]:
        obstacle = training_obstacle(self.model)
        if obstacle is not None:
            raise NotSupportedError(f"The model is in training mode, and {obstacle}; call `model.eval()` first.")
        params, limits = self.resolve(params), self.limits
        tokens = check_prompt(prompt_token_ids, limits)
        check_params(params, limits, tokenizer)
        return tokens, params

    def resolve(self, params: SamplingParams | None) -> SamplingParams:
        """Returns parameters whose open fields come from the model's generation configuration.

        Args:
            params (`SamplingParams`, *optional*):
                What was given.

        Raises:
            InvalidRequestError: If it is not a `SamplingParams`.
        """
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"`sampling_params` must be a SamplingParams, got {type(params).__name__}.")
        return params.resolved(sampling_defaults(self.model))

    def _enqueue(self, state: RequestState) -> None:
        limit = self.plan.max_queue_size
        if limit is not None and self.scheduler.num_waiting + len(self._inbox) >= limit:
            raise QueueFullError(
                f"{self.scheduler.num_waiting + len(self._inbox)} requests are waiting and `max_queue_size` is "
                f"{limit}; try again later."
            )
        weights = fingerprint(self.model)
        ids = _ids_of(state)
        with self._condition:
            taken = sorted(ids & self._ids)
            if taken:
                raise InvalidRequestError(
                    f"`request_id` {taken[0]!r} belongs to a request that is still running, or to a branch of one."
                )
            self._ids |= ids
            if weights != self._weights:
                self._weights = weights
                self._inbox.append(self._block_manager.reset_prefix_cache)
            self._states[state.request_id] = state
            self._inbox.append(lambda: self.scheduler.add(state.group))
            self._condition.notify_all()

    def abort(self, request_id: str) -> None:
        """Ends a request; its answers so far stay. Unknown and finished requests are ignored. Thread-safe.

        Args:
            request_id (`str`):
                Which.
        """
        with self._condition:
            if request_id in self._states:
                self._inbox.append(lambda: self._abort_now(request_id))
                self._condition.notify_all()

    def _abort_now(self, request_id: str) -> None:
        state = self._states.get(request_id)
        if state is not None:
            self.scheduler.abort(request_id)
            self._settle(state)

    # ------------------------------------------------------------------ running

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, all of them checked before the first is started.

        Args:
            prompts (`Sequence[Sequence[int]]`):
                Token ids of each prompt.
            params (`SamplingParams` or `Sequence[SamplingParams]`, *optional*):
                One for all, or one for each.
            progress (`Callable[[RequestOutput], None]`, *optional*):
                Called as each prompt is answered.

        Returns:
            `list[RequestOutput]`: In input order.

        Raises:
            InvalidRequestError: If one of them is wrong; none is started.
            EngineError: If a step failed.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts were given {len(params)} sampling parameters.")
        for prompt, param in zip(prompts, params, strict=True):
            self.check(prompt, param)
        with self.requests() as states:
            for prompt, param in zip(prompts, params, strict=True):
                states.append(self.add_request(prompt, param))
            for state in self.as_finished(states):
                if progress is not None:
                    progress(state.output())
            return [state.output() for state in states]

    @contextlib.contextmanager
    def requests(self) -> Iterator[list[RequestState]]:
        """A list of requests of one call: whatever ends the call early, Ctrl-C included, ends them too."""
        states: list[RequestState] = []
        try:
            yield states
        finally:
            self.abort_all(states)

    def as_finished(self, states: Sequence[RequestState]) -> Iterator[RequestState]:
        """Runs steps and yields requests as they end.

        Args:
            states (`Sequence[RequestState]`):
                The requests.

        Raises:
            EngineError: If one of them failed; its cause is attached.
        """
        for state in self.as_settled(states):
            if state.error is not None:
                raise state.error
            yield state

    def as_settled(self, states: Sequence[RequestState]) -> Iterator[RequestState]:
        """Runs steps and yields requests as they end, failed ones too.

        Args:
            states (`Sequence[RequestState]`):
                The requests.
        """
        pending = list(states)

        def any_finished() -> bool:
            return any(state.finished for state in pending)

        while pending:
            self._drive_until(any_finished)
            finished = [state for state in pending if state.finished]
            pending = [state for state in pending if not state.finished]
            yield from finished

    def wait(self, state: RequestState, news: Callable[[], bool] | None = None) -> None:
        """Runs steps until a request has ended, or there is news for its caller.

        Args:
            state (`RequestState`):
                The request.
            news (`Callable[[], bool]`, *optional*):
                Whether there is something to return for.
        """
        self._drive_until(lambda: state.finished or (news is not None and news()))

    def _drive_until(self, done: Callable[[], bool], step: bool = True) -> None:
        """Runs steps, or sleeps while another thread runs them, until a condition holds."""
        while True:
            with self._condition:
                while self._driving and not done():
                    self._condition.wait()
                if done():
                    return
                self._driving, self._driver = True, threading.get_ident()
            try:
                worked = self.step() if step else self._drain_inbox()
            finally:
                with self._condition:
                    self._driving, self._driver = False, None
                    if self._closed:
                        self._tear_down()
                    self._condition.notify_all()
            if not worked and not done():
                with self._condition:
                    self._condition.wait(_IDLE_WAIT)

    def serve(self, stop: threading.Event) -> None:
        """Runs steps whenever there is something to do, until told to stop. For a thread of its own.

        Args:
            stop (`threading.Event`):
                Ends it; follow `stop.set()` with `wake()`.
        """
        while not stop.is_set():
            with self._condition:
                while not (stop.is_set() or self._closed or (not self._asleep and (self._states or self._inbox))):
                    self._condition.wait()
            self._check_usable()
            self._drive_until(lambda: stop.is_set() or not (self._states or self._inbox))

    def wake(self) -> None:
        """Makes every waiting thread look again at what it waits for."""
        with self._condition:
            self._condition.notify_all()

    def abort_all(self, states: Sequence[RequestState] | None = None) -> None:
        """Ends requests and waits until they have ended; their answers so far stay.

        Args:
            states (`Sequence[RequestState]`, *optional*):
                The requests; those that have ended already are fine. By default all.
        """
        states = list(self._states.values()) if states is None else states
        unfinished = [state for state in states if not state.finished]
        for state in unfinished:
            self.abort(state.request_id)
        if unfinished and not self._closed:
            self._drive_until(lambda: all(state.finished for state in unfinished), step=False)

    def step(self) -> bool:
        """Runs one step. Only one thread at a time may call it; `wait` and its siblings see to that.

        Returns:
            `bool`: Whether there was anything to do.
        """
        self._check_usable()
        started = time.perf_counter()
        try:
            self._drain_inbox()
            output = self.scheduler.schedule()
        except BaseException as error:
            self._start_over(error)
            raise
        if not output.scheduled:
            return False
        scheduled = time.perf_counter()
        try:
            runner = self._ready_runner()
            handle = runner.launch(output)
            result = runner.collect(handle)
            modelled = time.perf_counter()
            requests = [self.scheduler.requests[i] for share in output.scheduled for i in share.sample_ids]
            choice = self.sampler.sample(result.logits, requests, result.sample_rows)
            refused = self._take_prompt_logprobs(output, result)
        except Exception as error:
            self._fail_step(output, error)
            return True
        except BaseException:  # Ctrl-C: the step did not happen; other threads' requests run it again
            self.scheduler.cancel(output)
            raise
        sampled = time.perf_counter()
        try:
            for request, why in refused:
                self._fail(request, why)
            self._collect(output, requests, choice)
            for request, _ in refused:
                assert request.group is not None, "every request belongs to a group"
                self._settle(request.group.context)
        except BaseException as error:
            self._start_over(error)
            raise
        stats = self._stats
        stats.seconds_schedule += scheduled - started
        stats.seconds_inputs += handle.seconds_inputs
        stats.seconds_model += modelled - scheduled - handle.seconds_inputs
        stats.seconds_sample += sampled - modelled
        stats.seconds_collect += time.perf_counter() - sampled
        return True

    def _collect(self, output: SchedulerOutput, requests: list[Request], choice: SamplerOutput) -> None:
        failed = set(choice.failed_rows)
        tokens = {
            request.request_id: token
            for row, (request, token) in enumerate(zip(requests, choice.token_ids, strict=True))
            if row not in failed
        }
        for row in failed:
            self._fail(requests[row], _non_finite(requests[row]))
        self.scheduler.update_from_output(output, tokens)
        self._observe(output)
        self._stats.num_generated_tokens += len(tokens)
        touched: dict[str, RequestState] = {}
        for row, request in enumerate(requests):
            group = request.group
            assert group is not None, "every request belongs to a group"
            state: RequestState = group.context
            touched[group.group_id] = state
            if row in failed:
                continue
            answer = state.answers[request.branch]
            if request.is_finished and state.keep_kv:
                # Its blocks are free since a moment, but nobody can have taken them before the next schedule.
                answer.kv = self._ready_runner().read(request.request_id, request.num_tokens - 1)
            if choice.logprobs is not None and (entry := choice.logprobs[row]) is not None:
                answer.add_logprobs(entry)
            stop = answer.advance()
            if stop is not None and not request.is_finished:
                self.scheduler.finish(request, FinishReason.STOP, stop_reason=stop)
            elif stop is not None:
                request.finish_reason, request.stop_reason = FinishReason.STOP, stop
        for state in touched.values():
            self._settle(state)

    def _settle(self, state: RequestState) -> None:
        """Tells the caller about news, and lets go of a request whose answers have all ended."""
        if state.group.is_finished and not state.finished:
            for answer in state.answers:
                answer.advance()
                self.sampler.forget(answer.request.request_id)
            self._states.pop(state.request_id, None)
            self._ids -= _ids_of(state)
            self._stats.num_finished += 1
            state.finished = True
        if state.on_update is not None:
            try:
                state.on_update(state)
            except Exception as error:
                self._fail_callback(state, error)

    def _take_prompt_logprobs(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[tuple[Request, NonFiniteLogitsError]]:
        """Takes in what a step says about prompts; returns the requests whose logits were not finite."""
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
            assert request.group is not None, "every request belongs to a group"
            entries = prompt_logprobs(
                result.logits[begin : begin + len(about)], about, request.params.prompt_logprobs or 0
            )
            request.group.context.add_prompt_logprobs(first + 1, entries)

    def _observe(self, output: SchedulerOutput) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.num_computed_tokens += output.num_scheduled_tokens
        stats.peak_running = max(stats.peak_running, len(output.scheduled))
        manager = self._block_manager
        stats.observe_blocks(manager.num_blocks_held, manager.num_tokens_stored, self.plan.block_size)

    # ------------------------------------------------------------------ failing

    def _fail(self, request: Request, error: BaseException) -> None:
        self.scheduler.finish(request, FinishReason.ERROR, error=error)

    def _fail_step(self, output: SchedulerOutput, cause: Exception) -> None:
        """The requests of a step that raised fail with its cause; all others go on."""
        logger.debug("a step failed", exc_info=cause)
        self._stats.num_failed_steps += 1
        ids = {share.request_id for share in output.scheduled} | {
            request_id for share in output.scheduled for request_id in share.sample_ids
        }
        requests = [self.scheduler.requests[request_id] for request_id in ids]
        self.scheduler.cancel(output)
        if self._runner is not None:
            self._runner.cache.abandon()
        for request in requests:
            error = StepFailedError(
                f"A step with {len(output.scheduled)} requests and {output.num_scheduled_tokens} tokens failed: "
                f"{type(cause).__name__}: {cause}"
            )
            error.__cause__ = cause
            self._fail(request, error)
        for state in {id(r.group.context): r.group.context for r in requests if r.group is not None}.values():
            self._settle(state)

    def _fail_callback(self, state: RequestState, cause: Exception) -> None:
        """Whoever waits for a request by a callback that raises is told so by the request, and nobody else is."""
        state.on_update = None
        error = EngineError(f"The callback of request {state.request_id!r} raised {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        for request in state.group.requests:
            self._fail(request, error)
            request.error = request.error or error
        self._settle(state)

    def _start_over(self, cause: BaseException) -> None:
        """The bookkeeping itself was interrupted: no block table can be trusted, so every request fails."""
        error = EngineError("The engine was interrupted between two steps and started over.")
        error.__cause__ = cause
        with self._condition:
            self._forget_all(error, FinishReason.ERROR)

    def _forget_all(self, error: EngineError, reason: FinishReason) -> None:
        """Ends all requests without asking the scheduler, and lets go of the pool."""
        for state in list(self._states.values()):
            for request in state.group.requests:
                if not request.is_finished:
                    request.error, request.finish_reason = error, reason
                    request.status = RequestStatus.FINISHED
            self._settle(state)
        self._inbox.clear()
        self._runner = None
        self._reset_bookkeeping()

    # ------------------------------------------------------------------ life

    @property
    def model(self) -> Any:
        """Returns the model.

        Raises:
            EngineClosedError: If the model was deleted.
        """
        model = self._model()
        if model is None:
            raise EngineClosedError("The engine's model was deleted; keep a reference to it while using its engine.")
        return model

    @property
    def limits(self) -> Limits:
        """Returns what a request must respect now: the vocabulary and the end tokens may change with time."""
        model = self.model
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        return Limits(self.plan, num_embeddings(model), vocab_size, eos_token_ids(model))

    @property
    def is_closed(self) -> bool:
        """Returns whether `close` was called."""
        return self._closed

    @property
    def has_unfinished(self) -> bool:
        """Returns whether any request has not ended."""
        return bool(self._states)

    def stats(self) -> EngineStats:
        """Returns counters and timers since the engine was made or since `reset_stats`."""
        stats = self._stats
        stats.num_preemptions = self.scheduler.num_preemptions - self._preemptions_before
        stats.num_prompt_tokens = self._block_manager.num_queried_tokens - self._queried_before
        stats.num_cached_tokens = self._block_manager.num_hit_tokens - self._hits_before
        return stats

    def reset_stats(self) -> None:
        """Sets all counters and timers back."""
        self._stats = EngineStats(bytes_per_block=self.plan.bytes_per_block, pool_bytes=self.plan.pool_bytes)
        started = hasattr(self, "scheduler")
        self._preemptions_before = self.scheduler.num_preemptions if started else 0
        self._queried_before = self._block_manager.num_queried_tokens if started else 0
        self._hits_before = self._block_manager.num_hit_tokens if started else 0

    def weights_changed(self) -> None:
        """Forgets all cached K/V, for weights that were written in a way that no version counter shows (`.data`)."""
        with self._condition:
            self._inbox.append(self._block_manager.reset_prefix_cache)

    def release(self) -> None:
        """Frees the pool; the next request makes it again.

        Raises:
            EngineError: If requests are running.
        """
        if self._states:
            raise EngineError(f"{len(self._states)} requests are still running; abort them, or wait for them first.")
        with self._condition:
            while self._driving:
                self._condition.wait()
            self._runner = None
            self._reset_bookkeeping()

    def sleep(self) -> None:
        """Frees the pool and takes no requests until `wake_up`.

        Raises:
            EngineError: If requests are running.
        """
        self.release()
        self._asleep = True

    def wake_up(self) -> None:
        """Takes requests again after `sleep`."""
        with self._condition:
            self._asleep = False
            self._condition.notify_all()

    def close(self) -> None:
        """Ends all requests, frees the pool and takes no requests ever again. Safe to call twice."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            if self._driver == threading.get_ident():
                return  # called by a request's callback: the end of the step tears down
            while self._driving:
                self._condition.wait()
            self._tear_down()
            self._condition.notify_all()

    def _tear_down(self) -> None:
        self._forget_all(EngineClosedError("The engine was closed."), FinishReason.ABORT)

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineClosedError("The engine was closed; make a new one with `from_pretrained` or `from_model`.")
        if self._asleep:
            raise EngineClosedError("The engine sleeps; call `engine.wake_up()` first.")
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "The engine does not survive a fork: its pool and locks belong to another process. Load the model in "
                "this process, or start processes with the 'spawn' method."
            )

    def _reset_bookkeeping(self) -> None:
        plan = self.plan
        if hasattr(self, "scheduler"):  # what was counted so far still counts
            self._preemptions_before -= self.scheduler.num_preemptions
            self._queried_before -= self._block_manager.num_queried_tokens
            self._hits_before -= self._block_manager.num_hit_tokens
        self._block_manager = BlockManager(
            [plan.num_blocks] * len(self._groups), plan.block_size, plan.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                max_model_len=plan.max_model_len,
                enable_chunked_prefill=plan.enable_chunked_prefill,
            ),
            self._block_manager,
            self._policy(),
        )

    def _ready_runner(self) -> ModelRunner:
        if self._runner is None:
            plan = self.plan
            self._runner = ModelRunner(
                self.model,
                self._groups,
                self.backend,
                num_blocks=plan.num_blocks,
                block_size=plan.block_size,
                max_num_seqs=plan.max_num_seqs,
                max_model_len=plan.max_model_len,
                tiled=plan.call_layout == "tiles",
            )
        return self._runner

    def _drain_inbox(self) -> bool:
        worked = False
        while self._inbox:
            self._inbox.popleft()()
            worked = True
        return worked


def _ids_of(state: RequestState) -> set[str]:
    return {state.request_id, *(request.request_id for request in state.group.requests)}


def _non_finite(request: Request) -> NonFiniteLogitsError:
    return NonFiniteLogitsError(
        f"The logits of request {request.request_id!r} at position {request.num_tokens} leave no token to choose: they "
        "hold NaN or infinite numbers, or every token is forbidden. Other requests are not touched."
    )
