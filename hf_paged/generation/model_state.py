"""What a model's own state says to the engine: its defaults, its weights, its adapters, its mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .. import compat

_DROPOUT_FIELDS = ("attention_dropout", "attn_pdrop", "attn_dropout", "dropout")
_ADAPTER_STATE = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


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


def fingerprint(model: torch.nn.Module) -> int:
    """Returns a number that changes when weights are written in place or replaced, or adapters are switched.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    parts: list[int] = []
    modules: list[torch.nn.Module | None] = [model]
    while modules:  # every request asks, and `model.parameters()` takes several times as long
        module = modules.pop()
        if module is not None:
            modules += module._modules.values()
            for parameter in module._parameters.values():
                if parameter is not None:
                    parts.append(parameter.data_ptr())
                    parts.append(0 if parameter.is_inference() else parameter._version)
    adapters = [getattr(module, name, None) for module in tuner_layers(model) for name in _ADAPTER_STATE]
    return hash((tuple(parts), repr(adapters)))


def tuner_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Returns the layers of PEFT adapters, if the model has any.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    if getattr(model, "peft_config", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
        yield from (module for module in model.modules() if hasattr(module, "active_adapters"))


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


def replaced_by_adapter(model: Any) -> str | None:
    """Returns what PEFT does during a call of `generate` that the engine would not see, or `None`.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    prepare = model.prepare_inputs_for_generation
    if getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        return "the model's inputs are prepared by an adapter (soft prompts)"
    if any(module._forward_pre_hooks for module in tuner_layers(model)):
        return "the adapter layers have hooks (an adapter for each row)"
    return None
