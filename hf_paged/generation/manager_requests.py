"""The requests of the manager: what has been told about each so far, and how many wait."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from ..errors import InvalidRequestError, QueueFullError, RequestAbortedError
from .answer import RequestState
from .batch_results import RequestLog, answer_id, output_of
from .loop_requests import LoopRequest
from .outputs import GenerationOutput


class LiveRequest:
    """A request that has not ended.

    Args:
        request_id (`str`, *optional*):
            The id that its caller knows it by; `req_<number>` by default.
        num_answers (`int`):
            How many answers it has.
        deliver (`Callable[[LiveRequest, list[GenerationOutput]], None]`):
            A method, called with results in the thread that made them. Its object is not kept alive: the engine, which
            knows the request, must not keep a manager that nobody has started, and its model.
        log (`RequestLog`):
            What is written down after each token.
        streaming (`bool`, defaults to `False`):
            Whether there is a result for each token, instead of one at the end of each answer.
    """

    def __init__(
        self,
        request_id: str | None,
        num_answers: int,
        deliver: Callable[[LiveRequest, list[GenerationOutput]], None],
        log: RequestLog,
        *,
        streaming: bool = False,
    ):
        self.request_id = request_id or ""
        self.number = -1  # how many came before it
        self.log = log
        self._deliver = weakref.WeakMethod(deliver)
        self._request: RequestState | LoopRequest | None = None
        self._streaming = streaming
        self._num_told = [0] * num_answers
        self._ended = [False] * num_answers
        self._lock = threading.Lock()
        self._cancelled = False
        self._cancel: Callable[[], object] | None = None

    @property
    def finished(self) -> bool:
        """Returns whether all its answers have ended."""
        return all(self._ended)

    @property
    def is_waiting(self) -> bool:
        """Returns whether nothing has been computed for it yet."""
        return (self._request is None or _waits(self._request)) and not self.finished

    @property
    def is_cancelled(self) -> bool:
        """Returns whether somebody has cancelled it."""
        return self._cancelled

    @property
    def request(self) -> RequestState | LoopRequest | None:
        """Returns the side of it of those who answer it, once they know it."""
        return self._request

    def has_delivered(self, answer: str) -> bool:
        """Returns whether the last result of an answer has been told.

        Args:
            answer (`str`):
                The answer's id.
        """
        return any(ended and answer_id(self.request_id, branch) == answer for branch, ended in enumerate(self._ended))

    # ------------------------------------------------------------------ cancelling

    def cancel_by(self, cancel: Callable[[], object]) -> None:
        """Says how it is cancelled.

        Args:
            cancel (`Callable[[], object]`):
                Cancels it, or does nothing if it has ended or is not there yet.
        """
        with self._lock:
            self._cancel = cancel
            cancelled = self._cancelled
        if cancelled:
            cancel()

    def cancel(self) -> None:
        """Ends it; its last results say so."""
        with self._lock:
            self._cancelled = True
            cancel = self._cancel
        if cancel is not None:
            cancel()

    def watch(self, request: RequestState | LoopRequest) -> None:
        """Takes note of who answers it.

        Args:
            request (`RequestState` or `LoopRequest`):
                Their side of it.
        """
        with self._lock:
            self._request = request
            cancelled, cancel = self._cancelled, self._cancel
        if cancelled and cancel is not None:  # the engine may not have known it when it was cancelled
            cancel()

    # ------------------------------------------------------------------ news

    def take_state(self, state: RequestState) -> None:
        """Takes in news from the engine; called by the thread that runs the steps.

        Args:
            state (`RequestState`):
                The engine's side of the request.
        """
        outputs = []
        self.log.take(state)
        for branch, answer in enumerate(state.answers):
            request = answer.request
            told, count = self._num_told[branch], request.num_output_tokens
            if self._ended[branch] or not (request.is_finished or (self._streaming and count > told)):
                continue
            self._num_told[branch], self._ended[branch] = count, request.is_finished
            outputs.append(output_of(state, answer, self.request_id, self.log))
        self._tell(outputs)

    def take_loop(self, request: LoopRequest) -> None:
        """Takes in news from a request that `generate` answers; called by its thread.

        Args:
            request (`LoopRequest`):
                The request.
        """
        outputs = []
        for branch, output in enumerate(request.outputs()):
            count, finished = len(output.generated_tokens), output.is_finished()
            if finished or (self._streaming and count > self._num_told[branch]):
                self._num_told[branch], self._ended[branch] = count, finished
                outputs.append(output)
        self._tell(outputs)

    def _tell(self, outputs: list[GenerationOutput]) -> None:
        deliver = self._deliver()
        if deliver is not None:
            deliver(self, outputs)


class RequestTable:
    """The requests that have not ended, by id. Thread-safe.

    Args:
        max_queue_size (`int`, *optional*):
            Waiting requests beyond which no more may be started.
    """

    def __init__(self, max_queue_size: int | None):
        self.lock = threading.RLock()
        self._max_queue_size = max_queue_size
        self._live: dict[str, LiveRequest] = {}
        self._unscheduled: dict[str, LiveRequest] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, live: LiveRequest, check: Callable[[], None]) -> None:
        """Takes a request in, and gives it a number and, if it has none, an id.

        Args:
            live (`LiveRequest`):
                The request.
            check (`Callable[[], None]`):
                Raises if no request is taken now.

        Raises:
            InvalidRequestError: If its id belongs to another one.
        """
        with self.lock:
            check()
            live.number, self._num_requests = self._num_requests, self._num_requests + 1
            live.request_id = live.request_id or f"req_{live.number}"
            other = self._live.get(live.request_id)
            if other is not None and not other.finished:
                raise InvalidRequestError(f"`request_id` {live.request_id!r} belongs to a request that is running.")
            self._live[live.request_id] = live

    def forget(self, live: LiveRequest) -> None:
        """Takes a request out.

        Args:
            live (`LiveRequest`):
                The request.
        """
        with self.lock:
            if self._live.get(live.request_id) is live:
                del self._live[live.request_id]
                self._unscheduled.pop(live.request_id, None)

    def wait_for_room(self, live: LiveRequest, timeout: float) -> None:
        """Waits until few enough requests wait for one more to be started.

        Args:
            live (`LiveRequest`):
                The one that is to be started.
            timeout (`float`):
                Seconds to wait at most.

        Raises:
            QueueFullError: If there is no room in time.
            RequestAbortedError: If it is cancelled meanwhile.
        """
        until = time.monotonic() + timeout
        while self._max_queue_size is not None:
            if live.is_cancelled:
                raise RequestAbortedError(f"Request {live.request_id!r} was cancelled while it waited for room.")
            with self.lock:
                self._unscheduled = {name: other for name, other in self._unscheduled.items() if other.is_waiting}
                if len(self._unscheduled) < self._max_queue_size:
                    self._unscheduled[live.request_id] = live
                    return
            if time.monotonic() >= until:
                raise QueueFullError(
                    f"{self._max_queue_size} requests are waiting, which is `max_queue_size`; try again later, or "
                    "raise `queue_timeout`."
                )
            time.sleep(0.005)

    def expects(self, answer: str) -> bool:
        """Returns whether a result of an answer can still come.

        Args:
            answer (`str`):
                The answer's id.
        """
        live = self._find(answer)
        return live is not None and not live.has_delivered(answer)

    def cancel(self, request_id: str) -> None:
        """Cancels a request; unknown ones are ignored.

        Args:
            request_id (`str`):
                Its id, or that of any of its answers.
        """
        live = self._find(request_id)
        if live is not None:
            live.cancel()

    def cancel_all(self) -> list[LiveRequest]:
        """Cancels all requests, and returns them."""
        with self.lock:
            everything = list(self._live.values())
        for live in everything:
            live.cancel()
        return everything

    def _find(self, answer: str) -> LiveRequest | None:
        with self.lock:
            return self._live.get(answer) or self._live.get(str(answer).rpartition("__child#")[0])


def _waits(request: RequestState | LoopRequest) -> bool:
    if isinstance(request, LoopRequest):
        return request.is_waiting
    return request.group.requests[0].metrics.first_scheduled_time is None
