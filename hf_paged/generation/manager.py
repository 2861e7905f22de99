"""`ContinuousBatchingManager`: requests that come and go, with the methods of Transformers' class of that name."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from ..errors import EngineClosedError, EngineError, InvalidRequestError
from . import exit_guard
from .answer import RequestState
from .batch_planning import PlannedRequest, Planner, Wishes, prompts_of
from .batching_settings import BatchingSettings
from .engine import Engine
from .hf_generate import engine_obstacle
from .loop_requests import LoopPool, LoopRequest
from .manager_requests import LiveRequest, RequestTable
from .manager_status import BackgroundThreadStatus
from .outputs import GenerationOutput
from .request import HiddenStatesWanted
from .result_router import Handler, ResultRouter, running_loop
from .sampling.params import SamplingParams

logger = logging.getLogger(__name__)

_QUEUE_TIMEOUT = 10.0  # Transformers' own
_EXIT_TIMEOUT = 10.0

# Managers that were stopped with `keep_for_next_session`. They do not keep their model alive.
_kept: weakref.WeakKeyDictionary[torch.nn.Module, ContinuousBatchingManager] = weakref.WeakKeyDictionary()


class ContinuousBatchingManager:
    """Answers requests in a thread of its own, on the model's paged engine.

    Made by `model.init_continuous_batching()` or `model.continuous_batching_context_manager()`. Calls of `generate` and
    `generate_batch` meanwhile share the engine, its steps and its prefix cache.

    Args:
        model (`PreTrainedModel`):
            A paged model; it is kept alive.
        generation_config (`GenerationConfig`, *optional*):
            For requests that bring none; open fields come from `model.generation_config`.
        continuous_batching_config (`ContinuousBatchingConfig`, *optional*):
            Transformers' settings. What differs from those of the model's engine (`num_blocks`, `max_batch_tokens`,
            ...) makes one more engine.
        workload_hints (`WorkloadHints`, *optional*):
            Accepted for Transformers' sake: nothing here is sized in advance.

    Raises:
        UnsupportedModelError: If the paged engine cannot run this model.

    Example:

    ```python
    with model.continuous_batching_context_manager() as manager:
        request_id = manager.add_request("Once upon a time", tokenizer=tokenizer, max_new_tokens=30, streaming=True)
        for output in manager.request_id_iter(request_id):
            print(output.generated_tokens)
    ```
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ):
        _check_config(generation_config)
        self.generation_config = generation_config if generation_config is not None else model.generation_config
        self.continuous_batching_config = continuous_batching_config
        self.background_thread_status = BackgroundThreadStatus()
        self.warmed_up = False
        self.is_tp_driver = True
        self._given_config = generation_config
        self._settings = BatchingSettings.of(
            continuous_batching_config or getattr(self.generation_config, "continuous_batching_config", None)
        )
        self._model = weakref.ref(model)
        self._engine = self._settings.engine(model)
        self._kept_alive: Any = model
        self._router = ResultRouter()
        self._loops = LoopPool()
        self._requests = RequestTable(self._settings.max_queue_size)
        self._lock = self._requests.lock
        self._unstarted_loops: list[LoopRequest] = []
        weakref.finalize(self, self._requests.cancel_all).atexit = False
        self._stop = threading.Event()
        self._generation_thread: threading.Thread | None = None
        self._keep_pool = False
        self._destroyed = False

    @property
    def model(self) -> Any:
        """Returns the model."""
        return self._model()

    @property
    def engine(self) -> Engine:
        """Returns the engine that runs the requests."""
        if self._engine.is_closed and not self.is_running():  # `model.to(...)` closes it, and makes another
            self._engine = self._settings.engine(self.model)
        return self._engine

    @property
    def num_return_sequences(self) -> int:
        """Returns the answers to each request that does not ask for another number."""
        return self.generation_config.num_return_sequences or 1

    @property
    def batch_processor(self) -> Any:
        """Returns the engine's running requests, with their `scheduler`, for monitoring; `None` before the start."""
        return self.engine.live if self._generation_thread is not None else None

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Starts the thread. Safe to call twice, before the first request, and after `stop`.

        Raises:
            EngineClosedError: After `destroy`.
        """
        with self._lock:
            if self._destroyed:
                raise EngineClosedError("The manager was destroyed; make a new one with `init_continuous_batching`.")
            if self.is_running():
                logger.warning("The manager is running already.")
                return
            self.background_thread_status.clear()
            self._keep_pool = False
            self._kept_alive = self.model
            self._stop = threading.Event()
            arguments = (self.engine, self._stop, torch.is_inference_mode_enabled())
            self._generation_thread = threading.Thread(
                target=self._run, args=arguments, name="hf_paged-manager", daemon=True
            )
            self._generation_thread.start()
            exit_guard.guard(self)
            for request in self._take_unstarted_loops():
                self._loops.submit(request, self.model)

    def is_running(self) -> bool:
        """Returns whether the thread is there."""
        return self._generation_thread is not None and self._generation_thread.is_alive()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Ends the thread as soon as all requests are answered, and frees the K/V pool unless others use it.

        Safe to call twice, and before the start: requests that nobody has run are cancelled then.

        Args:
            block (`bool`, defaults to `True`):
                Whether to wait for it.
            timeout (`float`, *optional*):
                Seconds to wait at most.
            keep_for_next_session (`bool`, defaults to `False`):
                Keep the pool, and let `model.init_continuous_batching()` return this manager.
            hard_stop (`bool`, defaults to `False`):
                Cancel the requests instead of answering them.

        Raises:
            EngineError: If the calling thread is inside `pause`, whose end the manager waits for.
        """
        if self._generation_thread is None:
            logger.info("The manager was not started.")
            self._cancel_unstarted()
            return
        if self._engine._turns.is_paused_by_me():
            raise EngineError("The manager cannot be stopped from inside a pause: leave `pause` before calling `stop`.")
        asked = time.perf_counter()
        status = self.background_thread_status
        with self._lock:
            self._keep_pool = keep_for_next_session
            status.request_stop(status.HARD_STOP if hard_stop else status.FLUSH_AND_STOP)
        if hard_stop:
            self._requests.cancel_all()
        self._end_if_done()
        if block:
            self.join(asked, timeout)
        if keep_for_next_session:
            _kept[self.model] = self

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Waits for the thread to end.

        Args:
            stop_trigger_time (`float`, *optional*):
                When it was asked to, in seconds of `time.perf_counter()`; for the log.
            timeout (`float`, *optional*):
                Seconds to wait at most.
        """
        thread = self._generation_thread
        if thread is None or thread is threading.current_thread() or self._engine._turns.is_mine():
            return  # from within a step the thread, which waits for its end, cannot be waited for
        thread.join(timeout)
        if thread.is_alive():
            logger.warning("The manager's thread did not end within %s seconds; it is still answering.", timeout)
            return
        if stop_trigger_time is not None:
            logger.debug("the manager stopped after %.2f s", time.perf_counter() - stop_trigger_time)
        with self._lock:
            if self._generation_thread is thread:
                self._generation_thread = None

    def destroy(self) -> None:
        """Stops for good, and frees the pool. Safe to call twice."""
        self.stop(block=True)
        self._destroyed = True
        if _kept.get(self.model) is self:
            del _kept[self.model]
        self._free_pool(self._engine)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Keeps the engine from running steps meanwhile, for a thread that changes the weights.

        Requests stay, with what has been computed for them. Several threads may pause at a time.

        Raises:
            EngineError: If the manager is not running, or the call comes from within a step.
        """
        if not self.is_running():
            raise EngineClosedError("The manager is not running, so there is nothing to pause.")
        with self._engine._turns.paused():
            yield

    def warmup(self) -> None:
        """Runs two steps, so that the first request does not wait for the pool, if the engine runs requests now."""
        if engine_obstacle(self.model) is None:
            self.engine.generate([[0]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, detokenize=False))
        self.warmed_up = True

    def end_at_exit(self) -> None:
        """Ends the thread, for the end of the interpreter; waits ten seconds at most."""
        if self.is_running():
            self.stop(hard_stop=True, timeout=_EXIT_TIMEOUT)

    def _run(self, engine: Engine, stop: threading.Event, inference_mode: bool) -> None:
        status = self.background_thread_status
        try:
            with torch.inference_mode(inference_mode):
                while not stop.is_set():
                    self._serve(engine, stop)
        except BaseException as error:
            logger.exception("the manager's thread died")
            status.record_fatal_error(error)
            self._requests.cancel_all()
        finally:
            status.mark_as_stopped()
            self._loops.close()
            if not self._keep_pool:
                self._free_pool(engine)
            else:
                self._kept_alive = None  # the model keeps the manager now
            self._router.wake()

    def _serve(self, engine: Engine, stop: threading.Event) -> None:
        try:
            engine.serve(stop)
        except EngineClosedError:
            if engine.is_closed:
                raise
        except Exception:
            logger.exception("a step of the engine failed")  # its requests know; the engine is usable

    def _end_if_done(self) -> None:
        with self._lock:
            stopping = self.background_thread_status.local_status != BackgroundThreadStatus.DONT_STOP
            if not stopping or len(self._requests):
                return
            self._stop.set()
        self._engine.wake()

    def _take_unstarted_loops(self) -> list[LoopRequest]:
        with self._lock:
            requests, self._unstarted_loops = self._unstarted_loops, []
        return requests

    def _cancel_unstarted(self) -> None:
        sides = [live.request for live in self._requests.cancel_all()]
        for request in self._take_unstarted_loops():
            request.run(self.model)  # it is cancelled, and says so
        turns = self._engine._turns
        if not (turns.is_mine() or turns.is_paused_by_me()):  # else the next step ends them
            self._engine.abort_all([side for side in sides if isinstance(side, RequestState)])

    def _free_pool(self, engine: Engine) -> None:
        if engine.is_closed:
            return
        try:
            engine.release()
        except EngineError as error:
            logger.debug("the K/V pool stays: %s", error)

    # ------------------------------------------------------------------ requests

    def add_request(  # noqa: PLR0913 - the signature is Transformers', and what it lacks
        self,
        input_ids: Any,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        tokenizer: Any = None,
        priority: int = 0,
        seed: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        hidden_states: HiddenStatesWanted | bool | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        queue_timeout: float = _QUEUE_TIMEOUT,
        **kwargs: Any,
    ) -> str:
        """Adds a request. Thread-safe; before `start` it waits.

        Args:
            input_ids (`Any`):
                Token ids, or, with a tokenizer, a text or a chat.
            request_id (`str`, *optional*):
                Unique among the manager's live requests; `req_<number>` by default.
            max_new_tokens (`int`, *optional*):
                Tokens of the answer at most.
            streaming (`bool`, defaults to `False`):
                Whether there is a result for each token, instead of one at the end.
            record_timestamps (`bool`, defaults to `False`):
                Whether results carry the time of each token.
            eos_token_id (`int` or `list[int]`, *optional*):
                Tokens that end the answer; -1 for none.
            generation_config (`GenerationConfig`, *optional*):
                Instead of the manager's.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                For texts, chats and stop strings.
            priority (`int`, defaults to 0):
                Lower runs earlier under the priority policy.
            seed (`int`, *optional*):
                Fixes what is sampled, whatever runs beside it.
            logprobs (`int`, *optional*):
                Log-probabilities of each token and of this many best ones; 0 for its own alone.
            prompt_logprobs (`int`, *optional*):
                The same for each token of the prompt.
            hidden_states (`HiddenStatesWanted` or `bool`, *optional*):
                Which hidden states come back with the answer.
            logits_processor (`LogitsProcessorList`, *optional*):
                Called for this request alone.
            stopping_criteria (`StoppingCriteriaList`, *optional*):
                Called for this request alone.
            queue_timeout (`float`, defaults to 10.0):
                Seconds to wait where `max_queue_size` requests are waiting already; none inside an event loop or a
                handler, which a wait would block.
            kwargs (`Any`):
                Fields of `GenerationConfig`, and further `Wishes`.

        Returns:
            `str`: The request's id.

        Raises:
            InvalidRequestError: If something is wrong with the request.
            NotSupportedError: If a field asks for something that a batch cannot give.
            QueueFullError: If too many requests wait.
            RequestAbortedError: If it is cancelled while it waits for room.
            EngineClosedError: If the manager is stopping or has stopped.
        """
        wishes = {
            "tokenizer": tokenizer,
            "priority": priority,
            "seed": seed,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "hidden_states": hidden_states,
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
        }
        fields = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        given = {name: value for name, value in {**wishes, **fields}.items() if value is not None}
        self._check_open()
        _check_config(generation_config)
        engine, wanted = self.engine, Wishes.take(self._settings.defaults() | kwargs | given)
        planner = Planner(self.model, engine, *wanted, exact_room=False)
        planned = planner.plan(input_ids, generation_config or self._given_config)
        log = planned.log(record_timestamps)
        live = LiveRequest(request_id, planned.num_answers, self._deliver, log, streaming=streaming)
        self._requests.add(live, self._check_open)
        try:
            can_wait = running_loop() is None and not engine._turns.is_mine()
            self._requests.wait_for_room(live, queue_timeout if can_wait else 0)
            if planned.params is None:
                self._start_loop(live, planned)
            else:
                self._start_on_engine(live, planned, engine)
        except BaseException:
            self._forget(live)
            raise
        return live.request_id

    def add_requests(
        self,
        inputs: Any,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Adds several requests.

        Args:
            inputs (`Any`):
                Prompts, as for `generate_batch`.
            max_new_tokens (`int`, *optional*):
                Tokens of each answer at most.
            streaming (`bool`, defaults to `False`):
                Whether there is a result for each token.
            record_timestamps (`bool`, defaults to `False`):
                Whether results carry the time of each token.
            generation_config (`GenerationConfig` or `Sequence[GenerationConfig]`, *optional*):
                One for all, or one for each.
            kwargs (`Any`):
                As for `add_request`, for all of them.

        Returns:
            `list[str]`: Their ids, in input order.

        Raises:
            InvalidRequestError: If one of them is wrong; those before it were added and are cancelled.
        """
        prompts = prompts_of(inputs)
        configs = [generation_config] * len(prompts)
        if generation_config is not None and not isinstance(generation_config, GenerationConfig):
            configs = list(generation_config)
        if len(configs) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts were given {len(configs)} generation configurations.")
        request_ids: list[str] = []
        try:
            for prompt, config in zip(prompts, configs, strict=True):
                request_ids.append(
                    self.add_request(
                        prompt,
                        max_new_tokens=max_new_tokens,
                        streaming=streaming,
                        record_timestamps=record_timestamps,
                        generation_config=config,  # type: ignore[arg-type]
                        **kwargs,
                    )
                )
        except BaseException:
            for request_id in request_ids:
                self.cancel_request(request_id)
            raise
        return request_ids

    def cancel_request(self, request_id: str) -> None:
        """Ends a request; its last result says so. Unknown and finished requests are ignored.

        Args:
            request_id (`str`):
                Which. The id of one of several answers ends them all.
        """
        self._requests.cancel(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Returns the next result.

        Args:
            request_id (`str`, *optional*):
                Of which request; by default of any that has no handler.
            timeout (`float`, *optional*):
                Seconds to wait at most.

        Returns:
            `GenerationOutput` or `None`: None if nothing came in time, or nothing can come: the manager is not running,
            or knows no such request.

        Raises:
            EngineError: If it would have to wait inside a handler or another callback, for which the step waits.
        """

        def expected() -> bool:
            can_come = self.is_running() and (request_id is None or self._requests.expects(request_id))
            if can_come and self._engine._turns.is_mine():
                raise EngineError("A handler cannot wait for a result: the step that brings it waits for the handler.")
            return can_come

        return self._router.take(request_id, timeout, expected)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yields results as they come, until the manager has stopped and all were taken."""
        while True:
            output = self.get_result(timeout=0.1)
            if output is not None:
                yield output
            elif not self.is_running():
                return

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yields the results of one request until it has ended.

        Args:
            request_id (`str`):
                Which.
        """
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Handler) -> None:
        """Sends a request's results to a function, until the request has ended. One that raises is logged.

        Args:
            request_id (`str`):
                Which; the request may be added later.
            callback (`Callable[[GenerationOutput], object]`):
                Called with each result on the running event loop, or, where there is none, in the thread that runs the
                engine's steps.
        """
        self._router.handle(request_id, callback, running_loop())

    # ------------------------------------------------------------------ inside

    def _check_open(self) -> None:
        reason = self.background_thread_status.can_accept_new_requests()
        if reason is not None or self._destroyed:
            raise EngineClosedError(f"No request is taken: {reason or 'the manager was destroyed'}; call `start()`.")

    def _forget(self, live: LiveRequest) -> None:
        self._requests.forget(live)
        self._end_if_done()
        self._router.wake()

    def _start_on_engine(self, live: LiveRequest, planned: PlannedRequest, engine: Engine) -> None:
        engine_id = uuid.uuid4().hex
        live.cancel_by(functools.partial(engine.abort, engine_id))
        state: RequestState = engine.add_request(
            planned.tokens,
            planned.seeded(self._settings.seed_of(live.number)),
            request_id=engine_id,
            priority=planned.wishes.priority,
            tokenizer=planned.wishes.tokenizer,
            extras=planned.extras,
            on_update=live.take_state,
        )
        live.watch(state)

    def _start_loop(self, live: LiveRequest, planned: PlannedRequest) -> None:
        request = LoopRequest(live.request_id, planned, live.take_loop, record_timestamps=live.log.times is not None)
        live.cancel_by(request.cancel)
        live.watch(request)
        with self._lock:
            if self._generation_thread is None:
                self._unstarted_loops.append(request)
                return
        self._loops.submit(request, self.model)

    def _deliver(self, live: LiveRequest, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self._router.deliver(output)
        if live.finished:
            self._forget(live)


def take_kept_manager(model: Any) -> ContinuousBatchingManager | None:
    """Returns the manager that was stopped with `keep_for_next_session`, if there is one; it is no longer kept.

    Args:
        model (`PreTrainedModel`):
            The paged model.
    """
    manager = _kept.pop(model, None)
    if manager is not None:
        manager._kept_alive = model
    return manager


def _check_config(config: Any) -> None:
    if config is not None and not isinstance(config, GenerationConfig):
        raise InvalidRequestError(f"`generation_config` must be a GenerationConfig, got {type(config).__name__}.")
