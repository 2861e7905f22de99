"""What a request may ask of the sampler. Plain Python: the bookkeeping reads it without torch."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequestError, NotSupportedError
from ..structured.params import StructuredOutputsParams

_UNSET: Any = object()
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
_MAX_DIGITS = 20  # of a token id that is written as text
_REPETITION_PENALTIES = (1e-6, 1e6)  # beyond them scores may become infinite


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, with the names and defaults of vLLM.

    A field that is not given takes its value from the model's `generation_config.json` when the request is added
    (`resolved`), and the default below otherwise.

    Args:
        n (`int`, defaults to 1):
            Answers per prompt. The prompt is computed once.
        presence_penalty (`float`, defaults to 0.0):
            Subtracted from the score of each token that the answer contains. In [-2, 2].
        frequency_penalty (`float`, defaults to 0.0):
            Subtracted once for each time that the answer contains the token. In [-2, 2].
        repetition_penalty (`float`, defaults to 1.0):
            Divides positive and multiplies negative scores of tokens in the prompt or the answer. In [1e-6, 1e6].
        temperature (`float`, defaults to 1.0):
            Divides the scores; 0 means greedy.
        top_p (`float`, defaults to 1.0):
            Keep the smallest set of tokens whose probabilities reach this sum. In (0, 1].
        top_k (`int`, defaults to 0):
            Keep the k best tokens; 0, -1 and None keep all.
        min_p (`float`, defaults to 0.0):
            Drop tokens less probable than this share of the best one. In [0, 1].
        seed (`int`, *optional*):
            Fixes the answer, whatever runs beside it.
        stop (`str` or `list[str]`, *optional*):
            The answer ends before the first of these strings.
        stop_token_ids (`list[int]`, *optional*):
            The answer ends with the first of these tokens.
        bad_words (`list[str]`, *optional*):
            Strings whose token sequences are not generated.
        include_stop_str_in_output (`bool`, defaults to `False`):
            Leave the stop string, or the text of the stop token, in the answer's text.
        ignore_eos (`bool`, defaults to `False`):
            Do not stop at the model's end-of-sequence tokens.
        max_tokens (`int`, *optional*, defaults to 16):
            Tokens of an answer at most; `None` means up to `max_model_len`.
        min_tokens (`int`, defaults to 0):
            No ending of any kind before this many tokens.
        logprobs (`int`, *optional*):
            Log-probabilities of this many best tokens at each position, and of the sampled token.
        prompt_logprobs (`int`, *optional*):
            The same for each prompt token.
        detokenize (`bool`, defaults to `True`):
            Whether the answer's text is made.
        skip_special_tokens (`bool`, defaults to `True`):
            Leave special tokens out of the text.
        spaces_between_special_tokens (`bool`, defaults to `True`):
            Accepted for vLLM's sake; fast tokenizers write no such spaces, so only True is accepted.
        logit_bias (`dict[int, float]`, *optional*):
            Added to the scores of these tokens. In [-100, 100].
        allowed_token_ids (`list[int]`, *optional*):
            Only these tokens are generated.
        structured_outputs (`StructuredOutputsParams` or `dict`, *optional*):
            The form that the answer must have: JSON, a regular expression, choices or a grammar.

    Raises:
        InvalidRequestError: If a value is out of its range or of the wrong type.
        NotSupportedError: If a value is understood but not built.
    """

    n: int = _UNSET
    presence_penalty: float = _UNSET
    frequency_penalty: float = _UNSET
    repetition_penalty: float = _UNSET
    temperature: float = _UNSET
    top_p: float = _UNSET
    top_k: int | None = _UNSET
    min_p: float = _UNSET
    seed: int | None = _UNSET
    stop: str | Sequence[str] | None = _UNSET
    stop_token_ids: Sequence[int] | None = _UNSET
    bad_words: Sequence[str] | None = _UNSET
    include_stop_str_in_output: bool = _UNSET
    ignore_eos: bool = _UNSET
    max_tokens: int | None = _UNSET
    min_tokens: int = _UNSET
    logprobs: int | None = _UNSET
    prompt_logprobs: int | None = _UNSET
    detokenize: bool = _UNSET
    skip_special_tokens: bool = _UNSET
    spaces_between_special_tokens: bool = _UNSET
    logit_bias: Mapping[int, float] | None = _UNSET
    allowed_token_ids: Sequence[int] | None = _UNSET
    structured_outputs: StructuredOutputsParams | None = _UNSET
    guided_decoding: dataclasses.InitVar[Any] = None  # what older versions of vLLM called it: refused
    explicit: frozenset[str] = dataclasses.field(default=frozenset(), init=False, repr=False, compare=False)

    def __post_init__(self, guided_decoding: Any):
        if guided_decoding is not None:
            raise InvalidRequestError(
                "`guided_decoding` is vLLM's older name; give `structured_outputs`, a dict of the same fields or a "
                "StructuredOutputsParams."
            )
        set_ = object.__setattr__
        explicit = frozenset(name for name in DEFAULTS if getattr(self, name) is not _UNSET)
        for name, default in DEFAULTS.items():
            value = getattr(self, name)
            if value is _UNSET or (value is None and default is not None and name != "max_tokens"):
                set_(self, name, default)
        set_(self, "explicit", explicit)
        _normalize(self)
        _validate(self)

    @property
    def greedy(self) -> bool:
        """Returns whether the most probable token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    def replace(self, **changes: Any) -> SamplingParams:
        """Returns a copy with some fields changed; only fields given so far, or here, count as given.

        Args:
            changes (`Any`):
                New values by field name.
        """
        values = {name: getattr(self, name) for name in self.explicit}
        return SamplingParams(**{**values, **changes})

    def resolved(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns a copy whose fields that were not given are taken from the model's own defaults.

        Args:
            defaults (`Mapping[str, Any]`):
                Values by field name, from the model's generation configuration.
        """
        missing = {name: value for name, value in defaults.items() if name not in self.explicit and value is not None}
        return self.replace(**missing) if missing else self


DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "bad_words": (),
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "logit_bias": None,
    "allowed_token_ids": None,
    "structured_outputs": None,
}


def _normalize(params: SamplingParams) -> None:
    """Gives the fields that accept several spellings one form: tuples, and 0 for a top_k that is off."""
    set_ = object.__setattr__
    stop = params.stop
    set_(params, "stop", (stop,) if isinstance(stop, str) else _as_tuple("stop", stop))
    for name in ("stop_token_ids", "bad_words"):
        set_(params, name, _as_tuple(name, getattr(params, name)))
    if params.top_k == -1 and not isinstance(params.top_k, bool):
        set_(params, "top_k", 0)
    if params.allowed_token_ids is not None:
        set_(params, "allowed_token_ids", _as_tuple("allowed_token_ids", params.allowed_token_ids))
    for name in ("stop_token_ids", "allowed_token_ids"):
        set_(params, name, getattr(params, name) and tuple(_token_id(name, token) for token in getattr(params, name)))
    for name in ("n", "seed", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"):
        index = _index(getattr(params, name))
        if index is not None:
            set_(params, name, index)
    if params.logit_bias is not None:
        if not isinstance(params.logit_bias, Mapping):
            raise InvalidRequestError(f"`logit_bias` must map token ids to numbers, got {params.logit_bias!r}.")
        set_(params, "logit_bias", {_token_id("logit_bias", k): v for k, v in params.logit_bias.items()} or None)
    if params.structured_outputs is not None:
        set_(params, "structured_outputs", StructuredOutputsParams.of(params.structured_outputs))


def _validate(params: SamplingParams) -> None:
    _whole("n", params.n, 1)
    _number("temperature", params.temperature, 0, math.inf, "0 means greedy")
    _number("top_p", params.top_p, 0, 1, "1 keeps all tokens", open_low=True)
    _number("min_p", params.min_p, 0, 1, "0 keeps all tokens")
    _number("presence_penalty", params.presence_penalty, -2, 2, "0 means none")
    _number("frequency_penalty", params.frequency_penalty, -2, 2, "0 means none")
    _number("repetition_penalty", params.repetition_penalty, *_REPETITION_PENALTIES, "1 means none")
    _whole("top_k", params.top_k, 0, hint="0, -1 or None keeps all tokens")
    _whole("min_tokens", params.min_tokens, 0)
    if params.max_tokens is not None:
        _whole("max_tokens", params.max_tokens, 1)
        if params.min_tokens > params.max_tokens:
            raise InvalidRequestError(
                f"`min_tokens` ({params.min_tokens}) must not exceed `max_tokens` ({params.max_tokens})."
            )
    if params.seed is not None:
        _whole("seed", params.seed, -(2**63), 2**64 - 1)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _whole(name, getattr(params, name), 0, MAX_LOGPROBS)
    _validate_flags(params)
    _validate_strings(params)
    _validate_token_ids(params)


def _validate_flags(params: SamplingParams) -> None:
    for name in (
        "include_stop_str_in_output",
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    ):
        if not isinstance(getattr(params, name), bool):
            raise InvalidRequestError(f"`{name}` must be True or False, got {getattr(params, name)!r}.")
    if not params.spaces_between_special_tokens:
        raise NotSupportedError("`spaces_between_special_tokens=False` is not supported; leave it at True.")


def _validate_token_ids(params: SamplingParams) -> None:
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise InvalidRequestError("`allowed_token_ids` is empty, so no token could be generated; give None for all.")
    for token_id, bias in (params.logit_bias or {}).items():
        _number(f"logit_bias[{token_id}]", bias, -100, 100, "0 means none")


def _validate_strings(params: SamplingParams) -> None:
    for name in ("stop", "bad_words"):
        for text in getattr(params, name) or ():
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"`{name}` must hold non-empty strings, got {text!r}.")
    if len(params.stop or ()) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"`stop` takes at most {MAX_STOP_STRINGS} strings, got {len(params.stop or ())}.")
    if params.stop and not params.detokenize:
        raise InvalidRequestError("`stop` strings need the text: set `detokenize=True` or use `stop_token_ids`.")


