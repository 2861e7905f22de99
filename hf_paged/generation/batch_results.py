"""From the engine's requests to `GenerationOutput`s."""

from __future__ import annotations

import time

import torch

from .answer import Answer, RequestState
from .outputs import GenerationOutput, GenerationStatus
from .request import FinishReason, Request


def answer_id(request_id: str, branch: int) -> str:
    """Returns the id of one of a request's answers, as Transformers makes it.

    Args:
        request_id (`str`):
            The request's id, which is that of its first answer.
        branch (`int`):
            Which answer.
    """
    return request_id if branch == 0 else f"{request_id}__child#{branch - 1}"


class RequestLog:
    """What is written down about a request after each of its tokens.

    Args:
        num_answers (`int`):
            How many answers it has.
        timestamps (`bool`, defaults to `False`):
            Whether the time of each token is wanted.
        logprobs (`bool`, defaults to `False`):
            Whether the log-probability of each token among the processed scores is wanted; the request must ask for
            these.
        keep_scores (`bool`, defaults to `False`):
            Whether the scores themselves are wanted too.
    """

    def __init__(
        self, num_answers: int, *, timestamps: bool = False, logprobs: bool = False, keep_scores: bool = False
    ):
        self.keeps_scores = keep_scores or not logprobs
        self.times: list[list[float]] | None = [[] for _ in range(num_answers)] if timestamps else None
        self.logprobs: list[list[float]] | None = [[] for _ in range(num_answers)] if logprobs else None

    @property
    def is_wanted(self) -> bool:
        """Returns whether there is anything to write down."""
        return self.times is not None or self.logprobs is not None

    def take(self, state: RequestState) -> None:
        """Writes down the last tokens. To be called after each.

        Args:
            state (`RequestState`):
                The request.
        """
        now = time.perf_counter()
        for branch, answer in enumerate(state.answers):
            count = answer.request.num_output_tokens
            if self.times is not None:
                times = self.times[branch]
                times.extend([now] * (count - len(times)))
            if self.logprobs is not None:
                self._take_logprobs(self.logprobs[branch], answer)

    def _take_logprobs(self, logprobs: list[float], answer: Answer) -> None:
        tokens, scores = answer.request.output_token_ids, answer.scores
        assert scores is not None, "the request was not asked for its scores"
        new = scores[len(logprobs) :] if self.keeps_scores else scores[:]
        for row in new:
            logprobs.append(float(torch.log_softmax(row.float(), dim=-1)[tokens[len(logprobs)]]))
        if not self.keeps_scores:
            scores.clear()


def output_of(state: RequestState, answer: Answer, request_id: str, log: RequestLog) -> GenerationOutput:
    """Returns an answer so far.

    Args:
        state (`RequestState`):
            The request.
        answer (`Answer`):
            One of its answers.
        request_id (`str`):
            The id that its caller knows it by.
        log (`RequestLog`):
            What was written down about it.
    """
    request, metrics = answer.request, answer.request.metrics
    tokens, entries, branch = request.output_token_ids, answer.logprobs or [], answer.request.branch
    if log.logprobs is not None:
        logprobs = list(log.logprobs[branch])
    else:
        logprobs = [entry[token].logprob for token, entry in zip(tokens, entries, strict=False)]
    output = GenerationOutput(
        request_id=answer_id(request_id, branch),
        prompt_ids=request.prompt_token_ids,
        generated_tokens=tokens,
        logprobs=logprobs,
        error=_error_of(request),
        status=_status_of(request),
        created_time=metrics.arrival_time,
        lifespan=(_or_never(metrics.first_scheduled_time), _or_never(metrics.finished_time)),
        timestamps=list(log.times[branch]) if log.times is not None else None,
        finish_reason=request.finish_reason.value if request.finish_reason is not None else None,
        stop_reason=request.stop_reason,
        top_logprobs=list(entries) if request.params.logprobs else None,
        num_cached_tokens=metrics.num_cached_tokens,
    )
    if request.is_finished:
        _add_details(output, state, answer, log)
    return output


def _add_details(output: GenerationOutput, state: RequestState, answer: Answer, log: RequestLog) -> None:
    """What is large comes with the last result alone."""
    if state.prompt_logprobs is not None:
        output.prompt_logprobs = list(state.prompt_logprobs)
    elif answer.request.params.prompt_logprobs is not None:
        output.prompt_logprobs = [None]  # a prompt of one token
    if answer.scores is not None and log.keeps_scores:
        output.scores = list(answer.scores)
    if answer.recorded is not None:
        output.hidden_states = answer.recorded.hidden_states


def _or_never(moment: float | None) -> float:
    return -1 if moment is None else moment


def _error_of(request: Request) -> str | None:
    if request.error is not None:
        return str(request.error)
    return "The request was cancelled." if request.finish_reason is FinishReason.ABORT else None


def _status_of(request: Request) -> GenerationStatus:
    if request.is_finished:
        return GenerationStatus.FAILED if _error_of(request) is not None else GenerationStatus.FINISHED
    if request.num_output_tokens:
        return GenerationStatus.DECODING
    started = request.metrics.first_scheduled_time is not None
    return GenerationStatus.PREFILLING if started else GenerationStatus.PENDING
