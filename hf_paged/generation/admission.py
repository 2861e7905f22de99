"""Checks a request against the model and the pool before anything is touched, and turns it into `Request` objects."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InvalidEmbedsError, InvalidRequestError, InvalidTokenError, PromptTooLongError
from .plan import EnginePlan
from .request import Request, RequestExtras, RequestGroup
from .sampling.features import SamplingFeatures
from .sampling.params import SamplingParams
from .structured.tokenizers import check_tokenizer

_SEED_MASK = 2**64 - 1
_KEY_TYPES = (str, bytes, int, float, bool, type(None))


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request must respect.

    Args:
        plan (`EnginePlan`):
            Lengths and seats.
        num_embeddings (`int`):
            Token ids that a prompt may hold.
        vocab_size (`int`):
            Token ids that can be generated.
        eos_token_ids (`frozenset[int]`):
            The model's end-of-sequence tokens.
    """

    plan: EnginePlan
    num_embeddings: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def check_prompt(prompt_token_ids: Any, limits: Limits) -> list[int]:
    """Returns a prompt as a list of ints.

    Args:
        prompt_token_ids (`Any`):
            A list or another sequence, a tensor or array of token ids.
        limits (`Limits`):
            What a request must respect.

    Raises:
        InvalidRequestError: If it is empty or not a flat list of whole numbers.
        InvalidTokenError: If a token id is outside the model's vocabulary.
        PromptTooLongError: If it can never fit.
    """
    if hasattr(prompt_token_ids, "tolist"):
        prompt_token_ids = prompt_token_ids.tolist()
    if isinstance(prompt_token_ids, (str, bytes)) or not isinstance(prompt_token_ids, Sequence):
        raise InvalidRequestError(
            f"`prompt_token_ids` must be a list of token ids, got {type(prompt_token_ids).__name__}; "
            "tokenize the text first."
        )
    tokens = list(prompt_token_ids)
    if not tokens:
        raise InvalidRequestError(
            "The prompt is empty: it has no token to continue from (the tokenizer adds no beginning-of-sequence token)."
        )
    for place, token in enumerate(tokens):
        if type(token) is not int:
            token = tokens[place] = _whole_number(token, place)
        if not 0 <= token < limits.num_embeddings:
            raise InvalidTokenError(
                f"`prompt_token_ids[{place}]` is {token}, outside the model's vocabulary of {limits.num_embeddings} "
                "tokens (0 to the vocabulary's size less one)."
            )
    _check_length(len(tokens), limits.plan)
    return tokens


def _whole_number(token: Any, place: int) -> int:
    try:
        if not isinstance(token, bool):
            return operator.index(token)
    except (TypeError, ValueError):
        pass
    raise InvalidTokenError(f"`prompt_token_ids[{place}]` must be a whole number, got {token!r}.")


def check_extra_keys(extra_keys: Any) -> None:
    """Checks keys, which are compared and hashed with those of all other requests.

    Args:
        extra_keys (`Any`):
            What a caller gave.

    Raises:
        InvalidRequestError: If they are not a tuple of strings, bytes, numbers, `None`, and such tuples.
    """
    if type(extra_keys) is not tuple:
        raise InvalidRequestError(f"`extra_keys` must be a tuple, got {type(extra_keys).__name__}.")
    parts = list(extra_keys)
    while parts:
        part = parts.pop()
        if type(part) is tuple:
            parts += part
        elif type(part) not in _KEY_TYPES:
            raise InvalidRequestError(
                f"`extra_keys` may hold strings, bytes, numbers, None and tuples of them, not {type(part).__name__}."
            )


def _check_length(length: int, plan: EnginePlan) -> None:
    if length >= plan.max_model_len:
        limit = f"`max_model_len` is {plan.max_model_len}"
        if plan.max_model_len == plan.pool_tokens:
            limit += f", all that the K/V pool of {plan.num_blocks} blocks of {plan.block_size} tokens holds"
            limit += f" (the prompt alone needs {-(-length // plan.block_size)} blocks)"
        raise PromptTooLongError(
            f"The prompt has {length} tokens and needs room for at least one more, but {limit}. "
            "Shorten it, or raise `max_model_len`/`num_blocks` in the PagedConfig."
        )
    if not plan.enable_chunked_prefill and length > plan.max_num_batched_tokens:
        raise PromptTooLongError(
            f"The prompt has {length} tokens, but a step computes at most `max_num_batched_tokens` = "
            f"{plan.max_num_batched_tokens} and chunked prefill is off. Turn it on, or raise the budget."
        )


