"""Requests of a batch that Transformers' own loop answers: `generate` in a few threads, which share the engine."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from .batch_planning import PlannedRequest
from .batch_results import answer_id
from .outputs import GenerationOutput, GenerationStatus

logger = logging.getLogger(__name__)

_NUM_THREADS = 8


class LoopRequest:
    """One prompt that a call of `generate` answers.

    Args:
        request_id (`str`):
            The id that its caller knows it by.
        planned (`PlannedRequest`):
            The prompt and the arguments of `generate`.
        on_update (`Callable[[LoopRequest], None]`, *optional*):
            Called after each token and at the end, by the thread that runs it.
        record_timestamps (`bool`, defaults to `False`):
            Whether outputs carry the time of each token.
    """

    def __init__(
        self,
        request_id: str,
        planned: PlannedRequest,
        on_update: Callable[[LoopRequest], None] | None = None,
        *,
        record_timestamps: bool = False,
    ):
        self.request_id = request_id
        self.finished = False
        self._planned = planned
        self._on_update = on_update
        self._times: list[float] | None = [] if record_timestamps else None
        self._cancelled = threading.Event()
        self._error: BaseException | None = None
        self._created, self._started, self._ended = time.perf_counter(), -1.0, -1.0
        self._answers: list[list[int]] = [[] for _ in range(planned.num_answers)]
        self._logprobs: list[list[float]] = [[] for _ in range(planned.num_answers)]
        self._ends = planned.eos_token_ids
        self._config = planned.generate_kwargs["generation_config"]
        self._autocast = _autocast_state()

    @property
    def is_waiting(self) -> bool:
        """Returns whether no thread has taken it yet."""
        return self._started < 0

    def cancel(self) -> None:
        """Ends it before its next token."""
        self._cancelled.set()

    def run(self, model: Any) -> None:
        """Answers the prompt; an error is kept in the outputs.

        Args:
            model (`PreTrainedModel`):
                The paged model.
        """
        self._started = time.perf_counter()
        try:
            with contextlib.ExitStack() as stack:
                for device, dtype in self._autocast:
                    stack.enter_context(torch.autocast(device, dtype))
                if not self._cancelled.is_set():
                    self._generate(model)
        except BaseException as error:  # `sys.exit()` in a processor would else end a thread, and tell nobody
            logger.debug("request %r failed", self.request_id, exc_info=error)
            self._error = error
        finally:
            self._ended = time.perf_counter()
            self.finished = True
        self._tell()

    def outputs(self) -> list[GenerationOutput]:
        """Returns all its answers so far."""
        cancelled = self._cancelled.is_set() and self.finished
        error = _words(self._error) if self._error is not None else "The request was cancelled." if cancelled else None
        if not self.finished:
            status = GenerationStatus.PENDING if self._started < 0 else GenerationStatus.DECODING
        else:
            status = GenerationStatus.FINISHED if error is None else GenerationStatus.FAILED
        return [
            GenerationOutput(
                request_id=answer_id(self.request_id, branch),
                prompt_ids=list(self._planned.tokens),
                generated_tokens=list(tokens),
                logprobs=list(logprobs),
                error=error,
                status=status,
                created_time=self._created,
                lifespan=(self._started, self._ended),
                timestamps=self._times[: len(tokens)] if self._times is not None else None,
                finish_reason=self._finish_reason(tokens, error) if self.finished else None,
            )
            for branch, (tokens, logprobs) in enumerate(zip(self._answers, self._logprobs, strict=True))
        ]

    def _finish_reason(self, tokens: list[int], error: str | None) -> str:
        if self._error is not None:
            return "error"
        if error is not None:
            return "abort"
        ended = (tokens and tokens[-1] in self._ends) or len(tokens) < self._config.max_new_tokens
        return "stop" if ended else "length"

    def _generate(self, model: Any) -> None:
        planned = self._planned
        kwargs = dict(planned.generate_kwargs)
        watch = _Watch(self, len(planned.tokens))
        kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), watch])
        wants_logprobs = planned.wishes.logprobs is not None or planned.wishes.processed_logprobs
        if wants_logprobs:
            self._config.return_dict_in_generate = self._config.output_scores = True
        input_ids = torch.tensor([planned.tokens], device=model.device)
        output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)
        sequences = output.sequences if wants_logprobs else output
        pads = _pads(planned, len(sequences))
        for branch, row in enumerate(sequences[:, len(planned.tokens) :].tolist()):
            self._answers[branch] = _without_padding(row, self._ends, pads)
        if wants_logprobs:
            self._take_logprobs(model, output)

    def _take_logprobs(self, model: Any, output: Any) -> None:
        beams = getattr(output, "beam_indices", None)
        scores = model.compute_transition_scores(
            output.sequences, output.scores, beams, normalize_logits=beams is None
        ).tolist()
        for branch, tokens in enumerate(self._answers):
            self._logprobs[branch] = scores[branch][: len(tokens)]

    def _tell(self) -> None:
        if self._on_update is not None:
            self._on_update(self)

    def _see(self, input_ids: torch.Tensor, prompt_length: int) -> bool:
        """Takes in what has been generated; returns whether to go on."""
        if self._times is not None:
            self._times.append(time.perf_counter())
        if (self._config.num_beams or 1) == 1:  # of several beams none is an answer yet
            self._answers = [row[prompt_length:] for row in input_ids.tolist()]
            self._tell()
        return not self._cancelled.is_set()


class _Watch(StoppingCriteria):
    """Shows a request its tokens, and ends it when it is cancelled."""

    def __init__(self, request: LoopRequest, prompt_length: int):
        self._request, self._prompt_length = request, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        go_on = self._request._see(input_ids, self._prompt_length)
        return torch.full((len(input_ids),), not go_on, device=input_ids.device, dtype=torch.bool)


def _autocast_state() -> list[tuple[str, torch.dtype]]:
    """What autocast does in the calling thread, which other threads do not inherit."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [(name, torch.get_autocast_dtype(name)) for name in devices if torch.is_autocast_enabled(name)]


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, Exception) else f"{type(error).__name__}: {error}"


