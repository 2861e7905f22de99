"""The masks of a step: filled while the model computes, applied by the sampler."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...errors import InvalidRequestError
from ..outputs import SamplerOutput
from ..request import Request
from ..sampling.sampler import Sampler
from .matcher import Matcher

_MAX_THREADS = 16


class MaskFill:
    """Masks that are being filled.

    Args:
        matchers (`dict[Request, Matcher]`):
            The requests that have a grammar.
        future (`concurrent.futures.Future`):
            Of a mask for each of them.
    """

    def __init__(self, matchers: dict[Request, Matcher], future: concurrent.futures.Future[dict[Request, np.ndarray]]):
        self._matchers = matchers
        self._future = future

    def bitmask(self, requests: Sequence[Request], num_columns: int) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Waits for the masks.

        Args:
            requests (`Sequence[Request]`):
                The requests of the step that are still there.
            num_columns (`int`):
                Tokens that the logits have.

        Returns:
            `[requests, ceil(num_columns / 32)]` int32, packed, -1 for requests without a grammar; and what went wrong,
            by place.
        """
        masks = self._future.result()
        num_words = -(-num_columns // 32)
        packed = np.full((len(requests), num_words), -1, dtype=np.int32)
        errors: dict[int, Exception] = {}
        for place, request in enumerate(requests):
            mask = masks.get(request)
            if mask is None:
                continue
            matcher = self._matchers[request]
            error = matcher.error()
            if error is not None:
                errors[place] = error
                continue
            packed[place, :] = 0
            packed[place, : len(mask)] = mask[:num_words]
            matcher.finish_mask(packed[place])
        return torch.from_numpy(packed), errors


class GrammarMasks:
    """Fills the masks of an engine's steps, in a thread, by several of the grammar library."""

    def __init__(self) -> None:
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._executor: Any = None
        self._last: concurrent.futures.Future[Any] | None = None

    def start(self, requests: Sequence[Request]) -> MaskFill | None:
        """Starts to fill the masks of a step.

        Args:
            requests (`Sequence[Request]`):
                Who gets a token.

        Returns:
            `MaskFill`: To be waited for; `None` if nobody has a grammar.
        """
        constrained = [request for request in requests if request.grammar is not None]
        if not constrained:
            return None
        matchers = {request: matcher_of(request) for request in constrained}
        if self._last is not None:
            concurrent.futures.wait([self._last])  # of a step that was interrupted
        if self._thread is None:
            from llguidance import LLExecutor

            self._thread = concurrent.futures.ThreadPoolExecutor(1, "hf_paged-masks")
            self._executor = LLExecutor(max(1, min((os.cpu_count() or 2) // 2, _MAX_THREADS)))
        self._last = self._thread.submit(self._fill, matchers)
        return MaskFill(matchers, self._last)

    def _fill(self, matchers: dict[Request, Matcher]) -> dict[Request, np.ndarray]:
        by_width: dict[int, list[Request]] = {}
        for request, matcher in matchers.items():
            by_width.setdefault(matcher.tokenizer.num_words, []).append(request)
        masks: dict[Request, np.ndarray] = {}
        for num_words, requests in by_width.items():
            array = np.zeros((len(requests), num_words), dtype=np.int32)
            jobs = [(matchers[request].library, place) for place, request in enumerate(requests)]
            self._executor.unsafe_compute_mask_ptr(jobs, array.ctypes.data, 4 * num_words, len(requests))
            masks.update(zip(requests, array, strict=True))
        return masks

    def sample(
        self,
        sampler: Sampler,
        logits: torch.Tensor,
        requests: Sequence[Request],
        rows: Sequence[int],
        fill: MaskFill | None,
    ) -> SamplerOutput:
        """Chooses a token for each request, those with a grammar from what it allows.

        Args:
            sampler (`Sampler`):
                Chooses.
            logits (`torch.Tensor`):
                `[rows, vocab_size]`.
            requests (`Sequence[Request]`):
                Who gets a token.
            rows (`Sequence[int]`):
                For each request its row of the logits.
            fill (`MaskFill`, *optional*):
                What `start` returned for them, or for more.

        Returns:
            `SamplerOutput`: As of the sampler. Requests whose grammar allows nothing that is left are among its errors,
            unless the answer may end there; these are among `ended_rows`.
        """
        if fill is None or not requests:
            return sampler.sample(logits, requests, rows)
        bitmask, errors = fill.bitmask(requests, logits.shape[1])
        choice = sampler.sample(logits, requests, rows, bitmask)
        for place in choice.emptied_rows:
            if place in errors or requests[place].grammar is None:
                continue
            choice.failed_rows.remove(place)
            if matcher_of(requests[place]).is_accepting:
                choice.ended_rows.append(place)
                choice.scores.pop(place, None)
            else:
                errors[place] = _nothing_left(requests[place])
        choice.errors.update(errors)
        return choice


def matcher_of(request: Request) -> Matcher:
    """Returns what follows a request's answer, at its last token.

    Args:
        request (`Request`):
            A request with a grammar.
    """
    if request.matcher is None:
        request.matcher = Matcher(request.grammar, request.stop_token_ids)
    return request.matcher


def follow(request: Request) -> bool:
    """Takes in a request's newest tokens.

    Args:
        request (`Request`):
            A request with a grammar.

    Returns:
        `bool`: Whether its answer is complete.

    Raises:
        InvalidRequestError: If the grammar became too large.
    """
    matcher = matcher_of(request)
    matcher.advance(request.token_ids[request.num_prompt_tokens :])
    return matcher.is_done


def _nothing_left(request: Request) -> InvalidRequestError:
    return InvalidRequestError(
        f"Request {request.request_id!r} has no token left to choose after {request.num_output_tokens}: each one that "
        "the grammar of `structured_outputs` allows is forbidden by `logit_bias`, `allowed_token_ids`, `bad_words`, "
        "`min_tokens` or a logits processor."
    )
