"""How a paged model runs every field of `GenerationConfig` and every argument of `generate`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig


class Way(enum.StrEnum):
    """What runs a field or an argument."""

    ENGINE = "engine"
    STOCK_LOOP = "stock_loop"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Coverage:
    """How one field or argument is run.

    Args:
        way (`Way`):
            `ENGINE`: on the paged engine. `STOCK_LOOP`: by Transformers' own loop on a `PagedCache`, or on the cache
            that the caller chose. `REFUSED`: not on a paged model.
        how (`str`):
            Which code runs it, or why it is refused.
        plain (`bool`, defaults to `False`):
            Whether independent requests of the engine can run a call that has it. Where they cannot and it is
            `ENGINE`, Transformers' own loop runs, whose every forward is a step of the engine.
        needs (`tuple[str, ...]`, defaults to `()`):
            Transformers reads the field only if one of these is set too.
        since (`str`, defaults to `""`):
            The first version of Transformers that has it, if not all that are supported.
    """

    way: Way
    how: str
    plain: bool = False
    needs: tuple[str, ...] = ()
    since: str = ""


_REQUESTS = "requests of the engine"
_SAMPLER = "requests of the engine, in its batched sampler"
_OVER_ENGINE = "Transformers' own code over the engine's rows"
_RECORDED = f"{_OVER_ENGINE}; of padded rows in Transformers' loop on a `PagedCache`"
_ASSISTED = "assisted decoding: the cache is cropped after every guess"
_ASSISTANT = "a setting of assisted decoding"
_OWN_CACHE = "the kind of cache that the caller chose, not the engine's blocks"
_HUB = (
    "moved to the Hub: Transformers raises ValueError unless `trust_remote_code=True`, with which it loads {} from "
    "there and runs that"
)
_UNREAD = "Transformers does not read it for decoder-only models"
_NOTE = "no setting: Transformers notes here which version saved the configuration"
_OWN_ENGINE = "deprecated: Transformers' `generate` does not read it; a paged model has a `PagedConfig` instead"
_ASSISTANTS = ("assistant_model", "assistant_early_exit", "is_assistant", "prompt_lookup_num_tokens", "use_mtp")


def _plain(how: str, *names: str, needs: tuple[str, ...] = ()) -> dict[str, Coverage]:
    return {name: Coverage(Way.ENGINE, how, plain=True, needs=needs) for name in names}


def _over_engine(*names: str, needs: tuple[str, ...] = ()) -> dict[str, Coverage]:
    return {name: Coverage(Way.ENGINE, _OVER_ENGINE, needs=needs) for name in names}


def _loop(how: str, *names: str, needs: tuple[str, ...] = ()) -> dict[str, Coverage]:
    return {name: Coverage(Way.STOCK_LOOP, how, needs=needs) for name in names}


FIELDS: Mapping[str, Coverage] = {
    # Lengths, ends and answers.
    **_plain(_REQUESTS, "max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id"),
    **_plain(_REQUESTS, "num_return_sequences", "return_dict_in_generate"),
    **_plain("the engine compiles nothing by itself, as asked", "disable_compile"),
    **_over_engine("max_time", "stop_strings", "token_healing", "prefill_chunk_size"),
    **_over_engine("output_scores", "output_logits"),
    "output_attentions": Coverage(Way.ENGINE, _RECORDED),
    "output_hidden_states": Coverage(Way.ENGINE, _RECORDED),
    # Sampling.
    **_plain(_SAMPLER, "do_sample", "temperature", "top_k", "top_p", "min_p"),
    **_plain(_SAMPLER, "repetition_penalty", "min_length", "min_new_tokens", "bad_words_ids"),
    **_plain(_SAMPLER, "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", needs=("do_sample",)),
    **_plain(_SAMPLER, "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
    **_plain(_SAMPLER, "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    **_plain(_SAMPLER, "exponential_decay_length_penalty", "sequence_bias", "remove_invalid_values"),
    **_plain(_SAMPLER, "renormalize_logits"),
    **_over_engine("guidance_scale", "watermarking_config"),
    # Beams.
    **_over_engine("num_beams"),
    **_over_engine("early_stopping", "length_penalty", needs=("num_beams",)),
    # Assisted decoding.
    **_loop(_ASSISTED, "use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit", "is_assistant"),
    **_loop(_ASSISTANT, "assistant_confidence_threshold", "assistant_ensemble_weight", needs=_ASSISTANTS),
    **_loop(_ASSISTANT, "assistant_lookbehind", "target_lookbehind", "speculation_type", needs=_ASSISTANTS),
    **_loop(_ASSISTANT, "num_assistant_tokens", "num_assistant_tokens_schedule", needs=_ASSISTANTS),
    **_loop(_ASSISTANT, "max_matching_ngram_size", needs=("prompt_lookup_num_tokens",)),
    # Caches.
    **_loop("false: no cache at all, every token recomputes the text", "use_cache"),
    **_loop(_OWN_CACHE, "cache_implementation"),
    **_loop(_OWN_CACHE, "cache_config", "max_cache_len", needs=("cache_implementation",)),
    **_loop("Transformers compiles forwards on its static caches, and says so where it cannot", "compile_config"),
    # What Transformers took out of `generate`, and what never was for decoder-only models.
    "constraints": Coverage(Way.REFUSED, _HUB.format("constrained beam search")),
    "force_words_ids": Coverage(Way.REFUSED, _HUB.format("constrained beam search")),
    "dola_layers": Coverage(Way.REFUSED, _HUB.format("DoLa decoding")),
    "num_beam_groups": Coverage(Way.REFUSED, _HUB.format("group beam search"), needs=("num_beams",)),
    "diversity_penalty": Coverage(Way.REFUSED, _HUB.format("group beam search"), needs=("num_beam_groups",)),
    "penalty_alpha": Coverage(Way.REFUSED, _HUB.format("contrastive search") + "; it is read with `top_k` only"),
    "low_memory": Coverage(Way.REFUSED, "removed: Transformers' beam search raises ValueError", needs=("num_beams",)),
    "decoder_start_token_id": Coverage(Way.REFUSED, _UNREAD, plain=True),
    "transformers_version": Coverage(Way.REFUSED, _NOTE, plain=True),
    "continuous_batching_config": Coverage(Way.REFUSED, _OWN_ENGINE, plain=True),
}

ARGUMENTS: Mapping[str, Coverage] = {
    **_plain(_REQUESTS, "inputs", "input_ids", "attention_mask", "generation_config"),
    **_plain("requests of the engine for one row, else Transformers' own code over its rows", "streamer"),
    **_over_engine("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "inputs_embeds"),
    **_over_engine("negative_prompt_ids", "negative_prompt_attention_mask", needs=("guidance_scale",)),
    "tokenizer": Coverage(Way.ENGINE, "read for `stop_strings`, `token_healing` and assistants", plain=True),
    **_loop(_ASSISTED, "assistant_model"),
    **_loop(_ASSISTANT, "assistant_tokenizer", needs=("assistant_model",)),
    **_loop("the callable, or the code from the Hub, is the loop", "custom_generate"),
    **_loop("consent to code from the Hub", "trust_remote_code", needs=("custom_generate",)),
    **_loop("every process runs as many forwards as the longest", "synced_gpus"),
    **_loop("a cache of the caller's own, continued where it ends", "past_key_values"),
    "cache": Coverage(Way.STOCK_LOOP, "a cache of the caller's own, continued where it ends", since="5.24"),
    **_loop("positions of the caller's own", "position_ids"),
    **_loop("any other input of the model's forward", "kwargs"),
}


def coverage() -> dict[str, Coverage]:
    """Returns how each field and argument that the installed Transformers has is run, fields first."""
    installed = Version(Version(transformers.__version__).base_version)
    entries = {**FIELDS, **ARGUMENTS}
    return {name: entry for name, entry in entries.items() if not entry.since or Version(entry.since) <= installed}


def foreign_field(config: GenerationConfig) -> str | None:
    """Returns a field that asks for something which independent requests of the engine do not run, or `None`.

    Args:
        config (`GenerationConfig`):
            With all defaults filled in.
    """
    values = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    defaults = GenerationConfig._get_default_generation_params()
    is_set = {name for name, value in values.items() if _is_set(value, defaults.get(name))}
    for name in sorted(is_set):
        entry = FIELDS.get(name)
        if entry is None:  # of a newer Transformers, or an entry of somebody's own
            return name
        if not entry.plain and (not entry.needs or is_set.intersection(entry.needs)):
            return name
    return None if config.use_cache else "use_cache"


def _is_set(value: Any, default: Any) -> bool:
    return value is not None and value is not False and value != default


def foreign_input(model_kwargs: Mapping[str, Any]) -> str | None:
    """Returns a model input that independent requests of the engine do not take, or `None`.

    Args:
        model_kwargs (`Mapping[str, Any]`):
            What a call of `generate` passes on to the model.
    """
    known = {"input_ids", "attention_mask", "use_cache"}
    return next((name for name, value in model_kwargs.items() if name not in known and value is not None), None)


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
