"""The sampler: logits of a step in, one token per request out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..outputs import Logprob, SamplerOutput
from ..request import Request
from .allowed_token_ids import AllowedTokenIds
from .bad_words import BadWords
from .bitmask import apply_bitmask
from .chunks import WIDE_CHUNK_SIZE, argmax_rows, chunk_maxima, wide_maxima
from .draw import draw_candidates, draw_full
from .forced_tokens import ForcedTokens
from .invalid_values import InvalidValues
from .length_decay import LengthDecay
from .logit_bias import LogitBias
from .logprobs import token_logprobs
from .memory import Memory
from .min_tokens import MinTokens
from .ngrams import NoRepeatNGram
from .penalties import Penalties
from .processors import Batch, Processor
from .prompt_penalty import PromptPenalty
from .random import uniforms
from .row_processors import RowProcessors
from .sequence_bias import SequenceBias
from .suppressed_tokens import SuppressedTokens
from .truncation import Truncation, truncate
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
        self.greedy = np.array([p.greedy for p in params])
        self.all_greedy = bool(self.greedy.all())
        self.settings = Truncation(
            temperature=np.array([p.temperature for p in params], dtype=np.float64),
            top_k=np.array([_top_k(p.top_k, batch.vocab_size) for p in params], dtype=np.int64),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            min_p=np.array([p.min_p for p in params], dtype=np.float64),
        )
        settings = self.settings
        for name, off in (("temperature", 1), ("top_k", 0), ("top_p", 1), ("min_p", 0)):
            getattr(settings, name)[self.warpers.rows] = off  # they are done already when these are applied
        self.truncated = (settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)
        self.truncated[self.warpers.cut_rows] = True
        self.seeds = np.array([request.seed % 2**64 for request in batch.requests], dtype=np.uint64)
        self.branches = np.array([request.branch for request in batch.requests], dtype=np.uint64)
        self.logprob_rows = [row for row, p in enumerate(params) if p.logprobs is not None]
        self.num_logprobs = [params[row].logprobs for row in self.logprob_rows]
        self.score_rows = [row for row, request in enumerate(batch.requests) if request.extras.scores]

    def fits(self, requests: Sequence[Request], vocab_size: int) -> bool:
        """Returns whether the plan was made for exactly these requests."""
        mine = self.requests
        return (
            vocab_size == self.vocab_size
            and len(mine) == len(requests)
            and all(a is b for a, b in zip(mine, requests, strict=True))
        )


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
        maxima = wide_maxima(scores) if plan.all_greedy else chunk_maxima(scores)
        best = maxima.amax(dim=1)
        failed |= _unusable(best, plan, scores is not raw)
        failed[list(errors)] = True
        token_ids = _choose(scores, maxima, best, plan, ~failed)
        token_ids[failed] = 0
        chosen = token_ids.tolist()
        logprobs = _logprobs(raw, chosen, plan, failed) if plan.logprob_rows else None
        failed[list(errors)] = False
        return SamplerOutput(chosen, logprobs, np.flatnonzero(failed).tolist(), errors, _scores(scores, plan))

    def _plan_for(self, requests: Sequence[Request], vocab_size: int) -> _Plan:
        if self._plan is None or not self._plan.fits(requests, vocab_size):
            self._plan = _Plan(Batch(tuple(requests), vocab_size, self.device, self._memory))
        return self._plan


def _top_k(top_k: int | None, vocab_size: int) -> int:
    """Returns 0 where all tokens remain, be it because there are no more than k."""
    return top_k if top_k and top_k < vocab_size else 0


def _select(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Returns the rows, without a copy if they lie side by side."""
    first = rows[0]
    if all(row == first + i for i, row in enumerate(rows)):
        part = logits[first : first + len(rows)]
        return part if part.stride(1) == 1 else part.contiguous()
    return logits[torch.tensor(rows, device=logits.device)]


