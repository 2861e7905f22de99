"""Steps that overlap: the next one is put together and launched while the device is busy with the one before.

    device   | step 0        | step 1        | step 2        |
    host     | 0 | 1 | wait  | read 0, 2 | wait  | read 1, 3 | ...

The tokens of a step are chosen on the device and stay there for the next one, whose inputs are gathered from them; the
host reads them one step later. It then finds that some requests have ended, by a stop token, a stop string or an abort.
What the step under way computes of those is thrown away, and their blocks are free when that step is behind. All work
of a device is done in order, so whoever gets the blocks writes to them later.

While a request is there that needs the host between two tokens (`Request.needs_host_tokens`), each step is read before
another is put together, as by `StepLoop`.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable

from ..errors import EngineError
from .live_requests import LiveRequests, StepTokens
from .model_runner import ModelRunner, StepHandle
from .outputs import SamplerOutput, StepResult
from .request import FinishReason
from .sampling.sampler import Sampler
from .step import SchedulerOutput
from .step_loop import StepLoop
from .structured.masks import MaskFill
from .weights import WeightWatch

DEPTH = 2  # steps on the device: one that runs and one behind it


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """A step on its way.

    Args:
        output (`SchedulerOutput`):
            What it does.
        tokens (`StepTokens`):
            Who gets a token.
        handle (`StepHandle`, *optional*):
            What the runner returned.
        error (`Exception`, *optional*):
            What it raised instead.
        is_open (`bool`, defaults to `False`):
            Whether another step may be put together before this one is read.
        is_assumed (`bool`, defaults to `False`):
            Whether the scheduler has gone on already.
        fill (`MaskFill`, *optional*):
            The masks of requests with a grammar.
    """

    output: SchedulerOutput
    tokens: StepTokens
    handle: StepHandle | None = None
    error: Exception | None = None
    is_open: bool = False
    is_assumed: bool = False
    fill: MaskFill | None = None


class AsyncStepLoop(StepLoop):
    """Runs the steps of an engine, one of them ahead of what the host knows.

    Each call of `step` keeps the device supplied and then reads one step, so callers see what `StepLoop` shows them.

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
        super().__init__(live, sampler, make_runner, watch)
        self._flights: collections.deque[Flight] = collections.deque()

    def step(self) -> bool:
        """Launches what can be launched and reads the oldest step.

        Returns:
            `bool`: Whether there was anything to do.
        """
        with self._bookkeeping():
            if self.live.scheduler.recover(self._flights[-1].output if self._flights else None):
                self._close_flights()
            self._drain()
        while self._may_launch() and self._launch():
            pass
        if not self._flights:
            return False
        self._read()
        with self._bookkeeping():
            self._let_go()
        return True

    def _drain(self) -> bool:
        """Does what was posted since the last step, and forgets steps that nobody waits for."""
        worked = super()._drain()
        self._let_go()
        return worked

    def drop_runner(self) -> None:
        """Frees the pool, at once."""
        self._flights.clear()
        super().drop_runner()

    def forget_all(self, error: EngineError, reason: FinishReason, keep_posted: bool = False) -> None:
        """Ends all requests and frees the pool, without asking the scheduler.

        Args:
            error (`EngineError`):
                What those who wait are told.
            reason (`FinishReason`):
                Why the requests ended.
            keep_posted (`bool`, defaults to `False`):
                Whether what was posted and not done yet stays.
        """
        self._flights.clear()
        super().forget_all(error, reason, keep_posted)

    # ------------------------------------------------------------------ launching

    def _may_launch(self) -> bool:
        if not self._flights:
            return True
        is_open = all(flight.is_open for flight in self._flights) and self._isolation.group is None
        return len(self._flights) < DEPTH and is_open and not self.live.needs_host

    def _launch(self) -> bool:
        """Puts the next step together and hands it to the device; returns whether there is one."""
        live, started = self.live, time.perf_counter()
        with self._bookkeeping():
            if self._flights and not self._flights[-1].is_assumed:
                live.scheduler.assume(self._flights[-1].output)
                self._flights[-1].is_assumed = True
            output = self._schedule()
        if not output.scheduled:
            return False
        scheduled = time.perf_counter()
        try:
            flight = Flight(output, live.tokens_of(output))
            self._hand_over(flight)
        except BaseException:  # Ctrl-C: the step did not happen
            live.scheduler.cancel(output)
            self._close_flights()
            raise
        self._flights.append(flight)
        inputs = flight.handle.seconds_inputs if flight.handle is not None else 0.0
        live.counters.seconds_schedule += scheduled - started
        live.counters.seconds_inputs += inputs
        live.counters.seconds_model += time.perf_counter() - scheduled - inputs
        return True

    def _close_flights(self) -> None:
        """A launched step is taken back: the runner may have its tokens where those of the one before should be."""
        for flight in self._flights:
            flight.is_open = False

    def _hand_over(self, flight: Flight) -> None:
        tokens, embeds = flight.tokens, self.live.embeds_of(flight.output)
        try:
            runner = self.ready_runner()
            if not self.live.needs_host:
                flight.handle = runner.launch(
                    flight.output,
                    embeds,
                    lambda logits, sent: self.sampler.start(logits, tokens.requests, tokens.rows, sent),
                    self.sampler.wanted(tokens.requests, tokens.rows),
                )
                flight.is_open = True
            else:
                flight.fill = self.live.grammars.masks.start(tokens.requests)
                flight.handle = runner.launch(flight.output, embeds)
        except Exception as error:  # is taken in when the step before has been read
            flight.error = error

    # ------------------------------------------------------------------ reading

    def _read(self) -> None:
        """Waits for the oldest step and takes in what it did."""
        live, started, flight = self.live, time.perf_counter(), self._flights[0]
        try:
            if flight.error is not None:
                raise flight.error
            runner = self.ready_runner()
            assert flight.handle is not None, "a step without a handle has an error"
            result = runner.collect(flight.handle)
            modelled = time.perf_counter()
            tokens, choice = self._choose(flight, result)
            refused = live.take_prompt_logprobs(flight.output, result)
        except Exception as error:
            self._fail(flight, error)
            return
        except BaseException:  # Ctrl-C: the newest step did not happen; the one before is read in the next call
            if not self._flights[-1].is_assumed:
                live.scheduler.cancel(self._flights.pop().output)
                self._close_flights()
            raise
        sampled = time.perf_counter()
        with self._bookkeeping():
            self._flights.popleft()
            self._watch.confirm(live.block_manager)
            live.collect(flight.output, result, tokens, choice, refused, runner.read)
            self._isolation.settle()
        live.counters.seconds_model += modelled - started
        live.counters.seconds_sample += sampled - modelled
        live.counters.seconds_collect += time.perf_counter() - sampled

    def _choose(self, flight: Flight, result: StepResult) -> tuple[StepTokens, SamplerOutput]:
        """Returns who is still there, and their tokens."""
        tokens = flight.tokens
        places = [place for place, request in enumerate(tokens.requests) if not request.is_finished]
        requests, rows = [tokens.requests[place] for place in places], [tokens.rows[place] for place in places]
        there, chosen = StepTokens(requests, rows, tokens.chosen_elsewhere), result.chosen
        if chosen is None:
            return there, self.live.grammars.masks.sample(self.sampler, result.logits, requests, rows, flight.fill)
        failed = set(chosen.failed_rows)
        token_ids = [chosen.token_ids[place] for place in places]
        return there, SamplerOutput(token_ids, failed_rows=[row for row, place in enumerate(places) if place in failed])

    def _fail(self, flight: Flight, error: Exception) -> None:
        """A step has failed, and with it what was launched behind it, whose inputs it should have computed."""
        self._flights.popleft()
        while self._flights:
            self.live.scheduler.cancel(self._flights.pop().output)
        self._take_failure(flight.output, error)

    def _let_go(self) -> None:
        """Forgets the steps under way if all of their requests have ended and there is nobody else."""
        if self.live.scheduler.has_unfinished:
            return
        while self._flights:
            flight = self._flights.popleft()
            if flight.error is None:
                self.live.scheduler.update_from_output(flight.output, {})
            else:
                self.live.scheduler.cancel(flight.output)
