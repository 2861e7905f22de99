"""The sampler: logits of a step in, one token per request out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..outputs import Logprob, SamplerOutput
from ..request import Request
from .allowed_token_ids import AllowedTokenIds
from .bad_words import BadWords
from .bitmask import apply_bitmask
from .choose import DrawPlan, can_choose_ahead, choose, choose_ahead
from .forced_tokens import ForcedTokens
from .invalid_values import InvalidValues
from .length_decay import LengthDecay
from .logit_bias import LogitBias
from .logprobs import token_logprobs
from .memory import Memory
from .min_tokens import MinTokens
from .ngrams import NoRepeatNGram
from .penalties import Penalties
from .pending import PendingTokens
from .processors import Batch, Processor
from .prompt_penalty import PromptPenalty
from .row_processors import RowProcessors
from .sequence_bias import SequenceBias
from .suppressed_tokens import SuppressedTokens
from .truncation import Truncation
from .warpers import Warpers

# In the order of Transformers' `_get_logits_processor`; what Transformers does not have follows its nearest relative.
PROCESSORS: tuple[type[Processor], ...] = (
    LogitBias,
    SequenceBias,
    PromptPenalty,
    Penalties,
    NoRepeatNGram,
    BadWords,
    MinTokens,
    AllowedTokenIds,
    ForcedTokens,
    InvalidValues,
    LengthDecay,
    SuppressedTokens,
)


class _Plan:
    """All that depends only on which requests are in the batch.

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self.requests = list(batch.requests)
        self.vocab_size = batch.vocab_size
        self.processors = [processor(batch) for processor in PROCESSORS]
        self.row_processors = RowProcessors(batch)
        self.warpers = Warpers(batch)
        # Not refused for what the model returned, only for what the processors made of it.
        self.mendable = self.row_processors.rows + [
            row for row, _, features in batch.features if features.remove_invalid_values
        ]
        params = [request.params for request in batch.requests]
        settings = Truncation(
            temperature=np.array([p.temperature for p in params], dtype=np.float64),
            top_k=np.array([_top_k(p.top_k, batch.vocab_size) for p in params], dtype=np.int64),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            min_p=np.array([p.min_p for p in params], dtype=np.float64),
        )
        for name, off in (("temperature", 1), ("top_k", 0), ("top_p", 1), ("min_p", 0)):
            getattr(settings, name)[self.warpers.rows] = off  # they are done already when these are applied
        truncated = (settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)
        truncated[self.warpers.cut_rows] = True
        self.draws = DrawPlan(self.requests, np.array([p.greedy for p in params]), truncated, settings)
        self.logprob_rows = [row for row, p in enumerate(params) if p.logprobs is not None]
        self.num_logprobs = [params[row].logprobs for row in self.logprob_rows]
        self.score_rows = [row for row, request in enumerate(batch.requests) if request.extras.scores]

    def fits(self, requests: Sequence[Request], vocab_size: int) -> bool:
        """Returns whether the plan was made for exactly these requests."""
        return vocab_size == self.vocab_size and self.requests == list(requests)  # requests equal only themselves


