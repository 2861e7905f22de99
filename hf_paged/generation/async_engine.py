"""`AsyncEngine`: an engine with a thread of its own, for programs whose requests come and go (servers, agents)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

from ..errors import EngineClosedError, EngineDiedError, InvalidRequestError
from . import exit_guard
from .answer import RequestState
from .answer_stream import AnswerDelta, AnswerStream, Courier
from .outputs import RequestOutput
from .request import NO_EXTRAS, RequestExtras
from .sampling.params import SamplingParams

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT = 10.0


class _DeviceLost(BaseException):
    """Ends the thread: an accelerator that has failed fails for the rest of the process's life."""


class AsyncEngine:
    """Runs a paged model's engine in a thread and hands out results in event loops.

        event loop      submit ->| inbox |                        | <- one wake-up a step: news of all streams
        engine thread            | step | step | step | ......... |

    Args:
        model (`PreTrainedModel`):
            A paged model; it is kept alive.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For prompts given as text, texts of answers and stop strings.
        on_death (`Callable[[BaseException], None]`, *optional*):
            Called, by the dying thread, if the engine's thread ends without having been told to.

    Raises:
        UnsupportedModelError: If the paged engine cannot run this model.
        InvalidRequestError: If the model is not a paged one.

    Example:

    ```python
    engine = AsyncEngine(model, tokenizer=tokenizer)
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=50)):
        print(output.outputs[0].text)
    engine.close()
    ```
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, on_death: Callable[[BaseException], None] | None = None):
        if not hasattr(model, "_paged_refusal"):
            raise InvalidRequestError(
                f"`model` must be a paged model, got {type(model).__name__}; make one with "
                "`AutoPagedModelForCausalLM.from_pretrained(name)` or `.from_model(model)`."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.engine = model.engine
        self.cause: BaseException | None = None
        self._on_death = on_death
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._live: dict[int, AnswerStream] = {}
        self._orphans: list[RequestState] = []  # what ran when the thread died
        self._couriers: dict[asyncio.AbstractEventLoop, Courier] = {}
        self._last_sign = time.monotonic()

    # ------------------------------------------------------------------ the thread

    def start(self) -> None:
        """Starts the thread; `submit` does so by itself. Safe to call twice, and before the first request.

        Raises:
            EngineClosedError: If the engine was closed.
            EngineDiedError: If its thread has died.
        """
        with self._lock:
            if self._stop.is_set():
                raise EngineClosedError("This AsyncEngine was closed; make a new one.")
            if self.cause is not None:
                raise self._death()
            if self._thread is None:
                self._last_sign = time.monotonic()
                self._thread = threading.Thread(target=self._run, name="hf_paged-engine", daemon=True)
                self._thread.start()
                exit_guard.guard(self)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self.engine.serve(self._stop, self._after_step)
                except EngineClosedError:  # also what an engine says that has just gone to sleep
                    if self.engine.is_closed:
                        return
                except Exception:
                    # Requests of the step have failed with the cause; the engine itself is usable.
                    logger.exception("a step of the engine failed")
                finally:
                    self._after_step()
        except _DeviceLost:
            assert self.engine.device_error is not None, "what it stands for"
            self._die(self.engine.device_error)
        except BaseException as error:
            self._die(error)

    def _after_step(self) -> None:
        self._last_sign = time.monotonic()
        for courier in list(self._couriers.values()):
            courier.depart()
        if self.engine.device_error is not None and self.cause is None:
            raise _DeviceLost

    def _die(self, cause: BaseException) -> None:
        """The thread ends, and with it whatever was running: nobody is left waiting."""
        self.cause = cause
        logger.critical("The engine's thread has ended: %s: %s", type(cause).__name__, cause)
        for stream in list(self._live.values()):
            if stream.state is not None:
                self._orphans.append(stream.state)
            stream.fail(self._death())
        self._after_step()
        if self._on_death is not None:
            self._on_death(cause)

    def _death(self) -> EngineDiedError:
        error = EngineDiedError(f"The engine's thread has ended: {type(self.cause).__name__}: {self.cause}")
        error.__cause__ = self.cause
        return error

    @property
    def is_alive(self) -> bool:
        """Returns whether requests are taken and run: true before the first one, false once closed or dead."""
        if self._stop.is_set() or self.cause is not None or self.engine.is_closed:
            return False
        return self._thread is None or self._thread.is_alive()

    @property
    def seconds_since_step(self) -> float:
        """Returns how long the step under way has taken so far; 0 while there is nothing to do."""
        return time.monotonic() - self._last_sign if self._live else 0.0

    @property
    def num_running(self) -> int:
        """Returns the sequences that run."""
        return self.engine.live.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Returns the requests that have not been started yet, and those that lost their blocks."""
        return max(self.engine.live.scheduler.num_waiting, len(self._unstarted()))

    @property
    def num_waiting_tokens(self) -> int:
        """Returns the prompt tokens of the requests that have not been started yet."""
        return sum(len(stream.prompt_token_ids) for stream in self._unstarted())

    def _unstarted(self) -> list[AnswerStream]:
        return [stream for stream in list(self._live.values()) if not stream.has_started]

    # ------------------------------------------------------------------ requests

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        extra_keys: tuple = (),
        extras: RequestExtras = NO_EXTRAS,
        stream: bool = True,
        deadline: float | None = None,
        arrived: float | None = None,
    ) -> AnswerStream:
        """Queues a request; to be called in a running event loop, in which the answer is then read.

        Args:
            prompt_token_ids (`Sequence[int]`):
                The prompt.
            sampling_params (`SamplingParams`, *optional*):
                How to sample.
            prompt (`str`, *optional*):
                The prompt's text, to be handed back.
            request_id (`str`, *optional*):
                Unique among live requests; a new one by default.
            priority (`int`, defaults to 0):
                Lower runs earlier under the priority policy.
            extra_keys (`tuple`, defaults to `()`):
                Requests share cached prompts only with requests of equal keys (a tenant's salt, ...).
            extras (`RequestExtras`, defaults to none):
                What the request asks for beside its parameters.
            stream (`bool`, defaults to `True`):
                Whether deltas are read, or the whole answer only: that costs less.
            deadline (`float`, *optional*):
                Seconds after which the request is aborted.
            arrived (`float`, *optional*):
                When these began, by `time.monotonic()`; now by default.

        Returns:
            `AnswerStream`: Reads the answer, and ends the request.

        Raises:
            InvalidRequestError: If something is wrong with the request.
            QueueFullError: If too many requests wait.
            EngineClosedError: If the engine was closed or is dead.
        """
        self.start()
        courier = self._courier(asyncio.get_running_loop())
        if not self._live:
            self._last_sign = time.monotonic()
        answers = AnswerStream(courier, self.engine.abort, self._live, prompt_token_ids)
        try:
            state = self.engine.add_request(
                prompt_token_ids,
                sampling_params,
                request_id=request_id,
                prompt=prompt,
                priority=priority,
                extra_keys=extra_keys,
                tokenizer=self.tokenizer,
                on_update=answers.take,
                stream=stream,
                extras=extras,
            )
        except BaseException:
            answers.withdraw()
            raise
        answers.begin(state, deadline, arrived)
        if self.cause is not None:  # it died meanwhile, perhaps before it could see this request
            self._orphans.append(state)
            answers.fail(self._death())
        elif self._stop.is_set():  # closed meanwhile, likewise
            self.engine.abort_all([state])
            self._after_step()
        return answers

    def _courier(self, loop: asyncio.AbstractEventLoop) -> Courier:
        courier = self._couriers.get(loop)
        if courier is None:
            for closed in [loop for loop in self._couriers if loop.is_closed()]:
                del self._couriers[closed]
            thread = self._thread
            courier = self._couriers[loop] = Courier(loop, thread.ident if thread is not None else None)
        return courier

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        extra_keys: tuple = (),
        output_kind: Literal["cumulative", "delta", "final"] = "cumulative",
    ) -> AsyncIterator[RequestOutput]:
        """Answers one prompt and yields outputs as tokens come. Leaving the loop early aborts the request.

        Args:
            prompt (`str` or `Sequence[int]`):
                Text, or token ids.
            sampling_params (`SamplingParams`, *optional*):
                How to sample.
            request_id (`str`, *optional*):
                Unique among live requests; a new one by default.
            priority (`int`, defaults to 0):
                Lower runs earlier under the priority policy.
            extra_keys (`tuple`, defaults to `()`):
                Requests share cached prompts only with requests of equal keys (a tenant's salt, ...).
            output_kind (`str`, defaults to `"cumulative"`):
                `"cumulative"`: all so far; `"delta"`: what is new; `"final"`: only the finished output.

        Yields:
            `RequestOutput`: Until one is `finished`.

        Raises:
            InvalidRequestError: If something is wrong with the request.
            RequestAbortedError: If somebody aborted it.
            EngineError: If a step failed; the cause is attached.
        """
        if output_kind not in ("cumulative", "delta", "final"):
            raise InvalidRequestError(f"`output_kind` must be 'cumulative', 'delta' or 'final', got {output_kind!r}.")
        text, tokens = self._tokenize(prompt)
        async with self.submit(
            tokens,
            sampling_params,
            prompt=text,
            request_id=request_id,
            priority=priority,
            extra_keys=extra_keys,
            stream=output_kind != "final",
        ) as answers:
            if output_kind == "final":
                yield await answers.output()
                return
            so_far: dict[int, AnswerDelta] | None = {} if output_kind == "cumulative" else None
            async for deltas in answers:
                yield answers.outputs_of(deltas, so_far)

    def _tokenize(self, prompt: str | Sequence[int]) -> tuple[str | None, Sequence[int]]:
        if not isinstance(prompt, str):
            return None, prompt
        if self.tokenizer is None:
            raise InvalidRequestError("`prompt` is a text, and the engine was given no tokenizer.")
        return prompt, self.tokenizer(prompt)["input_ids"]

    async def abort(self, request_id: str) -> None:
        """Ends a request; unknown and finished ones are ignored.

        Args:
            request_id (`str`):
                Which.
        """
        self.engine.abort(request_id)

    def abort_all(self, error: BaseException | None = None) -> None:
        """Ends all requests that are read in event loops, without waiting for that.

        Args:
            error (`BaseException`, *optional*):
                What their readers are told; `RequestAbortedError` by default.
        """
        for stream in list(self._live.values()):
            if stream.state is not None:
                stream.abort(error)

    def close(self) -> None:
        """Ends the thread; streams that are still running are aborted. Safe to call twice."""
        self._stop.set()
        self.engine.wake()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        states = [stream.state for stream in list(self._live.values()) if stream.state is not None]
        self.engine.abort_all(states + self._orphans)
        self._after_step()

    def end_at_exit(self) -> None:
        """Ends the thread, for the end of the interpreter; waits ten seconds at most."""
        self._stop.set()
        self.engine.wake()
        if self._thread is not None:
            self._thread.join(_EXIT_TIMEOUT)
