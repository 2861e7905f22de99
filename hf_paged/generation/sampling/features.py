"""Transformers' sampling settings that `SamplingParams` lacks. Plain Python, like the parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ...errors import InvalidRequestError


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """Further sampling settings of one request, each with a form that does a whole batch at once.

    Names and meanings are those of `transformers.GenerationConfig`, except that lengths count new tokens only.

    Args:
        sequence_bias (`tuple[tuple[tuple[int, ...], float], ...]`, defaults to `()`):
            Pairs of a token sequence and the number added to its last token's score where the others came before.
        encoder_repetition_penalty (`float`, defaults to 1.0):
            Above 1 it favours the prompt's tokens, below 1 it avoids them. Positive.
        no_repeat_ngram_size (`int`, defaults to 0):
            No sequence of this many tokens occurs twice; 0 is off.
        encoder_no_repeat_ngram_size (`int`, defaults to 0):
            No sequence of this many tokens of the prompt occurs in the answer; 0 is off.
        forced_bos_token_id (`int`, *optional*):
            The first new token, if the prompt is one token.
        forced_eos_token_id (`tuple[int, ...]`, defaults to `()`):
            The only tokens allowed as the last one of `forced_eos_length`.
        forced_eos_length (`int`, *optional*):
            How many new tokens there are when `forced_eos_token_id` has been generated.
        remove_invalid_values (`bool`, defaults to `False`):
            NaN becomes 0, and infinities become the largest numbers, instead of an error.
        exponential_decay_length_penalty (`tuple[int, float]`, *optional*):
            After so many new tokens the end tokens' scores grow by this factor with each token.
        suppress_tokens (`tuple[int, ...]`, defaults to `()`):
            Tokens that are never generated.
        begin_suppress_tokens (`tuple[int, ...]`, defaults to `()`):
            Tokens that are not generated at `begin_index`.
        begin_index (`int`, defaults to 0):
            After how many new tokens `begin_suppress_tokens` are suppressed.
        top_h (`float`, *optional*):
            Keep the best tokens whose entropy stays within this share of the whole. In (0, 1].
        typical_p (`float`, *optional*):
            Keep the most typical tokens whose probabilities reach this sum. In (0, 1).
        epsilon_cutoff (`float`, *optional*):
            Drop tokens less probable than this. In (0, 1).
        eta_cutoff (`float`, *optional*):
            Drop tokens less probable than this, or than what the entropy allows. In (0, 1).
        renormalize_logits (`bool`, defaults to `False`):
            The processed scores are log-probabilities.

    Raises:
        InvalidRequestError: If a value is out of its range or of the wrong type.
    """

    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    forced_eos_length: int | None = None
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    begin_index: int = 0
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    renormalize_logits: bool = False

    def __post_init__(self):
        _check_token_ids(self)
        for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "begin_index"):
            if not _is_whole(getattr(self, name)):
                raise InvalidRequestError(f"`{name}` must be a whole number from 0, got {getattr(self, name)!r}.")
        if not _is_number(self.encoder_repetition_penalty) or not 0 < self.encoder_repetition_penalty < math.inf:
            raise InvalidRequestError(
                f"`encoder_repetition_penalty` must be a positive number, got {self.encoder_repetition_penalty!r}."
            )
        for name in ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value <= 1 and (value < 1 or name == "top_h")):
                limits = "(0, 1]" if name == "top_h" else "(0, 1)"
                raise InvalidRequestError(f"`{name}` must be a number in {limits}, or None for off, got {value!r}.")
        decay = self.exponential_decay_length_penalty
        if decay is not None and not (
            isinstance(decay, tuple) and len(decay) == 2 and isinstance(decay[0], int) and _is_number(decay[1])
        ):
            raise InvalidRequestError(
                f"`exponential_decay_length_penalty` must be a pair of a number of tokens and a factor, got {decay!r}."
            )

    @property
    def truncates(self) -> bool:
        """Returns whether it removes tokens by their probability, after temperature."""
        return (self.top_h, self.typical_p, self.epsilon_cutoff, self.eta_cutoff) != (None, None, None, None)


def _check_token_ids(features: SamplingFeatures) -> None:
    bos = features.forced_bos_token_id
    lists: dict[str, Any] = {
        "forced_bos_token_id": () if bos is None else (bos,),
        "forced_eos_token_id": features.forced_eos_token_id,
        "suppress_tokens": features.suppress_tokens,
        "begin_suppress_tokens": features.begin_suppress_tokens,
    }
    for name, token_ids in lists.items():
        if not isinstance(token_ids, tuple) or not all(map(_is_whole, token_ids)):
            raise InvalidRequestError(f"`{name}` must hold token ids (whole numbers from 0), got {token_ids!r}.")
    if features.forced_eos_token_id and not _is_whole(features.forced_eos_length):
        raise InvalidRequestError("`forced_eos_token_id` needs `forced_eos_length`, a number of new tokens.")
    for pair in features.sequence_bias:
        if len(pair) != 2 or not pair[0] or not all(map(_is_whole, pair[0])) or not _is_number(pair[1]):
            raise InvalidRequestError(
                f"`sequence_bias` must hold pairs of a non-empty token sequence and a number, got {pair!r}."
            )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


NO_FEATURES = SamplingFeatures()
