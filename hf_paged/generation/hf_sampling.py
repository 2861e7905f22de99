"""From a complete `GenerationConfig` to what a request of the engine asks of its sampler."""

from __future__ import annotations

import copy
import dataclasses
import functools
import numbers
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..errors import InvalidRequestError, InvalidTokenError, NotSupportedError
from .admission import Limits, check_banned
from .request import Request, RequestExtras
from .sampling.features import NO_FEATURES, SamplingFeatures
from .sampling.params import SamplingParams
from .sampling.row_processors import PerAnswer

_BATCHED = "batched: all rows of a step together"
_BY_ROW = "row by row: Transformers' own processor, and with it all others of that request"
_CRITERION = "row by row: Transformers' own criterion after each token"
# How each field of `GenerationConfig` about scores and endings is done here.
HOW: dict[str, str] = {
    **dict.fromkeys(
        (
            "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "bad_words_ids", "min_length",
            "min_new_tokens", "eos_token_id", "num_return_sequences", "sequence_bias", "encoder_repetition_penalty",
            "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id",
            "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
        ),
        _BATCHED,
    ),
    **dict.fromkeys(
        ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits"),
        "batched: Transformers' own classes, rows with equal settings together",
    ),
    **dict.fromkeys(("guidance_scale", "watermarking_config"), _BY_ROW),
    **dict.fromkeys(("stop_strings", "max_time"), _CRITERION),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CustomParts:
    """What a caller of `generate` gives beside the configuration.

    Args:
        logits_processor (`Sequence[Callable]`, *optional*):
            Processors of the caller's own.
        stopping_criteria (`Sequence[Callable]`, *optional*):
            Criteria of the caller's own.
        prefix_allowed_tokens_fn (`Callable[[int, torch.Tensor], list[int]]`, *optional*):
            Which tokens may follow, given the row and its tokens.
        row (`int`, defaults to 0):
            Which row `prefix_allowed_tokens_fn` is told.
        negative_prompt_ids (`torch.Tensor`, *optional*):
            `[1, length]`, for `guidance_scale`.
        negative_prompt_attention_mask (`torch.Tensor`, *optional*):
            `[1, length]`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For `stop_strings`.
    """

    logits_processor: Sequence[Callable] | None = None
    stopping_criteria: Sequence[Callable] | None = None
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None
    row: int = 0
    negative_prompt_ids: torch.Tensor | None = None
    negative_prompt_attention_mask: torch.Tensor | None = None
    tokenizer: Any = None


NO_PARTS = CustomParts()


def request_settings(
    model: Any,
    config: GenerationConfig,
    prompt_length: int,
    *,
    max_tokens: int,
    min_tokens: int,
    custom: CustomParts = NO_PARTS,
) -> tuple[SamplingParams, RequestExtras]:
    """Returns what a request must ask for to be sampled as Transformers' `generate` would sample a row.

    What the sampler has a batched form for is asked for by name. A request that needs more (`guidance_scale`,
    `watermarking_config`, `prefix_allowed_tokens_fn`, or a processor that takes the place of one of Transformers') gets
    all of its processors from Transformers, called for its row alone.

    Args:
        model (`PreTrainedModel`):
            The paged model.
        config (`GenerationConfig`):
            With all defaults filled in; not changed.
        prompt_length (`int`):
            Columns of the input, padding included, as Transformers counts lengths.
        max_tokens (`int`):
            New tokens at most.
        min_tokens (`int`):
            New tokens at least.
        custom (`CustomParts`, *optional*):
            What the caller gave beside it.

    Returns:
        `tuple[SamplingParams, RequestExtras]`: To be given to `Engine.add_request`.

    Raises:
        ValueError: What Transformers' processors and criteria refuse.
        InvalidRequestError: If a token lies outside the vocabulary, a list holds something that cannot be called, or a
            setting is of a kind that Transformers would stumble over without naming it.
        NotSupportedError: For several beams, which are no single request.
    """
    if (config.num_beams or 1) > 1:
        raise NotSupportedError(f"`num_beams` {config.num_beams} makes several rows depend on each other.")
    processors = _callables("logits_processor", custom.logits_processor)
    criteria = _callables("stopping_criteria", custom.stopping_criteria)
    config = _complete(model, config, prompt_length, max_tokens, min_tokens)
    _check_kinds(config)
    limits: Limits = model.engine.limits
    # Transformers' constructors refuse what is wrong with a setting.
    stock = _stock_processors(model, config, prompt_length, dataclasses.replace(custom, logits_processor=None), "cpu")
    features = _features(config, prompt_length, max_tokens, stock, limits)
    banned = banned_sequences(config, config._eos_token_tensor, limits)
    ends = _tokens(config._eos_token_tensor)
    endings = _endings(model, config, criteria, custom.tokenizer)
    if endings.max_length != config.max_length:
        max_tokens = max(endings.max_length - prompt_length, 1)
    replaces = {type(processor) for processor in processors} & {type(processor) for processor in stock}
    other_ends = endings.token_ids != ends and (min_tokens or features.exponential_decay_length_penalty)
    if replaces or other_ends or custom.prefix_allowed_tokens_fn is not None or _by_row(config):
        params = _drawing_only(config, max_tokens)
        make = functools.partial(_processors_of, model, config, prompt_length, custom)
        extras = RequestExtras(logits_processor=PerAnswer(make))
    else:
        params = sampling_params(config, max_tokens, min_tokens)
        extras = RequestExtras(
            bad_words_ids=banned,
            features=features if features != NO_FEATURES else None,
            logits_processor=processors or None,
        )
    # As in Transformers, an end token outside the vocabulary is no error; it never comes.
    params = params.replace(stop_token_ids=[token for token in endings.token_ids if 0 <= token < limits.vocab_size])
    return params, dataclasses.replace(extras, stopping_criteria=endings.criteria or None)


def sampling_params(config: GenerationConfig, max_tokens: int, min_tokens: int) -> SamplingParams:
    """Returns sampling parameters that do what a complete generation configuration says, as far as they go.

    Args:
        config (`GenerationConfig`):
            With all defaults filled in.
        max_tokens (`int`):
            New tokens at most.
        min_tokens (`int`):
            New tokens at least.
    """
    sample = bool(config.do_sample)
    if sample and config.top_k is not None and config.top_k < 0:
        raise InvalidRequestError(f"`top_k` has to be a positive number, or 0 for all tokens, but is {config.top_k}.")
    keep_best = sample and config.top_p == 0
    return _drawing_only(config, max_tokens).replace(
        temperature=1.0 if sample and config.temperature is None else float(config.temperature) if sample else 0.0,
        top_k=1 if keep_best else (config.top_k or 0) if sample else 0,
        top_p=float(min(config.top_p or 1.0, 1.0)) if sample else 1.0,
        min_p=float(config.min_p or 0.0) if sample else 0.0,
        repetition_penalty=1.0 if config.repetition_penalty is None else float(config.repetition_penalty),
        min_tokens=min(min_tokens, max_tokens),
    )


def _drawing_only(config: GenerationConfig, max_tokens: int) -> SamplingParams:
    """Parameters that change no score: the best token, or one drawn from the scores as they are."""
    return SamplingParams(
        n=config.num_return_sequences or 1,
        temperature=1.0 if config.do_sample else 0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        max_tokens=max_tokens,
        min_tokens=0,
        ignore_eos=True,  # the configuration's own end-of-sequence tokens are passed as stop tokens
        detokenize=False,
    )


def banned_sequences(config: GenerationConfig, eos: torch.Tensor | None, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Returns `bad_words_ids` without end-of-sequence tokens, which Transformers leaves out of them.

    Args:
        config (`GenerationConfig`):
            With all defaults filled in.
        eos (`torch.Tensor`, *optional*):
            End-of-sequence tokens.
        limits (`Limits`):
            The vocabulary.

    Raises:
        InvalidRequestError: If it is not a list of lists of token ids.
    """
    words = config.bad_words_ids
    if words is None:
        return ()
    if not isinstance(words, list) or not words or not all(isinstance(w, list) and w for w in words):
        raise InvalidRequestError(f"`bad_words_ids` has to be a non-empty list of lists of token ids, but is {words}.")
    check_banned(words, limits)
    ends = _tokens(eos)
    return tuple(tuple(word) for word in words if not (len(word) == 1 and word[0] in ends))


def _check_kinds(config: GenerationConfig) -> None:
    """Names the setting where Transformers' own error would not."""
    numbers = ("temperature", "top_p", "min_p") if config.do_sample else ()
    for name in (*numbers, "max_time"):
        value = getattr(config, name)
        if value is not None and not _is_number(value):
            raise InvalidRequestError(f"`{name}` must be a number, got {value!r:.200}.")
    strings = config.stop_strings
    is_list = isinstance(strings, (list, tuple, set)) and all(isinstance(string, str) for string in strings)
    if not (strings is None or isinstance(strings, str) or is_list):
        raise InvalidRequestError(f"`stop_strings` must be a string or a list of strings, got {strings!r:.200}.")
    decay = config.exponential_decay_length_penalty
    if decay is None:
        return
    if not (isinstance(decay, (list, tuple)) and len(decay) == 2 and all(map(_is_number, decay))):
        raise InvalidRequestError(
            "`exponential_decay_length_penalty` must be two numbers, the tokens after which it begins and its factor, "
            f"got {decay!r:.200}."
        )
    if config._eos_token_tensor is None:
        raise InvalidRequestError("`exponential_decay_length_penalty` favours `eos_token_id`, which has to be set.")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _by_row(config: GenerationConfig) -> bool:
    return config.guidance_scale not in (None, 1) or config.watermarking_config is not None


def _complete(
    model: Any, config: GenerationConfig, prompt_length: int, max_tokens: int, min_tokens: int
) -> GenerationConfig:
    """A copy that says what Transformers' own loop would have made of it before it makes processors."""
    config = copy.copy(config)
    if not hasattr(config, "_eos_token_tensor"):
        model._prepare_special_tokens(config, True, device="cpu")
    config.max_length, config.max_new_tokens = prompt_length + max_tokens, None
    config.min_length, config.min_new_tokens = (prompt_length + min_tokens if min_tokens else 0), None
    config.num_beams = 1
    return config


def _stock_processors(
    model: Any,
    config: GenerationConfig,
    prompt_length: int,
    custom: CustomParts,
    device: torch.device | str,
    prompt: Sequence[int] = (0,),
) -> LogitsProcessorList:
    given, row = custom.prefix_allowed_tokens_fn, custom.row
    config = copy.copy(config)
    config.num_return_sequences = 1  # of the rows that one processor gets
    if config._eos_token_tensor is not None:
        config._eos_token_tensor = config._eos_token_tensor.to(device)
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt_length,
        encoder_input_ids=torch.tensor([list(prompt)], device=device),
        prefix_allowed_tokens_fn=(lambda _, tokens: given(row, tokens)) if given is not None else None,
        logits_processor=LogitsProcessorList(custom.logits_processor or []),
        device=device,
        model_kwargs={},
        negative_prompt_ids=custom.negative_prompt_ids,
        negative_prompt_attention_mask=custom.negative_prompt_attention_mask,
    )


def _processors_of(
    model: Any, config: GenerationConfig, prompt_length: int, custom: CustomParts, request: Request
) -> LogitsProcessorList:
    return _stock_processors(model, config, prompt_length, custom, model.device, request.prompt_token_ids)


def _features(
    config: GenerationConfig, prompt_length: int, max_tokens: int, stock: LogitsProcessorList, limits: Limits
) -> SamplingFeatures:
    biases = [p.sequence_bias.items() for p in stock if type(p) is SequenceBiasLogitsProcessor]
    decay = config.exponential_decay_length_penalty
    bos = config.forced_bos_token_id
    forced_eos = _tokens(config.forced_eos_token_id)
    for name, tokens in {
        "forced_bos_token_id": () if bos is None else (bos,),
        "forced_eos_token_id": forced_eos,
        "sequence_bias": [token for pairs in biases for sequence, _ in pairs for token in sequence],
    }.items():
        wrong = [token for token in tokens if not 0 <= token < limits.vocab_size]
        if wrong:
            raise InvalidTokenError(
                f"`{name}` holds tokens outside the vocabulary of {limits.vocab_size}: {wrong}; give token ids from 0 "
                f"to {limits.vocab_size - 1}."
            )
    return SamplingFeatures(
        sequence_bias=tuple((tuple(map(int, seq)), float(bias)) for pairs in biases for seq, bias in pairs),
        encoder_repetition_penalty=config.encoder_repetition_penalty or 1.0,
        no_repeat_ngram_size=max(config.no_repeat_ngram_size or 0, 0),
        encoder_no_repeat_ngram_size=max(config.encoder_no_repeat_ngram_size or 0, 0),
        forced_bos_token_id=bos if prompt_length == 1 else None,
        forced_eos_token_id=forced_eos,
        forced_eos_length=max_tokens if forced_eos else None,
        remove_invalid_values=config.remove_invalid_values is True,
        exponential_decay_length_penalty=None if decay is None else (decay[0], decay[1]),
        suppress_tokens=_known(config.suppress_tokens, limits),
        begin_suppress_tokens=_known(config.begin_suppress_tokens, limits),
        begin_index=0 if prompt_length > 1 or bos is None else 1,
        renormalize_logits=config.renormalize_logits is True,
        **(_cuts(config) if config.do_sample else {}),
    )


def _cuts(config: GenerationConfig) -> dict[str, float | None]:
    """The settings that cut by probability, where Transformers reads them."""

    def inside(value: float | None) -> float | None:
        return value if value is not None and 0 < value < 1 else None

    return {
        "top_h": config.top_h,
        "typical_p": inside(config.typical_p),
        "epsilon_cutoff": inside(config.epsilon_cutoff),
        "eta_cutoff": inside(config.eta_cutoff),
    }


def _known(tokens: Any, limits: Limits) -> tuple[int, ...]:
    """Those that are in the vocabulary; Transformers ignores the others."""
    return tuple(token for token in _tokens(tokens) if 0 <= token < limits.vocab_size)


def _tokens(value: Any) -> tuple[int, ...]:
    """Token ids of `None`, one, a list or a tensor."""
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return tuple(map(int, value)) if isinstance(value, (list, tuple, set)) else (int(value),)


def _callables(name: str, given: Any) -> tuple[Callable, ...]:
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)) or not all(map(callable, given)):
        raise InvalidRequestError(f"`{name}` must be a list of callables, got {given!r:.200}.")
    return tuple({id(one): one for one in given}.values())  # Transformers too calls one that is listed twice once


