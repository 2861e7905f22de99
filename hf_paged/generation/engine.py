"""The engine: one step is schedule, launch, collect; requests come in at any time and leave when they are done.

There is no thread behind it. Whoever waits for a request runs the steps, for everybody; several waiting threads take
turns at it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ..cache.layer_discovery import find_layers
from ..cache.memory import give_back
from ..configuration import PagedConfig
from ..errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    NotEnoughMemoryError,
    NotSupportedError,
    QueueFullError,
)
from ..kernels import describe_backends, select_backend
from ..kernels.cpu.threads import limit_threads, pin_threads_if_requested
from ..modeling.layer_groups import inspect_configuration, num_embeddings, stored_as
from .admission import (
    Limits,
    bad_words_ids,
    check_extra_keys,
    check_extras,
    check_params,
    check_prompt,
    check_room,
    make_group,
)
from .answer import RequestState
from .async_steps import AsyncStepLoop
from .compiling.compiled_parts import compiled_parts
from .graphs.settings import graph_settings, with_graphs
from .live_requests import Arrival, LiveRequests, ids_of
from .memory_probe import step_needs
from .memory_watch import MemoryWatch
from .model_runner import ModelRunner
from .model_state import eos_token_ids, sampling_defaults, training_obstacle, with_end_of
from .native_layers import native_layers
from .outputs import RequestOutput
from .plan import attention_spec, default_block_size, make_plan
from .policies import SCHEDULING_POLICIES
from .probe import check_against_stock, enough_memory, evaluating
from .request import NO_EXTRAS, FinishReason, Request, RequestExtras
from .sampling.params import SamplingParams
from .sampling.sampler import Sampler
from .session import OpenSessions
from .sleeping_weights import SleepingWeights
from .stats import EngineStats
from .step_driver import StepDriver
from .step_loop import StepLoop
from .structured.grammars import Grammars
from .turns import Turns
from .weights import WeightWatch

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Engine(StepDriver):
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
        NotEnoughMemoryError: If not even one block fits, not as many as were asked for, or not the largest step.
        UnsupportedAttentionError: If no attention backend has what the model needs.
    """

    def __init__(self, model: PreTrainedModel, config: PagedConfig | None = None, *, tokenizer: Any = None):
        self.config = config or PagedConfig()
        self.tokenizer = tokenizer
        self._model = weakref.ref(model)
        policy = SCHEDULING_POLICIES.get(self.config.scheduling_policy)
        inspect_configuration(model)
        with evaluating(model), enough_memory(model):
            plain = find_layers(model)  # of what they store, quantized or not, the checks of the model know nothing
            self._groups = stored_as(plain, self.config.kv_cache_dtype)
            if self._groups[0].device.type == "cpu":
                limit_threads()
            block_size = default_block_size(self.config)
            spec = attention_spec(self._groups, block_size, self.config.batch_invariant)
            self.backend = select_backend(spec, self.config.attn_backend)
            rejected = {d.name: d.reason for d in describe_backends(spec) if d.reason and d.name != self.backend.name}
            check_against_stock(model, plain, self.backend, block_size)
            self.plan = make_plan(
                model,
                self._groups,
                self.config,
                attn_backend=self.backend.name,
                rejected_backends=rejected,
                needs=step_needs(model, self._groups, self.backend, self.config),
            )
        self._native = native_layers(model, plain, self.backend, self.plan)
        if self._native is not None:
            self.plan = dataclasses.replace(self.plan, native=self._native.inspection.describe())
        self._compiled = compiled_parts(model, plain, self.backend, self.plan, self.config, self._native, self._note)
        if self._compiled is not None:
            self.plan = dataclasses.replace(self.plan, compiled=self._compiled.describe())
        self.plan = with_graphs(self.plan, self.config, self.backend)
        self.sampler = Sampler(self.limits.vocab_size, self._groups[0].device)
        self.live = LiveRequests(self.plan, policy, len(self._groups), self.sampler, Grammars(self))
        loop = AsyncStepLoop if self.plan.async_scheduling else StepLoop
        self._loop = loop(self.live, self.sampler, self._make_runner, WeightWatch(model))
        self.sessions = OpenSessions()
        self._model = weakref.ref(model, lambda _: self._forget_model())  # only now is there a loop
        self._turns = Turns(self._end_turn)
        memory_plan = self.plan.memory
        self.memory_watch = None if memory_plan is None else MemoryWatch(memory_plan, self._groups[0].device)
        self._asleep = False
        self._weights: SleepingWeights | None = None
        self._closed = False
        self._pid = os.getpid()

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
        stream: bool = True,
        extras: RequestExtras = NO_EXTRAS,
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
                What else the K/V depend on: strings, bytes, numbers, `None`, and tuples of them. Requests share blocks
                only with requests of equal keys.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                Instead of the engine's own.
            on_update (`Callable[[RequestState], None]`, *optional*):
                Called after each token and at the end, by the thread that runs the steps.
            stream (`bool`, defaults to `True`):
                Whether `on_update` is also wanted, and the text made, before the end.
            extras (`RequestExtras`, defaults to none):
                What the request asks for beside its parameters.

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
        check_extra_keys(extra_keys)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"`priority` must be a whole number, got {priority!r}.")
        check_extras(extras, len(tokens), self.model, self.limits)
        if params.bad_words:
            words = extras.bad_words_ids + bad_words_ids(params.bad_words, tokenizer)
            extras = dataclasses.replace(extras, bad_words_ids=words)
        group = make_group(
            tokens,
            params,
            dataclasses.replace(self.limits, eos_token_ids=with_end_of(tokenizer, self.limits.eos_token_ids)),
            request_id=request_id,
            priority=priority,
            extra_keys=extra_keys,
            extras=extras,
        )
        state = RequestState(group, prompt, tokenizer, on_update, stream)
        self.grammars.prepare(state)
        self.enqueue(state)
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

    def check_all(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> None:
        """Checks all requests of a call, so that none is started if one is wrong.

        Args:
            prompts (`Sequence[Any]`):
                Token ids of each prompt.
            params (`Sequence[SamplingParams]`):
                One for each.

        Raises:
            InvalidRequestError: Names the prompt by its number, if there are several.
        """
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                self.check(prompt, param)
            except InvalidRequestError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"Prompt {i} of {len(prompts)}: {error}") from error

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

    def enqueue(self, state: RequestState) -> None:
        """Queues a request that has been checked. Thread-safe.

        Args:
            state (`RequestState`):
                The request.

        Raises:
            InvalidRequestError: If its id is in use.
            QueueFullError: If too many requests wait.
            EngineClosedError: If the engine was closed or sleeps.
        """
        self._check_usable()
        limit = self.plan.max_queue_size
        num_waiting = self.live.scheduler.num_waiting + len(self._loop.inbox)
        if limit is not None and num_waiting >= limit:
            raise QueueFullError(
                f"{num_waiting} requests are waiting and `max_queue_size` is {limit}; try again later."
            )
        try:
            self._register(state, ids_of(state))
        except BaseException:
            # Ctrl-C, perhaps after the request was queued: its caller will never know of it.
            if self.live.states.get(state.request_id) is state:
                self._loop.inbox.append(lambda: self.live.abort(state.request_id))
            raise

    def _register(self, state: RequestState, ids: set[str]) -> None:
        with self._turns.mutex:
            self._check_usable()
            taken = sorted(ids & self.live.ids)
            if taken:
                raise InvalidRequestError(
                    f"`request_id` {taken[0]!r} belongs to a request that is still running, or to a branch of one."
                )
            self.live.ids |= ids
            self.live.states[state.request_id] = state
            self._loop.inbox.append(Arrival(self.live, state))
            self._turns.notify()

    def abort(self, request_id: str) -> None:
        """Ends a request; its answers so far stay. Unknown and finished requests are ignored. Thread-safe.

        Args:
            request_id (`str`):
                Which.
        """
        with self._turns.mutex:
            if request_id in self.live.states:
                self._loop.inbox.append(lambda: self.live.abort(request_id))
                self._turns.notify()

    def post(self, action: Callable[[], None]) -> None:
        """Has something done between two steps, by the thread that runs them. Thread-safe.

        Args:
            action (`Callable[[], None]`):
                What to do; must not raise.
        """
        with self._turns.mutex:
            self._check_usable()
            self._loop.inbox.append(action)
            self._turns.notify()

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
        self.check_all(prompts, params)
        with self.requests() as states:
            for prompt, param in zip(prompts, params, strict=True):
                states.append(self.add_request(prompt, param))
            for state in self.as_finished(states):
                if progress is not None:
                    progress(state.output())
            return [state.output() for state in states]

    def read_kv(self, request: Request) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies the K/V of a running request out of its blocks. Only between two steps (see `post`).

        Args:
            request (`Request`):
                All of its tokens are computed.

        Returns:
            Per layer keys `[num_kv_heads, tokens, Dk]` and values `[num_kv_heads, tokens, Dv]`.
        """
        block_ids = self.live.block_manager.block_table(request)
        return self._loop.ready_runner().read_blocks(block_ids, request.num_computed_tokens)

    def step(self) -> bool:
        """Runs one step. Only one thread at a time may call it; `wait` and its siblings see to that.

        Returns:
            `bool`: Whether there was anything to do.
        """
        self._check_usable()
        self._turns.check_outside(Engine.step.__code__, self)
        self.sessions.await_choices(self._turns.lock, self.live.counters)
        if self._groups[0].device.type == "cpu":
            pin_threads_if_requested()
        worked = self._loop.step()
        if self.memory_watch is not None:
            self.memory_watch.look(self._loop.runner)
        return worked

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

    def needs(self, feature: str) -> bool:
        """Returns whether an attention layer of the model has a feature.

        Args:
            feature (`str`):
                `"window"`, `"softcap"` or `"sinks"`.
        """
        return any(feature in layer.features for group in self._groups for layer in group.layers)

    @property
    def is_closed(self) -> bool:
        """Returns whether `close` was called."""
        return self._closed

    @property
    def is_forked(self) -> bool:
        """Returns whether this process was forked from the one that the engine belongs to."""
        return os.getpid() != self._pid

    @property
    def has_unfinished(self) -> bool:
        """Returns whether any request has not ended."""
        return bool(self.live.states)

    def stats(self) -> EngineStats:
        """Returns counters and timers since the engine was made or since `reset_stats`."""
        return self.live.stats()

    def reset_stats(self) -> None:
        """Sets all counters and timers back."""
        self.live.reset_stats()

    def weights_changed(self) -> None:
        """Forgets all cached K/V, for weights that were written in a way that nothing shows: `weight.data.mul_(2)`."""
        with self._turns.mutex:
            self._loop.inbox.append(lambda: self.live.block_manager.reset_prefix_cache())

    def release(self) -> None:
        """Frees the pool; the next request makes it again. The weights stay, for training between two generations.

        Raises:
            EngineError: If requests are running.
        """
        with self._turns.mutex:
            self._turns.wait_for_turn()  # lets go of the lock meanwhile, so that requests may come and go
            self._loop.drain_inbox()
            if self.live.states:
                raise EngineError(
                    f"{len(self.live.states)} requests are still running; abort them, or wait for them first."
                )
            self._loop.drop_runner()
            self.live.reset()
            give_back(self._groups[0].device)

    @property
    def is_asleep(self) -> bool:
        """Returns whether `sleep` was called, and `wake_up` not yet."""
        return self._asleep

    def sleep(self, level: int = 1) -> None:
        """Frees an accelerator for others until `wake_up`: the pool goes, and the weights wait in host memory.

        Cached prefixes and captured graphs are forgotten. Requests are refused meanwhile. The model's parameters are
        the same objects, on the CPU: they may be saved, or loaded into, and the numbers that they then have come back.
        On a CPU the pool is freed, and the weights stay where they are. See `release` for the pool alone.

        Args:
            level (`int`, defaults to 1):
                Only 1, which keeps the weights.

        Raises:
            EngineError: If requests are running.
            NotEnoughMemoryError: If the host has no room for the weights; the engine is awake then, without its pool.
            NotSupportedError: If another level was asked for.
        """
        if level != 1:
            raise NotSupportedError(
                f"`level` {level!r} is not built: an engine sleeps at level 1, which keeps the weights in host memory."
            )
        with self._turns.mutex:
            self.release()
            if not self._closed and not self._asleep:
                self._weights = SleepingWeights(self.model)
            self._asleep = True

    def wake_up(self) -> None:
        """Brings the weights back and takes requests again after `sleep`. The first of them makes the pool.

        Raises:
            NotEnoughMemoryError: If the weights have no room on their device any more; the engine sleeps on.
        """
        with self._turns.mutex:
            self._bring_weights_back()
            self._asleep = False
            self._turns.notify()

    def _bring_weights_back(self) -> None:
        model = self._model()
        if self._weights is not None and model is not None:
            self._weights.restore(model)
        self._weights = None

    def close(self) -> None:
        """Ends all requests, frees the pool and takes no requests ever again. Safe to call twice."""
        with self._turns.mutex:
            if self._closed:
                return
            self._closed = True
            if not self._turns.is_mine():  # else a request's callback called, and the end of the step lets go
                self._turns.wait_for_turn()
                self._end_turn()
                self._turns.notify()
            try:
                self._bring_weights_back()  # of an engine that slept: they are the model's, which stays
            except NotEnoughMemoryError as error:
                logger.warning("The engine was closed while it slept, and the weights stay in host memory: %s", error)

    def _end_turn(self) -> None:
        if self._closed:
            self._loop.forget_all(EngineClosedError("The engine was closed."), FinishReason.ABORT)
            give_back(self._groups[0].device)

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineClosedError("The engine was closed; make a new one with `from_pretrained` or `from_model`.")
        if self._asleep:
            raise EngineClosedError("The engine sleeps; call `engine.wake_up()` first.")
        if self.is_forked:
            raise EngineClosedError(
                "The engine does not survive a fork: its pool and locks belong to another process. Load the model in "
                "this process, or start processes with the 'spawn' method."
            )

    def _make_runner(self) -> ModelRunner:
        plan = self.plan
        runner = ModelRunner(
            self.model,
            self._groups,
            self.backend,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=plan.max_model_len,
            tiled=plan.call_layout == "tiles",
            forwards=self._compiled or self._native,
            graphs=graph_settings(plan, self._groups, self.backend, self._note),
        )
        runner.capture_graphs()
        return runner

    @property
    def _note(self) -> Callable[[str], None]:
        return functools.partial(_take_note, weakref.ref(self))

    def _forget_model(self) -> None:
        self._loop.forget_model()
        for forwards in (self._compiled, self._native):
            if forwards is not None:
                forwards.clear()


def _take_note(engine: weakref.ref[Engine], note: str) -> None:
    """Adds what was found out after the plan was made."""
    logger.warning("%s", note)
    found = engine()
    if found is not None:
        found.plan = dataclasses.replace(found.plan, notes=(*found.plan.notes, note))