class Sampler:
    """Chooses tokens for a batch of requests with different parameters.

    A request's token depends on its logits, parameters, tokens, seed, branch and output position, and on nothing else:
    its batch mates, and the order of the batch, change not one bit.

    Args:
        vocab_size (`int`):
            Token ids that exist. Logits may have more columns, not fewer.
        device (`torch.device` or `str`):
            Where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._memory = Memory()
        self._plan: _Plan | None = None
        self._num_columns = vocab_size  # of the last logits, and so of the next

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a request; unknown ids are fine.

        Args:
            request_id (`str`):
                Which request.
        """
        self._memory.forget(request_id)
        if self._plan is not None and any(request.request_id == request_id for request in self._plan.requests):
            self._plan = None

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        rows: Sequence[int],
        bitmask: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Chooses one token for each request.

        Args:
            logits (`torch.Tensor`):
                `[rows, vocab_size]` float32, float16 or bfloat16; not changed. Processed in float32.
            requests (`Sequence[Request]`):
                Who gets a token.
            rows (`Sequence[int]`):
                For each request its row of the logits; several may share one.
            bitmask (`torch.Tensor`, *optional*):
                `[requests, ceil(vocab_size / 32)]` int32, packed; only tokens whose bit is set may be chosen.

        Returns:
            `SamplerOutput`: The tokens, log-probabilities and processed scores for the requests that want them, the
            requests (by index) whose logits had NaN, +inf or nothing but -inf, before or after processing, and those
            whose own processors raised.
        """
        if not requests:
            return SamplerOutput([])
        assert len(rows) == len(requests), f"{len(rows)} rows for {len(requests)} requests"
        assert logits.shape[1] >= self.vocab_size, f"logits of {logits.shape[1]} columns, need {self.vocab_size}"
        plan = self._plan_for(requests, logits.shape[1])
        raw = _select(logits, rows)
        scores, failed, errors = _process(raw, plan, bitmask)
        token_ids, best = choose(scores, plan.draws)
        unusable = _unusable(best, plan.draws.greedy, scores is not raw)
        emptied = [] if scores is raw else [row for row in sorted(unusable - failed) if best[row] == -math.inf]
        failed |= unusable
        chosen = token_ids.tolist()
        for row in failed | errors.keys():
            chosen[row] = 0
        logprobs = _logprobs(raw, chosen, plan, failed | errors.keys()) if plan.logprob_rows else None
        return SamplerOutput(chosen, logprobs, sorted(failed - errors.keys()), errors, _scores(scores, plan), emptied)

    def can_start(self, requests: Sequence[Request]) -> bool:
        """Returns whether `start` can choose the tokens of these requests, none of which `needs_host_tokens`.

        Args:
            requests (`Sequence[Request]`):
                Who gets a token.
        """
        return can_choose_ahead(self.device, all(request.params.greedy for request in requests))

    def wanted(self, requests: Sequence[Request], rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Returns what `start` wants where the logits will be, so that it can go there with the inputs of the model.

        Args:
            requests (`Sequence[Request]`):
                Who gets a token.
            rows (`Sequence[int]`):
                For each request its row of the logits.

        Returns:
            `dict[str, np.ndarray]`: Each with a row for every request; empty if nothing is wanted.
        """
        if not requests:
            return {}
        wanted = self._plan_for(requests, self._num_columns).draws.wanted()
        if _side_by_side(rows) is None:
            wanted["rows"] = np.array(rows, dtype=np.int64)
        return wanted

    @torch.inference_mode()
    def start(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        rows: Sequence[int],
        sent: Mapping[str, torch.Tensor] | None = None,
    ) -> PendingTokens:
        """Chooses the tokens that `sample` would, where the logits are, without waiting for them.

        Args:
            logits (`torch.Tensor`):
                As for `sample`.
            requests (`Sequence[Request]`):
                Who gets a token; `can_start` says yes. The token before it may still be in flight.
            rows (`Sequence[int]`):
                For each request its row of the logits.
            sent (`Mapping[str, torch.Tensor]`, *optional*):
                What `wanted` returned for them, where the logits are; there may be more rows. By default, and if the
                logits are of another width than the last ones, it is sent now.

        Returns:
            `PendingTokens`: To be waited for.
        """
        if not requests:
            nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
            return PendingTokens(nothing, nothing.float(), self.vocab_size)
        if logits.shape[1] != self._num_columns:
            sent = None
        plan = self._plan_for(requests, logits.shape[1])
        scores = _select(logits, rows, sent.get("rows") if sent is not None else None)
        return PendingTokens(*choose_ahead(scores, plan.draws, sent), logits.shape[1])

    def _plan_for(self, requests: Sequence[Request], vocab_size: int) -> _Plan:
        self._num_columns = vocab_size
        if self._plan is None or not self._plan.fits(requests, vocab_size):
            self._plan = _Plan(Batch(tuple(requests), vocab_size, self.device, self._memory))
        return self._plan