def _pads(planned: PlannedRequest, num_rows: int) -> frozenset[int | None]:
    """What fills rows that ended before others without an end-of-sequence token.

    A single row is never filled, and without a criterion of the caller no row ends early but by that token. Padding
    tokens are what the model chose then.
    """
    kwargs = planned.generate_kwargs
    fillers: list[int | None] = [-1]  # beams without an end-of-sequence token are filled with -1
    if kwargs.get("stopping_criteria") or kwargs["generation_config"].stop_strings or kwargs.get("custom_generate"):
        fillers.append(planned.pad_token_id)
    return frozenset(fillers) if num_rows > 1 else frozenset()


def _without_padding(tokens: list[int], ends: frozenset[int], pads: frozenset[int | None]) -> list[int]:
    """What follows an end-of-sequence token is padding, and so is what ends a row that was filled."""
    end = next((place + 1 for place, token in enumerate(tokens) if token in ends), None)
    if end is not None:
        return tokens[:end]
    while tokens and tokens[-1] in pads:
        tokens = tokens[:-1]
    return tokens


class LoopPool:
    """Threads that answer requests through `generate`. Leaving its context ends what is still running."""

    def __init__(self) -> None:
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._running: dict[concurrent.futures.Future, LoopRequest] = {}

    def submit(self, request: LoopRequest, model: Any) -> None:
        """Answers a request as soon as a thread is free.

        Args:
            request (`LoopRequest`):
                The request.
            model (`PreTrainedModel`):
                The paged model.
        """
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "hf_paged-generate")
        future = self._executor.submit(request.run, model)
        self._running[future] = request
        future.add_done_callback(lambda done: self._running.pop(done, None))

    def as_finished(self, requests: list[LoopRequest]) -> Iterator[LoopRequest]:
        """Yields requests as they end.

        Args:
            requests (`list[LoopRequest]`):
                Which to wait for.
        """
        futures = {future: request for future, request in list(self._running.items()) if request in requests}
        yield from (request for request in requests if request not in futures.values())
        for future in concurrent.futures.as_completed(futures):
            yield futures[future]

    def close(self) -> None:
        """Ends all requests and waits for the threads. Safe to call twice."""
        for request in list(self._running.values()):
            request.cancel()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)

    def __enter__(self) -> LoopPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