def _as_tuple(name: str, value: Any) -> tuple:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise InvalidRequestError(f"`{name}` must be a list, got {value!r}.")
    return tuple(value)


def _token_id(name: str, value: Any) -> int:
    """Accepts whole numbers and, as JSON object keys are strings, their decimal text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
        value = int(value)
    index = _index(value)
    if index is None or index < 0:
        raise InvalidRequestError(f"`{name}` must hold token ids (whole numbers from 0), got {value!r}.")
    return index


def _index(value: Any) -> int | None:
    """The whole number that a value is (NumPy's and torch's count), or None."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return value.__index__()
    except (TypeError, RuntimeError):  # arrays and tensors of several numbers
        return None


def _number(name: str, value: Any, low: float, high: float, hint: str, open_low: bool = False) -> None:
    good = isinstance(value, numbers.Real) and not isinstance(value, bool) and _is_finite(value)
    if not good or not low <= value <= high or (open_low and value == low):
        limits = f"{'(' if open_low else '['}{low}, {high}{')' if high == math.inf else ']'}"
        raise InvalidRequestError(f"`{name}` must be a number in {limits} ({hint}), got {value!r}.")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _whole(name: str, value: Any, low: int, high: int | None = None, hint: str = "") -> None:
    if _index(value) is None or value < low or (high is not None and value > high):
        limits = f"from {low}" + (f" to {high}" if high is not None else "")
        raise InvalidRequestError(
            f"`{name}` must be a whole number {limits}{f' ({hint})' if hint else ''}, got {value!r}."
        )