# ---------------------------------------------------------------------------------------------------------- endings


@dataclasses.dataclass(frozen=True)
class _Endings:
    """When an answer ends: at a length in columns, with one of some tokens, or when a criterion says so."""

    max_length: int
    token_ids: tuple[int, ...]
    criteria: tuple[Callable, ...]


def _endings(model: Any, config: GenerationConfig, given: tuple[Callable, ...], tokenizer: Any) -> _Endings:
    strings = config.stop_strings
    config = copy.copy(config)
    shared: tuple[Callable, ...] = ()
    if strings is not None and tokenizer is not None:
        config.stop_strings = None
        if not any(type(criterion) is StopStringCriteria for criterion in given):
            shared = (_stop_strings(tokenizer, (strings,) if isinstance(strings, str) else tuple(strings)),)
    merged = model._get_stopping_criteria(config, StoppingCriteriaList(given), tokenizer=tokenizer)
    # A criterion of the caller's own may have taken the place of the configuration's.
    lengths = [criterion.max_length for criterion in merged if type(criterion) is MaxLengthCriteria]
    ends = [criterion for criterion in merged if type(criterion) is EosTokenCriteria]
    rest = [criterion for criterion in merged if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria)]
    token_ids = dict.fromkeys(token for criterion in ends for token in _tokens(criterion.eos_token_id))
    return _Endings(min(lengths), tuple(token_ids), (*shared, *rest))


_MAX_STOP_STRINGS = 64  # different lists for one tokenizer
_STOP_STRINGS: weakref.WeakKeyDictionary[Any, dict[Any, StopStringCriteria]] = weakref.WeakKeyDictionary()


def _stop_strings(tokenizer: Any, strings: tuple[str, ...]) -> StopStringCriteria:
    """Transformers' criterion, made once for a tokenizer and some strings: making it reads the whole vocabulary."""
    made = _STOP_STRINGS.setdefault(tokenizer, {})
    key = (len(tokenizer), strings)
    if key not in made:
        if len(made) >= _MAX_STOP_STRINGS:
            made.clear()
        made[key] = StopStringCriteria(tokenizer=tokenizer, stop_strings=list(strings))
    return made[key]
