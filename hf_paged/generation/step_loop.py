"""One engine step after the other: what came in, schedule, launch, sample, collect. Run by one thread at a time."""

from __future__ import annotations

import collections
import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from ..errors import EngineError, StepFailedError, StepMemoryError
from .isolation import Isolation
from .live_requests import Arrival, LiveRequests
from .model_runner import ModelRunner
from .request import FinishReason
from .sampling.sampler import Sampler
from .step import SchedulerOutput
from .weights import WeightWatch

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs the steps of an engine.

    Args:
        live (`LiveRequests`):
            The requests.
        sampler (`Sampler`):
            Chooses their tokens.
        make_runner (`Callable[[], ModelRunner]`):
            Makes the runner with its pool, when there is something to run.
        watch (`WeightWatch`):
            Notices changes of the model's weights.
    """

    def __init__(
        self,
        live: LiveRequests,
        sampler: Sampler,
        make_runner: Callable[[], ModelRunner],
        watch: WeightWatch,
    ):
        self.live = live
        self.sampler = sampler
        self.runner: ModelRunner | None = None
        self.inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._make_runner = make_runner
        self._watch = watch
        self._isolation = Isolation()
        self.device_error: Exception | None = None  # after which nothing can be computed in this process
        self._is_torn = False  # bookkeeping has begun and has not come to its end

    def step(self) -> bool:
        """Runs one step.

        Returns:
            `bool`: Whether there was anything to do.
        """
        live, started = self.live, time.perf_counter()
        with self._bookkeeping():
            live.scheduler.recover()
            self._drain()
            output = self._schedule()
        if not output.scheduled:
            return False
        scheduled = time.perf_counter()
        try:
            runner, masks, tokens = self.ready_runner(), live.grammars.masks, live.tokens_of(output)
            fill = masks.start(tokens.requests)
            handle = runner.launch(output, live.embeds_of(output))
            result = runner.collect(handle)
            modelled = time.perf_counter()
            choice = masks.sample(self.sampler, result.logits, tokens.requests, tokens.rows, fill)
            refused = live.take_prompt_logprobs(output, result)
        except Exception as error:
            self._take_failure(output, error)
            return True
        except BaseException:  # Ctrl-C: the step did not happen; other threads' requests run it again
            live.scheduler.cancel(output)
            raise
        sampled = time.perf_counter()
        with self._bookkeeping():
            self._watch.confirm(live.block_manager)
            live.collect(output, result, tokens, choice, refused, runner.read)
            self._isolation.settle()
        counters = live.counters
        counters.seconds_schedule += scheduled - started
        counters.seconds_inputs += handle.seconds_inputs
        counters.seconds_model += modelled - scheduled - handle.seconds_inputs
        counters.seconds_sample += sampled - modelled
        counters.seconds_collect += time.perf_counter() - sampled
        return True

    def drain_inbox(self) -> bool:
        """Does what was posted since the last step.

        Returns:
            `bool`: Whether there was anything to do.
        """
        with self._bookkeeping():
            return self._drain()

    @contextlib.contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """If what is done here is interrupted, no block table can be trusted: every request fails.

        A second Ctrl-C may interrupt that, too; it is then completed before anything else is done.
        """
        if self._is_torn:
            self._start_over(None)
        self._is_torn = True
        try:
            yield
        except BaseException as error:
            self._start_over(error)
            raise
        self._is_torn = False

    def _drain(self) -> bool:
        worked = False
        while self.inbox:
            self.inbox.popleft()()
            worked = True
        return worked

    def ready_runner(self) -> ModelRunner:
        """Returns the runner, made at the first use."""
        if self.runner is None:
            self.runner = self._make_runner()
        return self.runner

    def drop_runner(self) -> None:
        """Frees the pool, at once."""
        self.runner = None

    def forget_model(self) -> None:
        """Lets go of everything that belongs to the model."""
        self.drop_runner()
        self._watch.clear()

    def forget_all(self, error: EngineError, reason: FinishReason, keep_posted: bool = False) -> None:
        """Ends all requests and frees the pool, without asking the scheduler.

        Args:
            error (`EngineError`):
                What those who wait are told.
            reason (`FinishReason`):
                Why the requests ended.
            keep_posted (`bool`, defaults to `False`):
                Whether what was posted and not done yet stays, requests among it.
        """
        self._is_torn = True
        if not keep_posted:
            self.inbox.clear()
        arriving = [action.state for action in tuple(self.inbox) if isinstance(action, Arrival)]
        self.runner = None
        self._isolation.clear()
        self.live.forget_all(error, reason, arriving)
        self._is_torn = False

    def _schedule(self) -> SchedulerOutput:
        scheduler = self.live.scheduler
        if scheduler.num_waiting:  # else nobody is admitted
            self._watch.guard(self.live.block_manager)
        while True:
            scheduler.focus = self._isolation.group
            output = scheduler.schedule()
            if output.scheduled or scheduler.focus is None:
                return output
            self._isolation.settle()  # they have ended meanwhile

    def _take_failure(self, output: SchedulerOutput, error: Exception) -> None:
        """A step has raised: it is run again, smaller or in parts, if that may help; else its requests fail."""
        is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
        is_lost = isinstance(error, torch.AcceleratorError)  # no kernel of this process runs any more
        if is_lost:
            self.device_error = error
        retries = self._back_off if is_out_of_memory else self._run_apart
        if is_lost or not retries(output, error):
            self.live.fail_step(output, error, StepMemoryError if is_out_of_memory else StepFailedError)
        if self.runner is not None:
            self.runner.cache.abandon()

    def _run_apart(self, output: SchedulerOutput, error: Exception) -> bool:
        """Runs the requests of a step that raised again in halves, to fail only those at fault."""
        if len(output.scheduled) < 2 or not self.live.scheduler.take_back(output):
            self._isolation.settle()
            return False
        level = logging.WARNING if self._isolation.group is None else logging.DEBUG
        logger.log(
            level,
            "A step with %d requests failed (%s: %s); they are run again apart, to see which of them is at fault.",
            len(output.scheduled),
            type(error).__name__,
            error,
        )
        self._isolation.split([share.request_id for share in output.scheduled])
        self.live.counters.num_failed_steps += 1
        return True

    def _back_off(self, output: SchedulerOutput, error: Exception) -> bool:
        traceback.clear_frames(error.__traceback__)  # whose variables hold what filled the memory
        if self.runner is None or not self.live.scheduler.back_off(output):  # the pool itself does not get smaller
            return False
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        throttle = self.live.scheduler.throttle
        logger.warning(
            "A step with %d requests and %d tokens ran out of memory; the next ones have at most %d and %d.",
            len(output.scheduled),
            output.num_scheduled_tokens,
            throttle.num_seqs,
            throttle.num_tokens,
        )
        self.live.counters.num_shrunk_steps += 1
        return True

    def _start_over(self, cause: BaseException | None) -> None:
        error = EngineError("The engine was interrupted between two steps and started over.")
        error.__cause__ = cause
        self.forget_all(error, FinishReason.ERROR, keep_posted=True)