def _process(
    raw: torch.Tensor, plan: _Plan, bitmask: torch.Tensor | None
) -> tuple[torch.Tensor, np.ndarray, dict[int, Exception]]:
    """Applies what does something in this step to a copy; returns the logits themselves if nothing does.

    The rows that cannot be used and the errors of callers' processors come with it.
    """
    active = [processor for processor in plan.processors if processor.is_active()]
    by_row, warpers = plan.row_processors, plan.warpers
    if not active and bitmask is None and not by_row.is_active() and not warpers.is_active():
        return raw, np.zeros(len(raw), dtype=bool), {}
    scores = raw.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    failed = ~torch.isfinite(scores.amax(dim=1)).cpu().numpy()
    failed[plan.mendable] = False
    for processor in active:
        processor.apply(scores)
    if bitmask is not None:
        apply_bitmask(scores, bitmask)
    errors = by_row.apply(scores) if by_row.is_active() else {}
    if warpers.is_active():
        warpers.apply(scores)
    return scores, failed, errors


def _unusable(best: torch.Tensor, plan: _Plan, processed: bool) -> np.ndarray:
    """Returns the rows whose best score leaves no token to choose."""
    values = best.cpu().numpy() if best.dtype == torch.float32 else best.float().cpu().numpy()
    # A processor may force a token by an infinite score, as long as no probability is asked for.
    return ~np.isfinite(values) & ~((values == np.inf) & plan.greedy & processed)


def _scores(scores: torch.Tensor, plan: _Plan) -> dict[int, torch.Tensor]:
    """Copies the rows of those who want them: normal tensors, which may be changed outside inference mode too."""
    if not plan.score_rows:
        return {}
    with torch.inference_mode(False), torch.no_grad():
        return {row: scores[row].to(torch.float32, copy=True) for row in plan.score_rows}


def _choose(
    scores: torch.Tensor, maxima: torch.Tensor, best: torch.Tensor, plan: _Plan, usable: np.ndarray
) -> np.ndarray:
    """Chooses a token in each usable row: the best one, one of those that remain, or any."""
    if plan.all_greedy:
        return argmax_rows(scores, maxima, WIDE_CHUNK_SIZE)
    token_ids = np.zeros(len(usable), dtype=np.int64)
    greedy = np.flatnonzero(usable & plan.greedy)
    if len(greedy):
        token_ids[greedy] = argmax_rows(_take(scores, greedy), _take(maxima, greedy))
    positions = np.array([request.num_output_tokens for request in plan.requests], dtype=np.uint64)
    uniform = uniforms(plan.seeds, plan.branches, positions)
    sampled = usable & ~plan.greedy
    truncated = np.flatnonzero(sampled & plan.truncated)
    if len(truncated):
        for group in truncate(_take(scores, truncated), _take(maxima, truncated), plan.settings[truncated]):
            row = truncated[group.rows]
            token_ids[row] = draw_candidates(group, uniform[row])
    full = np.flatnonzero(sampled & ~plan.truncated)
    if len(full):
        token_ids[full] = draw_full(scores, best, full, plan.settings.temperature[full], uniform[full])
    return token_ids


def _take(tensor: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return tensor if len(rows) == len(tensor) else tensor[torch.from_numpy(rows).to(tensor.device)]


def _logprobs(
    raw: torch.Tensor, token_ids: list[int], plan: _Plan, failed: np.ndarray
) -> list[dict[int, Logprob] | None]:
    wanted = [(row, k) for row, k in zip(plan.logprob_rows, plan.num_logprobs, strict=True) if not failed[row]]
    results: list[dict[int, Logprob] | None] = [None] * len(token_ids)
    if wanted:
        rows, num_best = zip(*wanted, strict=True)
        computed = token_logprobs(_select(raw, rows), [token_ids[row] for row in rows], num_best)
        for row, result in zip(rows, computed, strict=True):
            results[row] = result
    return results