def check_room(prompt_length: int, max_tokens: int, plan: EnginePlan) -> None:
    """Refuses a request whose answer may not fit, for callers that must not cut it short.

    Args:
        prompt_length (`int`):
            Tokens of the prompt.
        max_tokens (`int`):
            Tokens of the answer at most.
        plan (`EnginePlan`):
            The limits.

    Raises:
        PromptTooLongError: If prompt and answer exceed `max_model_len`.
    """
    if prompt_length + max_tokens > plan.max_model_len:
        raise PromptTooLongError(
            f"A prompt of {prompt_length} tokens and an answer of up to {max_tokens} need "
            f"{prompt_length + max_tokens}, but `max_model_len` is {plan.max_model_len}. Ask for fewer "
            "tokens, or raise `max_model_len` in the PagedConfig (and `num_blocks` or `cpu_kv_cache_gib`, if the pool "
            "limits it)."
        )


def check_params(params: SamplingParams, limits: Limits, tokenizer: Any) -> None:
    """Checks what sampling parameters alone cannot know: the vocabulary, the seats, the tokenizer.

    Args:
        params (`SamplingParams`):
            The request's parameters.
        limits (`Limits`):
            What a request must respect.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer that texts would be made with.

    Raises:
        InvalidRequestError: If something is out of range, or needs a tokenizer that is not there.
    """
    if params.n > limits.plan.max_num_seqs:
        raise InvalidRequestError(
            f"`n` is {params.n}, but at most {limits.plan.max_num_seqs} (`max_num_seqs`) sequences run at a time."
        )
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= limits.vocab_size:
                raise InvalidTokenError(
                    f"`{name}` names the token {token}, outside the vocabulary of {limits.vocab_size} tokens."
                )
    needing = [name for name in ("stop", "bad_words", "structured_outputs") if getattr(params, name)]
    if tokenizer is None and needing:
        raise InvalidRequestError(f"`{needing[0]}` needs a tokenizer, and the engine was given none.")
    if params.structured_outputs is not None:
        check_tokenizer(tokenizer)


def check_banned(sequences: Any, limits: Limits) -> None:
    """Checks token sequences that must not be generated.

    Args:
        sequences (`Any`):
            Sequences of token ids.
        limits (`Limits`):
            What a request must respect.

    Raises:
        InvalidRequestError: If one of them is empty, or holds something that is no token of the vocabulary.
    """
    for sequence in sequences:
        wrong = [
            token
            for token in sequence
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size
        ]
        if wrong or not sequence:
            raise InvalidRequestError(
                f"`bad_words_ids` must hold non-empty lists of token ids from 0 to {limits.vocab_size - 1}, got "
                f"{list(sequence)!r}."
            )


def check_extras(extras: RequestExtras, prompt_length: int, model: Any, limits: Limits) -> None:
    """Checks what a request asks for beside its parameters.

    Args:
        extras (`RequestExtras`):
            What it asks for.
        prompt_length (`int`):
            Tokens of its prompt.
        model (`PreTrainedModel`):
            The model.
        limits (`Limits`):
            The vocabulary.

    Raises:
        InvalidRequestError: If something is out of range; `InvalidEmbedsError` for embeddings of a wrong shape.
    """
    if not isinstance(extras, RequestExtras):
        raise InvalidRequestError(f"`extras` must be a RequestExtras, got {type(extras).__name__}.")
    if extras.features is not None and not isinstance(extras.features, SamplingFeatures):
        raise InvalidRequestError(
            f"`extras.features` must be a SamplingFeatures or None, got {type(extras.features).__name__}."
        )
    check_banned(extras.bad_words_ids, limits)
    if extras.prompt_embeds is not None:
        check_embeds(extras.prompt_embeds, prompt_length, model)
    layers = extras.hidden_states.layers if extras.hidden_states is not None else None
    count = model.config.get_text_config(decoder=True).num_hidden_layers + 1
    if layers is not None and not layers:
        raise InvalidRequestError("`hidden_states.layers` is empty; name at least one, or give None for all layers.")
    for layer in layers or ():
        if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
            raise InvalidRequestError(
                f"`hidden_states.layers` must hold whole numbers from {-count} to {count - 1} (0 is the embeddings), "
                f"got {layer!r}."
            )