def _top_k(top_k: int | None, vocab_size: int) -> int:
    """Returns 0 where all tokens remain, be it because there are no more than k."""
    return top_k if top_k and top_k < vocab_size else 0


def _side_by_side(rows: Sequence[int]) -> slice | None:
    """Returns the rows as a slice, if they are one."""
    first, end = rows[0], rows[0] + len(rows)
    return slice(first, end) if list(rows) == list(range(first, end)) else None


def _select(logits: torch.Tensor, rows: Sequence[int], index: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the rows, without a copy if they lie side by side; `index` holds them where the logits are."""
    place = _side_by_side(rows)
    if place is not None:
        part = logits[place]
        return part if part.stride(1) == 1 else part.contiguous()
    return logits[torch.tensor(rows, device=logits.device) if index is None else index[: len(rows)]]


def _process(
    raw: torch.Tensor, plan: _Plan, bitmask: torch.Tensor | None
) -> tuple[torch.Tensor, set[int], dict[int, Exception]]:
    """Applies what does something in this step to a copy; returns the logits themselves if nothing does.

    The rows that cannot be used and the errors of callers' processors come with it.
    """
    active = [processor for processor in plan.processors if processor.is_active()]
    by_row, warpers = plan.row_processors, plan.warpers
    if not active and bitmask is None and not by_row.is_active() and not warpers.is_active():
        return raw, set(), {}
    scores, largest = _copied(raw)
    failed = set(np.flatnonzero(~np.isfinite(largest)).tolist()).difference(plan.mendable)
    for processor in active:
        processor.apply(scores)
    if bitmask is not None:
        apply_bitmask(scores, bitmask)
    errors = by_row.apply(scores) if by_row.is_active() else {}
    if bitmask is not None and by_row.is_active():
        apply_bitmask(scores, bitmask)  # again: nothing that a caller's processor does brings a token back
    if warpers.is_active():
        warpers.apply(scores)
    return scores, failed, errors


def _copied(raw: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """A float32 copy of the scores, and the largest of each row. On a CPU by one thread (see `apply_bitmask`)."""
    if raw.device.type == "cpu" and raw.dtype in (torch.float32, torch.float16):
        array = raw.numpy().astype(np.float32, order="C")
        return torch.from_numpy(array), array.max(axis=1)
    scores = raw.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return scores, scores.amax(dim=1).cpu().numpy()


def _unusable(best: np.ndarray, greedy: np.ndarray, processed: bool) -> set[int]:
    """Returns the rows whose best score leaves no token to choose."""
    rows = {row for row, value in enumerate(best.tolist()) if not math.isfinite(value)}
    # A processor may force a token by an infinite score, as long as no probability is asked for.
    return {row for row in rows if not (best[row] == math.inf and greedy[row] and processed)}


def _scores(scores: torch.Tensor, plan: _Plan) -> dict[int, torch.Tensor]:
    """Copies the rows of those who want them: normal tensors, which may be changed outside inference mode too."""
    if not plan.score_rows:
        return {}
    with torch.inference_mode(False), torch.no_grad():
        return {row: scores[row].to(torch.float32, copy=True) for row in plan.score_rows}


def _logprobs(
    raw: torch.Tensor, token_ids: list[int], plan: _Plan, failed: set[int]
) -> list[dict[int, Logprob] | None]:
    wanted = [(row, k) for row, k in zip(plan.logprob_rows, plan.num_logprobs, strict=True) if row not in failed]
    results: list[dict[int, Logprob] | None] = [None] * len(token_ids)
    if wanted:
        rows, num_best = zip(*wanted, strict=True)
        computed = token_logprobs(_select(raw, rows), [token_ids[row] for row in rows], num_best)
        for row, result in zip(rows, computed, strict=True):
            results[row] = result
    return results
