"""Whoever waits for a request runs the steps, for everybody: the part of an engine that knows threads."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from .answer import RequestState
from .step_loop import StepLoop
from .turns import Turns

if TYPE_CHECKING:
    from .live_requests import LiveRequests
    from .structured.grammars import Grammars


class StepDriver:
    """Waiting for requests, and ending them. There is no thread behind it: several waiting threads take turns."""

    live: LiveRequests
    _loop: StepLoop
    _turns: Turns
    _asleep: bool
    _closed: bool

    @property
    def grammars(self) -> Grammars:
        """Returns the grammars of structured outputs."""
        return self.live.grammars

    def step(self) -> bool:
        """Runs one step.

        Returns:
            `bool`: Whether there was anything to do.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Ends a request.

        Args:
            request_id (`str`):
                Which.
        """
        raise NotImplementedError

    def _check_usable(self) -> None:
        raise NotImplementedError

    @property
    def device_error(self) -> Exception | None:
        """Returns the accelerator's error after which this process can compute nothing more, if there was one."""
        return self._loop.device_error

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
            self._turns.run_until(any_finished, self.step)
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
        self._turns.run_until(lambda: state.finished or (news is not None and news()), self.step)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Runs steps, or lets another thread run them, until a condition holds.

        Args:
            done (`Callable[[], bool]`):
                The condition.
        """
        self._turns.run_until(done, self.step)

    def end(self, states: Sequence[RequestState]) -> None:
        """Ends requests whose caller has all that it wanted, and waits until they have ended.

        Args:
            states (`Sequence[RequestState]`):
                The requests; those that have ended already are fine.
        """
        unfinished = [state for state in states if not state.finished]
        if unfinished and not self._closed:
            self._loop.inbox.append(lambda: self.live.end(unfinished))
            self._drain_until_finished(unfinished)

    def _drain_until_finished(self, states: Sequence[RequestState]) -> None:
        """Inside a step nobody can wait for its end, and at the interpreter's end nobody need: it is left at asking."""
        if not sys.is_finalizing() and not self._turns.is_mine():
            self._turns.run_until(lambda: all(state.finished for state in states), self._loop.drain_inbox)

    def serve(self, stop: threading.Event, after_step: Callable[[], None] = lambda: None) -> None:
        """Runs steps whenever there is something to do, until told to stop. For a thread of its own.

        Args:
            stop (`threading.Event`):
                Ends it; follow `stop.set()` with `wake()`.
            after_step (`Callable[[], None]`, defaults to nothing):
                Called after each step.
        """

        def step() -> bool:
            worked = self.step()
            after_step()
            return worked

        while not stop.is_set():
            with self._turns.mutex:
                while not (stop.is_set() or self._closed or (self._has_work() and not self._asleep)):
                    self._turns.lock.wait()
            self._check_usable()
            self._turns.run_until(lambda: stop.is_set() or not self._has_work(), step)

    def _has_work(self) -> bool:
        return bool(self.live.states or self._loop.inbox)

    def wake(self) -> None:
        """Makes every waiting thread look again at what it waits for."""
        self._turns.notify()

    def abort_all(self, states: Sequence[RequestState] | None = None) -> None:
        """Ends requests and waits until they have ended; their answers so far stay.

        Args:
            states (`Sequence[RequestState]`, *optional*):
                The requests; those that have ended already are fine. By default all.
        """
        states = list(self.live.states.values()) if states is None else states
        unfinished = [state for state in states if not state.finished]
        for state in unfinished:
            self.abort(state.request_id)
        if unfinished and not self._closed:
            self._drain_until_finished(unfinished)