def check_embeds(embeds: Any, prompt_length: int, model: Any) -> None:
    """Checks a prompt that is given as embeddings.

    Args:
        embeds (`Any`):
            The embeddings.
        prompt_length (`int`):
            How many there must be.
        model (`PreTrainedModel`):
            The model.

    Raises:
        InvalidEmbedsError: If they are not a floating-point tensor `[prompt_length, hidden_size]`.
    """
    embeddings = model.get_input_embeddings()
    hidden_size = getattr(embeddings, "embedding_dim", None) or embeddings.weight.shape[1]
    is_tensor = isinstance(embeds, torch.Tensor) and embeds.is_floating_point()
    if not is_tensor or tuple(embeds.shape) != (prompt_length, hidden_size):
        got = f"{embeds.dtype} {list(embeds.shape)}" if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        raise InvalidEmbedsError(
            f"The embeddings of a prompt must be a floating-point tensor [{prompt_length}, {hidden_size}] (its tokens "
            f"by the model's hidden size), got {got}."
        )


def embeds_key(embeds: torch.Tensor) -> tuple[str, str]:
    """Returns what tells embeddings from others in the prefix cache: equal ones share blocks, others never do.

    Args:
        embeds (`torch.Tensor`):
            `[tokens, hidden_size]`.
    """
    data = embeds.detach().to("cpu", torch.float64).contiguous().numpy().tobytes()
    return "embeds", hashlib.blake2b(data, digest_size=16).hexdigest()


def bad_words_ids(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences that write a word at the start of a text and after a space.

    Args:
        words (`Sequence[str]`):
            The words.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
    """
    sequences = []
    for word in words:
        for text in (word, " " + word.lstrip()):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if tokens and tokens not in sequences:
                sequences.append(tokens)
    return tuple(sequences)


def make_group(
    tokens: list[int],
    params: SamplingParams,
    limits: Limits,
    *,
    request_id: str | None,
    priority: int,
    extra_keys: tuple,
    extras: RequestExtras,
) -> RequestGroup:
    """Makes the requests of a checked prompt, one per answer.

    Args:
        tokens (`list[int]`):
            The prompt.
        params (`SamplingParams`):
            The parameters.
        limits (`Limits`):
            What a request must respect.
        request_id (`str`, *optional*):
            The id that the user sees; a new one by default.
        priority (`int`):
            Lower runs earlier under the priority policy.
        extra_keys (`tuple`):
            What else the K/V depend on.
        extras (`RequestExtras`):
            What the request asks for beside its parameters.
    """
    group_id = request_id if request_id is not None else uuid.uuid4().hex
    if extras.prompt_embeds is not None:
        extra_keys += (embeds_key(extras.prompt_embeds),)
    room = limits.plan.max_model_len - len(tokens)
    stop = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else limits.eos_token_ids)
    # Without a seed of its own a request draws one, so that `torch.manual_seed` makes a whole program repeatable.
    drawn = params.seed is None and not params.greedy
    seed = int(torch.randint(2**63 - 1, ()).item()) if drawn else params.seed or 0
    return RequestGroup(
        group_id,
        [
            Request(
                group_id if params.n == 1 else f"{branch}_{group_id}",
                tokens,
                params,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                stop_token_ids=stop,
                priority=priority,
                extra_keys=extra_keys,
                seed=seed & _SEED_MASK,
                branch=branch,
                extras=extras,
            )
            for branch in range(params.n)
        ],
    )
