"""One request as it is watched from outside: counted, traced, logged."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import DeadlineExceededError, EngineClosedError, EngineDiedError, RequestAbortedError
from ..generation.request import FinishReason, Request, RequestMetrics
from ..generation.sampling.params import SamplingParams
from .access_log import HttpRecord, RequestLog, current_record
from .errors import ApiError
from .metrics import Metrics

if TYPE_CHECKING:
    from ..generation.answer_stream import AnswerStream
    from .tracing import Tracing

logger = logging.getLogger(__name__)

GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
# An `ApiError` is what whoever aborts a request, such as a server that stops, has its client told.
_ABORTED = (RequestAbortedError, DeadlineExceededError, EngineClosedError, ApiError)


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What became of a request.

    Args:
        request_id (`str`):
            Its id.
        params (`SamplingParams`):
            What it wanted.
        times (`RequestMetrics`):
            When what happened.
        num_prompt_tokens (`int`):
            Of the prompt.
        num_generated_tokens (`int`):
            Of all answers.
        finish_reasons (`tuple[str, ...]`):
            `"stop"`, `"length"`, `"abort"` or `"error"`, of each answer.
        error (`BaseException`, *optional*):
            What ended it early.
        trace (`Any`, *optional*):
            Where its span belongs.
    """

    request_id: str
    params: SamplingParams
    times: RequestMetrics
    num_prompt_tokens: int
    num_generated_tokens: int
    finish_reasons: tuple[str, ...]
    error: BaseException | None = None
    trace: Any = None

    @property
    def finish_reason(self) -> str:
        """Returns the reason of the whole: the worst of its answers'."""
        return next(reason for reason in ("error", "abort", "length", "stop") if reason in self.finish_reasons)


class Observability:
    """Watches requests for those who want to know: metrics, traces and logs.

    Args:
        metrics (`Metrics`):
            Counts.
        tracing (`Tracing`, *optional*):
            Sends a span for each request.
        request_log (`RequestLog`, *optional*):
            Logs each request when it comes.
    """

    def __init__(self, metrics: Metrics, *, tracing: Tracing | None = None, request_log: RequestLog | None = None):
        self.metrics = metrics
        self._tracing = tracing
        self._request_log = request_log

    def extract(self, headers: Mapping[str, str]) -> Any:
        """Returns where the span of a request belongs, for `watch`; `None` if it has no place or there are no spans.

        Args:
            headers (`Mapping[str, str]`):
                Of the HTTP request.
        """
        return self._tracing.extract(headers) if self._tracing is not None else None

    def watch(self, stream: AnswerStream, trace: Any = None) -> None:
        """Watches a stream to its end. To be called in the event loop, as soon as the engine has taken the request.

        Args:
            stream (`AnswerStream`):
                The stream.
            trace (`Any`, *optional*):
                What `extract` returned.
        """
        assert stream.state is not None, "a stream is handed out when its request has been queued"
        params = stream.state.group.requests[0].params
        self.metrics.request_arrived(params)
        if self._request_log is not None:
            self._request_log.arrived(stream.request_id, params, len(stream.prompt_token_ids), stream.state.prompt)
        record = current_record()
        if record is not None:
            record.request_began(stream.request_id)
        stream.observer = _Watch(self, params, trace, record)

    def close(self) -> None:
        """Sends the last spans. May take seconds: not for the event loop."""
        if self._tracing is not None:
            self._tracing.close()

    def finished(self, request: FinishedRequest, record: HttpRecord | None) -> None:
        """A request has ended: tells everybody.

        Args:
            request (`FinishedRequest`):
                The request.
            record (`HttpRecord`, *optional*):
                What is logged of the HTTP request that it belongs to.
        """
        self.metrics.request_finished(
            request.times,
            request.num_prompt_tokens,
            request.num_generated_tokens,
            len(request.finish_reasons),
            request.finish_reason,
        )
        if self._tracing is not None:
            self._tracing.record(request, record.route if record is not None else None)
        if record is not None:
            record.request_finished(request)


class _Watch:
    """Called by a stream whenever its reader is woken: counts the tokens that are new, and once how it ended."""

    __slots__ = ("_counts", "_done", "_last", "_observability", "_params", "_record", "_trace")

    def __init__(self, observability: Observability, params: SamplingParams, trace: Any, record: HttpRecord | None):
        self._observability = observability
        self._params = params
        self._trace = trace
        self._record = record
        self._counts = [0] * params.n  # tokens of each answer so far
        self._last = 0.0  # when the last of them came
        self._done = False

    def __call__(self, stream: AnswerStream) -> None:
        if self._done or stream.state is None:
            return
        try:
            ended = stream.has_ended  # looked at first: what is counted after that is all
            self._count(stream.state.group.requests, ended)
            if ended:
                self._finish(stream, stream.state.group.requests)
        except Exception:  # whoever waits for the stream has to be woken all the same
            self._done = True
            logger.exception("could not count what became of request %r", stream.request_id)

    def _count(self, requests: list[Request], ended: bool) -> None:
        """Once a token, so as little as there can be."""
        counts, since, metrics = self._counts, self._last, self._observability.metrics
        now = time.perf_counter()
        for index, request in enumerate(requests):
            count, old = len(request.token_ids) - request.num_prompt_tokens, counts[index]
            if count == old:
                continue
            until = request.metrics.finished_time if ended else None
            if old == 0:
                self._take_first(requests, request)
                metrics.add_tokens(1, None)
                old, before = 1, request.metrics.first_token_time or now
            else:
                before = since
            if count > old:
                metrics.add_tokens(count - old, (until or now) - before)
            counts[index], self._last = count, now

    def _take_first(self, requests: list[Request], request: Request) -> None:
        """The first token of an answer; if it is the first of all, the prompt has been answered."""
        if not any(self._counts):
            times, first = request.metrics, request.metrics.first_token_time
            seconds = None if first is None else first - requests[0].metrics.arrival_time
            self._observability.metrics.prompt_answered(request.num_prompt_tokens, times.num_cached_tokens, seconds)

    def _finish(self, stream: AnswerStream, requests: list[Request]) -> None:
        self._done = True
        error = stream.error
        is_abort = isinstance(error, _ABORTED) and not isinstance(error, EngineDiedError)
        early = "abort" if is_abort else "error"
        reasons = [request.finish_reason for request in requests]
        times = requests[0].metrics
        if len(requests) > 1:
            ends = [request.metrics.finished_time for request in requests]
            times = dataclasses.replace(
                times, finished_time=max((end for end in ends if end is not None), default=None)
            )
        finished = FinishedRequest(
            request_id=stream.request_id,
            params=self._params,
            times=times,
            num_prompt_tokens=requests[0].num_prompt_tokens,
            num_generated_tokens=sum(self._counts),
            finish_reasons=tuple(reason.value if reason in GOOD_ENDS else early for reason in reasons),
            error=error,
            trace=self._trace,
        )
        self._observability.finished(finished, self._record)
