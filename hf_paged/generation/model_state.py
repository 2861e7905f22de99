"""What a model's own state says to the engine: its defaults, its end tokens, its mode."""

from __future__ import annotations

from typing import Any

import torch

from .. import compat

_DROPOUT_FIELDS = ("attention_dropout", "attn_pdrop", "attn_dropout", "dropout")


def sampling_defaults(model: Any) -> dict[str, Any]:
    """Returns the sampling parameters that a model's generation configuration sets.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    config = model.generation_config
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(config, name, None) for name in names}
    values["max_tokens"] = getattr(config, "max_new_tokens", None)
    return values


def eos_token_ids(model: Any) -> frozenset[int]:
    """Returns the tokens that end a model's texts.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    value = model.generation_config.eos_token_id
    if value is None:
        return frozenset()
    return frozenset({int(value)} if isinstance(value, int) else map(int, value))


def with_end_of(tokenizer: Any, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Returns end tokens and the tokenizer's own: not every checkpoint names it twice. As in vLLM.

    Args:
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The request's tokenizer.
        eos_token_ids (`frozenset[int]`):
            The model's.
    """
    eos = getattr(tokenizer, "eos_token_id", None)
    return eos_token_ids | {eos} if isinstance(eos, int) else eos_token_ids


def training_obstacle(model: Any) -> str | None:
    """Returns what a model in training mode does that the engine does not, or `None`.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    if not model.training:
        return None
    if compat.checkpointing_drops_cache(model):
        return "it checkpoints activations, for which this version of Transformers drops the cache"
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.training and module.p > 0:
            return f"it drops out (`{name}`)"
    config = model.config.get_text_config(decoder=True)
    field = next((name for name in _DROPOUT_FIELDS if getattr(config, name, None)), None)
    return f"it drops out (`config.{field}`)" if field else None
