"""Everything that differs between the versions of Transformers we support (5.17 to 5.x), and nothing else."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "accepts",
    "cache_argument",
    "cache_layer_tensors",
    "cache_output_field",
    "causal_model_class",
    "checkpointing_drops_cache",
    "eager_attention",
    "faithful_attention",
    "mask_function",
    "model_output_cache_field",
    "output_cache",
    "stock_attention",
]


@functools.lru_cache(maxsize=256)
def _cache_argument_of_class(cls: type) -> str:
    forward = cls.forward  # type: ignore[attr-defined]
    parameters = inspect.signature(forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def cache_argument(model: torch.nn.Module) -> str:
    """Returns the name of the forward argument that takes the K/V cache.

    Transformers 5.24 renamed `past_key_values` to `cache`; remote code keeps the old name.

    Args:
        model (`torch.nn.Module`):
            A causal language model.
    """
    cls: Any = type(model)  # Any: the type stubs of torch say that classes of modules are not hashable
    return _cache_argument_of_class(cls)


def accepts(model: torch.nn.Module, argument: str) -> bool:
    """Returns whether a model's forward has an argument of that name.

    Args:
        model (`torch.nn.Module`):
            A causal language model.
        argument (`str`):
            The argument's name.
    """
    return argument in inspect.signature(type(model).forward).parameters


def output_cache(output: Any) -> Any:
    """Returns the cache of a model output under either of its names.

    Args:
        output (`ModelOutput`):
            What a model's forward returned.
    """
    for name in ("cache", "past_key_values"):
        if name in output:
            return output[name]
    return None


def cache_output_field() -> str:
    """Returns the name under which `generate`'s output carries the cache."""
    names = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
    return "cache" if "cache" in names else "past_key_values"


def model_output_cache_field() -> str:
    """Returns the name under which a model's output carries the cache."""
    names = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
    return "cache" if "cache" in names else "past_key_values"


def causal_model_class(config: Any) -> type | None:
    """Returns the class that `AutoModelForCausalLM` makes of a configuration, or `None` if it does not know it.

    Args:
        config (`PreTrainedConfig`):
            A configuration.
    """
    mapping: Any = AutoModelForCausalLM._model_mapping
    return mapping.get(type(config), None)


def cache_layer_tensors(cache: Any, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the keys and values of one layer of a stock cache, or `None` if that layer has none.

    Args:
        cache (`transformers.Cache`):
            A cache that a forward has filled.
        layer_idx (`int`):
            The layer's index.
    """
    layer = cache.layers[layer_idx]
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        return None
    return keys, values


def eager_attention(module: torch.nn.Module) -> Callable:
    """Returns the eager attention function of the file that defines a module.

    Transformers hands it to `get_interface` as the default, where an attention function cannot see it.

    Args:
        module (`torch.nn.Module`):
            The attention module that is being run.

    Raises:
        KeyError: If neither the module's file nor a base class's defines one.
    """
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise KeyError(f"{type(module).__module__} has no `eager_attention_forward`")


def stock_attention(name: str, module: torch.nn.Module) -> Callable:
    """Returns the attention function that Transformers would run under an implementation's name.

    Args:
        name (`str`):
            `"sdpa"`, `"eager"`, ...
        module (`torch.nn.Module`):
            The attention module that is being run.
    """
    if name == "eager":
        return eager_attention(module)
    return ALL_ATTENTION_FUNCTIONS[name]


def checkpointing_drops_cache(model: torch.nn.Module) -> bool:
    """Returns whether layers in training mode, with activation checkpointing, ignore a cache that they are given.

    They all did until checkpointing moved from `__call__` into `forward`; since then only when gradients are wanted.

    Args:
        model (`torch.nn.Module`):
            The model.
    """
    if not model.training or "__call__" not in vars(GradientCheckpointingLayer):
        return False
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def faithful_attention(model: Any, name: str) -> str:
    """Returns the stock attention that computes what the model's own code asks for.

    Before Transformers 5.24 SDPA accepts a soft cap (Gemma 2) and silently leaves it out.

    Args:
        model (`PreTrainedModel`):
            The model.
        name (`str`):
            The implementation that it has.
    """
    config = model.config.get_text_config(decoder=True)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if capped and name == "sdpa" else name


def mask_function(name: str) -> Callable:
    """Returns Transformers' mask function of an implementation.

    Args:
        name (`str`):
            `"sdpa"`, `"eager"`, ...
    """
    return ALL_MASK_ATTENTION_FUNCTIONS[name]
