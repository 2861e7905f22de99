"""A request: its tokens, how far their K/V have been computed, and why it ended. No torch."""

from __future__ import annotations

import dataclasses
import enum
import functools
import time
from typing import TYPE_CHECKING, Any

from .sampling.params import SamplingParams

if TYPE_CHECKING:
    from ..cache.prefix_index import BlockHash


class RequestStatus(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended; the values are what vLLM and OpenAI call them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.perf_counter()`, and how often.

    Args:
        arrival_time (`float`):
            When it was added.
        first_scheduled_time (`float`, *optional*):
            When it first got a share of a step.
        first_token_time (`float`, *optional*):
            When its first token was sampled.
        finished_time (`float`, *optional*):
            When it ended.
        num_preemptions (`int`):
            How often it lost its blocks and was computed again.
        num_cached_tokens (`int`):
            Prompt tokens whose K/V were found in the prefix cache at the first admission.
    """

    arrival_time: float = dataclasses.field(default_factory=time.perf_counter)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RequestExtras:
    """What a request may ask for beside its `SamplingParams`.

    Args:
        bad_words_ids (`tuple[tuple[int, ...], ...]`, defaults to `()`):
            Token sequences that must not be generated.
        features (`SamplingFeatures`, *optional*):
            Transformers' further sampling settings, for the sampler.
        logits_processor (`Sequence[Callable]`, *optional*):
            Called in order as `processor(input_ids [1, tokens], scores [1, vocab_size])`; each returns scores.
        stopping_criteria (`Sequence[Callable]`, *optional*):
            Called after each token as `criteria(input_ids [1, tokens], scores)`; a true answer ends the request.
        hidden_states (`HiddenStatesWanted`, *optional*):
            Which hidden states come back with the answer.
        attentions (`bool`, defaults to `False`):
            Whether the attention weights of every token are wanted.
        scores (`bool`, defaults to `False`):
            Whether the processed scores of each token come back with the answer.
        keep_kv (`bool`, defaults to `False`):
            Whether the answers keep a copy of their K/V when they end.
        prompt_embeds (`torch.Tensor`, *optional*):
            `[prompt tokens, hidden_size]`, instead of the embeddings of the prompt's tokens.
    """

    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    features: Any = None
    logits_processor: Any = None
    stopping_criteria: Any = None
    hidden_states: HiddenStatesWanted | None = None
    attentions: bool = False
    scores: bool = False
    keep_kv: bool = False
    prompt_embeds: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class HiddenStatesWanted:
    """Which hidden states a request wants.

    Args:
        layers (`tuple[int, ...]`, *optional*):
            Places in Transformers' `hidden_states` tuple: 0 is the embeddings, -1 the last; `None` means all.
        all_tokens (`bool`, defaults to `True`):
            Those of every token, or of the last one only.
    """

    layers: tuple[int, ...] | None = None
    all_tokens: bool = True


NO_EXTRAS = RequestExtras()


class Request:
    """One sequence of tokens being generated.

        token_ids           | prompt ............... | output ..... |
        num_computed_tokens |<-- K/V in blocks -->|
        still to compute                          |<-------------->|

    Each step moves `num_computed_tokens` towards `num_tokens`; when they meet, a token is sampled and appended.

    Args:
        request_id (`str`):
            Unique among the engine's live requests.
        prompt_token_ids (`list[int]`):
            At least one token.
        params (`SamplingParams`):
            Already resolved against the model's defaults.
        max_tokens (`int`):
            Output tokens at most, already limited to what `max_model_len` leaves.
        stop_token_ids (`frozenset[int]`):
            Tokens that end the request (the model's end-of-sequence tokens included unless ignored).
        priority (`int`, defaults to 0):
            Lower runs earlier under the priority policy.
        extra_keys (`tuple`, defaults to `()`):
            What else the K/V depend on (salt, adapter identity, embeddings); part of every block's identity.
        seed (`int`, defaults to 0):
            Seed of its random numbers, which depend on (seed, branch, output position) alone.
        branch (`int`, defaults to 0):
            Which of the group's answers this is.
        extras (`RequestExtras`, defaults to none):
            What it asks for beside its parameters.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        extra_keys: tuple = (),
        seed: int = 0,
        branch: int = 0,
        extras: RequestExtras = NO_EXTRAS,
    ):
        assert prompt_token_ids, "a request needs at least one prompt token; the engine checks this"
        self.request_id = request_id
        self.params = params
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.priority = priority
        self.extra_keys = extra_keys
        self.seed = seed
        self.branch = branch
        self.extras = extras
        self.group: RequestGroup | None = None
        self.session: Any = None  # whoever chooses its tokens in the sampler's place (generation/session.py)
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: BaseException | None = None
        self.grammar: Any = None  # that its answer must follow, compiled (generation/structured/)
        self.matcher: Any = None  # how far it has
        self.ready = True  # False while something it needs (a grammar) is still being made
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0  # 1 if its next token has been chosen on the device and is not known here yet
        self.arrival_number = -1  # set by the scheduler; the order of arrival
        self.metrics = RequestMetrics()
        self.block_hashes: list[BlockHash] = []  # of its full blocks, extended as tokens arrive

    @property
    def num_tokens(self) -> int:
        """Returns prompt and output tokens together."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Returns the tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """Returns a copy of the prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """Returns a copy of what was generated."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Returns whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    @property
    def num_pending_tokens(self) -> int:
        """Returns the tokens whose K/V are still to be computed; none while its session chooses the next one."""
        return len(self.token_ids) + self.num_in_flight_tokens - self.num_computed_tokens

    @property
    def wants_prompt_logits(self) -> bool:
        """Returns whether logits are needed at all prompt positions, so that no prefix hit may skip them."""
        return self.params.prompt_logprobs is not None

    @property
    def needs_prompt_logits(self) -> bool:
        """Returns whether the logits at its prompt positions are wanted and have not all been computed yet.

        The first output token comes from the last prompt position, so a request with output has had them all.
        """
        return self.wants_prompt_logits and len(self.token_ids) == self.num_prompt_tokens

    @property
    def skips_prefix_cache(self) -> bool:
        """Returns whether its tokens must be computed even if their K/V are there: something else of them is wanted."""
        extras = self.extras
        if extras.attentions or (extras.hidden_states is not None and extras.hidden_states.all_tokens):
            # What was recorded before a preemption is kept, so that tokens of the answer need not be computed again.
            return self.session is not None or len(self.token_ids) == self.num_prompt_tokens
        return self.needs_prompt_logits

    @functools.cached_property
    def needs_host_tokens(self) -> bool:
        """Returns whether no step may be put together before its newest token is known.

        So it is if more than logits, settings, seed and position decide about its tokens, or if somebody wants to see
        what a step computed before the next one. Its session, if any, is set before it first runs.
        """
        params, extras = self.params, self.extras
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        choosers = (
            self.session,
            params.structured_outputs,
            params.min_tokens,
            params.logit_bias,
            params.allowed_token_ids,
            extras.bad_words_ids,
            extras.features,
            extras.logits_processor,
            extras.stopping_criteria,
        )
        wants = (params.logprobs, params.prompt_logprobs, extras.hidden_states, extras.prompt_embeds)
        return bool(
            penalties != (0, 0, 1)
            or any(choosers)
            or any(want is not None for want in wants)
            or (extras.attentions or extras.scores or extras.keep_kv)
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed, prompt {self.num_prompt_tokens})"
        )


@dataclasses.dataclass(slots=True)
class RequestGroup:
    """The answers to one prompt (`n`, later beams). The first computes the prompt; the others fork from it.

    Args:
        group_id (`str`):
            The id that the user sees.
        requests (`list[Request]`):
            The branches; those after the first hold a copy of the prompt and wait until the first has computed it.
        context (`Any`, *optional*):
            Whatever the engine wants to find again with the group (detokenizers, the caller's queue).
    """

    group_id: str
    requests: list[Request]
    context: Any = None

    def __post_init__(self):
        for request in self.requests:
            request.group = self

    @property
    def is_finished(self) -> bool:
        """Returns whether all branches have ended."""
        return all(request.is_finished for request in self.requests)
