"""Which calls of `generate` the engine runs, and which go through Transformers' own loop, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig

# Fields of GenerationConfig that the engine implements.
ENGINE_FIELDS = frozenset(
    {
        "bad_words_ids",
        "do_sample",
        "eos_token_id",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "min_p",
        "num_return_sequences",
        "pad_token_id",
        "repetition_penalty",
        "return_dict_in_generate",
        "temperature",
        "top_k",
        "top_p",
        "use_cache",
    }
)
# Fields that change nothing about greedy search and sampling of a decoder-only model on one beam.
NEUTRAL_FIELDS = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "bos_token_id",
        "compile_config",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "early_stopping",
        "length_penalty",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "prefill_chunk_size",
        "target_lookbehind",
        "transformers_version",
    }
)
# Model inputs that the engine understands beside the token ids.
_ENGINE_INPUTS = frozenset({"input_ids", "attention_mask", "use_cache"})


def foreign_field(config: GenerationConfig) -> str | None:
    """Returns a field that asks for something the engine does not run, or `None`.

    Args:
        config (`GenerationConfig`):
            With all defaults filled in.
    """
    defaults = GenerationConfig._get_default_generation_params()
    for name, value in config.to_dict().items():
        if name.startswith("_") or name in ENGINE_FIELDS or name in NEUTRAL_FIELDS:
            continue
        if value is not None and value != defaults.get(name) and value is not False:
            return name
    if not config.use_cache:
        return "use_cache"
    return None


def foreign_input(model_kwargs: Mapping[str, Any]) -> str | None:
    """Returns a model input that the engine does not take, or `None`.

    Args:
        model_kwargs (`Mapping[str, Any]`):
            What a call of `generate` passes on to the model.
    """
    return next((name for name, v in model_kwargs.items() if name not in _ENGINE_INPUTS and v is not None), None)


def rows_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[list[list[int]], list[int]] | None:
    """Returns the tokens of each row without its padding, and where they start; `None` for a mask with holes.

    Args:
        input_ids (`torch.Tensor`):
            `[batch, length]`.
        attention_mask (`torch.Tensor`, *optional*):
            `[batch, length]`, zero for padding on either side.
    """
    if attention_mask is None:
        return input_ids.tolist(), [0] * len(input_ids)
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        return None  # Transformers gives such numbers a meaning of its own
    rows, starts = [], []
    for tokens, mask in zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True):
        if True not in mask:
            return None
        start, end = mask.index(True), len(mask) - mask[::-1].index(True)
        if not all(mask[start:end]):
            return None
        rows.append(tokens[start:end])
        starts.append(start)
    return rows, starts
