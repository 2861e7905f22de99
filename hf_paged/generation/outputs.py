"""What users get back: vLLM's output classes, and the sampler's and runner's results inside the engine."""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import TYPE_CHECKING

from .request import RequestMetrics

if TYPE_CHECKING:
    import torch

    from .recording import Recorded


@dataclasses.dataclass(slots=True)
class Logprob:
    """One token's log-probability under the model's own distribution.

    Args:
        logprob (`float`):
            Natural logarithm of its probability, before any processor or temperature.
        rank (`int`):
            1 for the most probable token; tokens of equal probability share the better rank.
        decoded_token (`str`, *optional*):
            Its text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One answer.

    Args:
        index (`int`):
            Which of the request's `n` answers.
        text (`str`):
            The answer; all of it so far, or what is new, as the caller asked.
        token_ids (`list[int]`):
            Its tokens, the one that ended it included.
        cumulative_logprob (`float`, *optional*):
            Sum of the sampled tokens' log-probabilities, if they were asked for.
        logprobs (`list[dict[int, Logprob]]`, *optional*):
            For each token, token id -> log-probability.
        finish_reason (`str`, *optional*):
            `"stop"`, `"length"`, `"abort"`, `"error"`, or None while running.
        stop_reason (`int` or `str`, *optional*):
            The stop token or stop string that ended it; None for the end-of-sequence token.
        hidden_states (`torch.Tensor`, *optional*):
            `[layers, tokens, hidden_size]`, those that were asked for, once the answer has ended: of the prompt and
            the answer without its last token (which was never computed), or of the last computed token only.
        scores (`torch.Tensor`, *optional*):
            `[answer tokens, vocab_size]` float32, the processed scores that each token was chosen from, once the
            answer has ended, if they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    hidden_states: torch.Tensor | None = None
    scores: torch.Tensor | None = None

    def finished(self) -> bool:
        """Returns whether the answer has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt.

    Args:
        request_id (`str`):
            The request's id.
        prompt (`str`, *optional*):
            The prompt's text, if it was given as text.
        prompt_token_ids (`list[int]`):
            The prompt's tokens.
        prompt_logprobs (`list[dict[int, Logprob] | None]`, *optional*):
            For each prompt token, token id -> log-probability; None for the first token.
        outputs (`list[CompletionOutput]`):
            The answers, by index.
        finished (`bool`):
            Whether all of them have ended.
        metrics (`RequestMetrics`, *optional*):
            Times and counts.
        num_cached_tokens (`int`):
            Prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


class GenerationStatus(enum.IntEnum):
    """Where a request of `generate_batch` or of the manager is, with the names and numbers of Transformers."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4


@dataclasses.dataclass(slots=True)
class GenerationOutput:
    """One answer of `generate_batch` or of the manager: the fields of Transformers' class, and what it lacks.

    Args:
        request_id (`str`):
            The answer's id: `req_<i>` for the i-th input, `req_<i>__child#<j>` for its further answers.
        prompt_ids (`list[int]`):
            The prompt.
        generated_tokens (`list[int]`):
            The answer, the token that ended it included; all of it so far where results are streamed.
        logprobs (`list[float]`):
            Log-probabilities of its tokens, if they were asked for: by `return_logprobs` those that they were chosen
            with, by `logprobs=` those of the model itself, before processors and temperature.
        error (`str`, *optional*):
            What went wrong.
        status (`GenerationStatus`):
            `FINISHED`, or `FAILED` for one that failed or was cancelled; `DECODING` where results are streamed.
        created_time (`float`):
            When it was added, in seconds of `time.perf_counter()`.
        lifespan (`tuple[float, float]`):
            When it was first scheduled and when it ended; -1 for what has not happened.
        timestamps (`list[float]`, *optional*):
            When each token came, if that was asked for.
        finish_reason (`str`, *optional*):
            `"stop"`, `"length"`, `"abort"`, `"error"`, or `None` while it runs.
        stop_reason (`int` or `str`, *optional*):
            The stop token that ended it.
        top_logprobs (`list[dict[int, Logprob]]`, *optional*):
            For each token of the answer, the best tokens and itself, if that was asked for.
        prompt_logprobs (`list[dict[int, Logprob] | None]`, *optional*):
            The same for each token of the prompt; `None` for the first.
        scores (`list[torch.Tensor]`, *optional*):
            For each token of the answer the processed scores it was chosen by, `[vocab_size]`, if asked for.
        hidden_states (`torch.Tensor`, *optional*):
            `[layers, tokens, hidden_size]`, those that were asked for; the last token of an answer has none.
        num_cached_tokens (`int`, defaults to 0):
            Tokens of the prompt that were found in the prefix cache.
    """

    request_id: str
    prompt_ids: list[int] = dataclasses.field(default_factory=list)
    generated_tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None
    status: GenerationStatus = GenerationStatus.PENDING
    created_time: float = dataclasses.field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    timestamps: list[float] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    top_logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    scores: list[torch.Tensor] | None = None
    hidden_states: torch.Tensor | None = None
    num_cached_tokens: int = 0

    def is_finished(self) -> bool:
        """Returns whether the answer has ended, for whatever reason."""
        return self.status >= GenerationStatus.FINISHED


@dataclasses.dataclass(slots=True)
class SamplerOutput:
    """What the sampler chose in a step.

    Args:
        token_ids (`list[int]`):
            One token per row.
        logprobs (`list[dict[int, Logprob] | None]`, *optional*):
            Per row what it asked for; None if no row asked.
        failed_rows (`list[int]`):
            Rows whose logits were not finite; their token must not be used.
        errors (`dict[int, Exception]`):
            What went wrong with single rows, by row: what a caller's processor raised. Their token must not be used.
        scores (`dict[int, torch.Tensor]`):
            `[vocab_size]` float32 for each row that wants its scores, as they were when the token was chosen: after all
            processors, temperature and truncation.
        emptied_rows (`list[int]`):
            Rows, failed ones, whose logits were finite until all tokens had been forbidden.
        ended_rows (`list[int]`):
            Rows whose grammar is complete and that have no other token left; they end without one.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None] | None = None
    failed_rows: list[int] = dataclasses.field(default_factory=list)
    errors: dict[int, Exception] = dataclasses.field(default_factory=dict)
    scores: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    emptied_rows: list[int] = dataclasses.field(default_factory=list)
    ended_rows: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class StepResult:
    """What the runner computed for a step.

    Args:
        logits (`torch.Tensor`):
            `[num_rows, vocab_size]`: first a row for each share with `sample_ids`, in schedule order, then the rows
            of `prompt_logits` shares.
        sample_rows (`list[int]`):
            For each sampled request, in schedule order and branch order, its row of `logits`.
        prompt_rows (`dict[str, tuple[int, int]]`):
            For each `prompt_logits` share the half-open range of its rows, one per scheduled position.
        recorded (`dict[str, Recorded]`):
            By share, the hidden states and attention weights that were wanted.
        chosen (`SamplerOutput`, *optional*):
            The tokens, if they were chosen on the device, in the order of `sample_rows`.
    """

    logits: torch.Tensor
    sample_rows: list[int]
    prompt_rows: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    recorded: dict[str, Recorded] = dataclasses.field(default_factory=dict)
    chosen: SamplerOutput | None = None
