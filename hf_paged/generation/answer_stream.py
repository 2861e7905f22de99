"""Answers on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ..errors import DeadlineExceededError, RequestAbortedError
from .answer import Answer, RequestState
from .outputs import CompletionOutput, Logprob, RequestOutput
from .request import FinishReason, RequestMetrics

_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclasses.dataclass(slots=True)
class AnswerDelta:
    """What is new of one of a request's answers.

    Args:
        index (`int`):
            Which of the `n` answers.
        text (`str`):
            New text; characters of which bytes are missing come later.
        token_ids (`list[int]`):
            New tokens, the one that ended the answer included.
        logprobs (`list[dict[int, Logprob]]`, *optional*):
            For each new token, token id -> log-probability; `decoded_token` is not set.
        finish_reason (`str`, *optional*):
            `"stop"` or `"length"` with the last delta.
        stop_reason (`int` or `str`, *optional*):
            The stop token or stop string that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def append(self, later: AnswerDelta) -> None:
        """Takes in the next delta of the same answer.

        Args:
            later (`AnswerDelta`):
                What came after this one.
        """
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class Courier:
    """Wakes the readers of one event loop, all with one call for each step of the engine.

    Args:
        loop (`asyncio.AbstractEventLoop`):
            Where the readers are.
        engine_thread (`int`, *optional*):
            The thread that calls `depart` after each step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine_thread: int | None):
        self.loop = loop
        self._engine_thread = engine_thread
        self._news: collections.deque[AnswerStream] = collections.deque()
        self._called = False

    def carry(self, stream: AnswerStream) -> None:
        """Has a reader woken with the next departure; at once if the engine's own thread will not see to that.

        Args:
            stream (`AnswerStream`):
                Which has news.
        """
        self._news.append(stream)
        if threading.get_ident() != self._engine_thread:
            self.depart()

    def depart(self) -> None:
        """Wakes all readers that have news."""
        if self._news and not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # a closed loop has no readers
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # first: what is added from now on calls again, at worst for nothing
        while self._news:
            self._news.popleft().wake()


class AnswerStream:
    """The answers to one prompt as they come: an async iterator of lists of `AnswerDelta`.

    Each list has what came since the last one, at most one delta for each answer: a slow reader gets fewer, longer
    ones, and nobody waits for it. Leaving `async with stream` aborts the request, unless it has ended.

    Args:
        courier (`Courier`):
            Wakes the reader.
        abort (`Callable[[str], None]`):
            Ends a request of the engine, by its id.
        live (`dict[int, AnswerStream]`):
            The streams that have not ended; this one enters itself and leaves when it ends.
        prompt_token_ids (`Sequence[int]`):
            The prompt.
    """

    def __init__(
        self,
        courier: Courier,
        abort: Callable[[str], None],
        live: dict[int, AnswerStream],
        prompt_token_ids: Sequence[int],
    ):
        self.prompt_token_ids = prompt_token_ids
        self.state: RequestState | None = None
        # Called in the event loop when there is news; must not raise.
        self.observer: Callable[[AnswerStream], None] | None = None
        self._courier = courier
        self._abort = abort
        self._live = live
        self._arrived: collections.deque[list[AnswerDelta]] = collections.deque()
        self._sent: dict[int, tuple[int, int]] = {}  # tokens and characters, by answer
        self._ended = False
        self._error: BaseException | None = None
        self._abort_error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        live[id(self)] = self

    # ------------------------------------------------------------------ the engine's side

    def take(self, state: RequestState) -> None:
        """Takes in news; called by the thread that runs the steps.

        Args:
            state (`RequestState`):
                The request.
        """
        if self._ended:
            return
        self.state = state
        deltas = [delta for answer in state.answers if (delta := self._delta(answer)) is not None]
        if deltas:
            self._arrived.append(deltas)
        error = state.error
        if error is None and any(request.finish_reason is FinishReason.ABORT for request in state.group.requests):
            error = self._abort_error or RequestAbortedError(f"Request {state.request_id!r} was aborted.")
        if error is not None:
            self.fail(error)
        elif state.finished:
            self._end()
        elif deltas:
            self._courier.carry(self)

    def _delta(self, answer: Answer) -> AnswerDelta | None:
        request = answer.request
        num_tokens, num_chars = self._sent.get(request.branch, (0, 0))
        if num_tokens < 0:  # its last delta has been sent
            return None
        tokens, text = request.token_ids[request.num_prompt_tokens + num_tokens :], answer.text[num_chars:]
        finished = request.is_finished  # its text is complete then: callers are told after that
        reason = request.finish_reason.value if request.finish_reason in _GOOD_ENDS else None
        if not tokens and not text and reason is None:  # nothing new, or an end that the error tells of
            return None
        self._sent[request.branch] = (-1, 0) if finished else (num_tokens + len(tokens), num_chars + len(text))
        return AnswerDelta(
            request.branch,
            text,
            tokens,
            answer.logprobs[num_tokens:] if answer.logprobs is not None else None,
            reason,
            request.stop_reason if finished else None,
        )

    def fail(self, error: BaseException) -> None:
        """Ends the stream with an error, which its reader is told after what came before.

        Args:
            error (`BaseException`):
                What to tell.
        """
        if not self._ended:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._live.pop(id(self), None)
        self._courier.carry(self)

    # ------------------------------------------------------------------ the reader's side

    @property
    def request_id(self) -> str:
        """Returns the request's id."""
        return self._known_state.request_id

    @property
    def metrics(self) -> RequestMetrics:
        """Returns when what happened to the request; of its first answer, if there are several."""
        return self._known_state.group.requests[0].metrics

    @property
    def num_cached_tokens(self) -> int:
        """Returns how many of the prompt's tokens were in the prefix cache; known with the first delta."""
        return self.metrics.num_cached_tokens

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Returns the prompt's log-probabilities, if they were asked for; complete with the first delta."""
        state = self._known_state
        if state.prompt_logprobs is None and state.group.requests[0].params.prompt_logprobs is not None:
            return [None]  # a prompt of one token
        return state.prompt_logprobs

    @property
    def has_started(self) -> bool:
        """Returns whether it has had a share of a step."""
        return self.state is not None and self.metrics.first_scheduled_time is not None

    @property
    def has_ended(self) -> bool:
        """Returns whether nothing more will come than what has arrived."""
        return self._ended

    @property
    def error(self) -> BaseException | None:
        """Returns what ended the request early, if anything did."""
        return self._error

    @property
    def _known_state(self) -> RequestState:
        assert self.state is not None, "a stream is handed out when its request has been queued"
        return self.state

    def begin(self, state: RequestState, deadline: float | None, arrived: float | None = None) -> None:
        """The request has been queued.

        Args:
            state (`RequestState`):
                The request.
            deadline (`float`, *optional*):
                Seconds after which it is aborted.
            arrived (`float`, *optional*):
                When these began, by `time.monotonic()`; now by default.
        """
        self.state = state
        if deadline is not None and not self._ended:
            left = deadline - (0.0 if arrived is None else time.monotonic() - arrived)
            self._timer = self._courier.loop.call_later(max(left, 0), self._expire, deadline)

    def _expire(self, deadline: float) -> None:
        self.abort(DeadlineExceededError(f"The answer was not finished within {deadline:g} s, and was aborted."))

    def withdraw(self) -> None:
        """The request was refused: there is nothing to read."""
        self._ended = True
        self._live.pop(id(self), None)

    def abort(self, error: BaseException | None = None) -> None:
        """Ends the request, unless it has ended. Thread-safe.

        Args:
            error (`BaseException`, *optional*):
                What the reader is told; `RequestAbortedError` by default.
        """
        if not self._ended:
            self._abort_error = self._abort_error or error
            self._abort(self.request_id)

    def wake(self) -> None:
        """There is news; called in the event loop."""
        if self._ended and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.observer is not None:
            self.observer(self)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> list[AnswerDelta]:
        while True:
            ended = self._ended  # looked at first: what arrived before the end is seen below
            if self._arrived:
                return self._merged()
            if ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = self._courier.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _merged(self) -> list[AnswerDelta]:
        deltas = self._arrived.popleft()
        if not self._arrived:
            return deltas
        merged = {delta.index: delta for delta in deltas}
        while self._arrived:
            _merge(merged, self._arrived.popleft())
        return list(merged.values())

    async def output(self) -> RequestOutput:
        """Waits for the end.

        Returns:
            `RequestOutput`: The whole answers.

        Raises:
            EngineError: If the request failed or was aborted.
        """
        async for _ in self:
            pass
        return self._known_state.output()

    async def __aenter__(self) -> AnswerStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.abort()
        if self._timer is not None:
            self._timer.cancel()

    def outputs_of(self, deltas: Sequence[AnswerDelta], so_far: dict[int, AnswerDelta] | None) -> RequestOutput:
        """Returns deltas in vLLM's form.

        Args:
            deltas (`Sequence[AnswerDelta]`):
                What has come.
            so_far (`dict[int, AnswerDelta]`, *optional*):
                Collects what came before, for outputs that hold all of it; they hold what is new by default.
        """
        state = self._known_state
        if so_far is not None:
            _merge(so_far, deltas)
        shown = {delta.index: delta for delta in deltas} if so_far is None else so_far
        return RequestOutput(
            request_id=self.request_id,
            prompt=state.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            prompt_logprobs=self.prompt_logprobs,
            outputs=[_completion(index, shown.get(index)) for index in range(len(state.answers))],
            finished=self._ended and not self._arrived and self._error is None,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


def _merge(so_far: dict[int, AnswerDelta], deltas: Iterable[AnswerDelta]) -> None:
    for delta in deltas:
        if delta.index in so_far:
            so_far[delta.index].append(delta)
        else:
            so_far[delta.index] = delta


def _completion(index: int, delta: AnswerDelta | None) -> CompletionOutput:
    if delta is None:
        return CompletionOutput(index, "", [])
    return CompletionOutput(
        index=index,
        text=delta.text,
        token_ids=list(delta.token_ids),
        logprobs=list(delta.logprobs) if delta.logprobs is not None else None,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
    )
