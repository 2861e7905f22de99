"""What a model's layers put into the cache, found by looking at the model rather than at its name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..errors import UnsupportedModelError
from ..kernels.quantized_blocks import SCALE_DTYPE, cache_dtype

_PAGED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
# Names of configuration fields whose presence means that attention is more than keys, values and a window.
_FOREIGN_FIELDS = {
    "index_topk": "a sparse indexer that keeps its own cache",
    "num_kv_shared_layers": "K/V shared between layers",
    "kv_sharing_modes": "K/V shared between layers",
    "attention_chunk_size": "chunked attention",
}


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer stores per token.

    Args:
        layer_idx (`int`):
            The layer's index in the model.
        num_query_heads (`int`):
            Query heads on this device.
        num_kv_heads (`int`):
            K/V heads on this device.
        key_dim (`int`):
            Dk.
        value_dim (`int`):
            Dv.
        dtype (`torch.dtype`):
            Dtype of the keys and values, as attention is given them.
        device (`torch.device`):
            Where the layer runs.
        window (`int`, *optional*):
            Its sliding window.
        features (`frozenset[str]`):
            What else its attention needs of a backend (`"window"`, `"softcap"`, `"sinks"`).
        cache_dtype (`torch.dtype`, *optional*):
            Dtype of their codes, if they are stored quantized.
    """

    layer_idx: int
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None
    features: frozenset[str] = frozenset()
    cache_dtype: torch.dtype | None = None

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes of one token's keys and values, with their scales."""
        head = (self.key_dim + self.value_dim) * (self.cache_dtype or self.dtype).itemsize
        return self.num_kv_heads * (head if self.cache_dtype is None else head + 2 * SCALE_DTYPE.itemsize)


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table: block b of the table holds the same tokens in each of them.

    Args:
        layers (`tuple[LayerSpec, ...]`):
            The layers, in model order.
    """

    layers: tuple[LayerSpec, ...]

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes of one token's keys and values over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def device(self) -> torch.device:
        """Returns the device that the layers are on."""
        return self.layers[0].device


def stored_as(groups: tuple[LayerGroup, ...], kv_cache_dtype: str) -> tuple[LayerGroup, ...]:
    """Returns groups whose keys and values are stored as a setting asks for.

    Args:
        groups (`tuple[LayerGroup, ...]`):
            The groups.
        kv_cache_dtype (`str`):
            `"auto"`, or the name of a dtype of codes.
    """
    codes = cache_dtype(kv_cache_dtype)
    return tuple(
        LayerGroup(tuple(dataclasses.replace(layer, cache_dtype=codes) for layer in group.layers)) for group in groups
    )


def inspect_configuration(model: Any) -> None:
    """Refuses, from configuration and class alone, models that the paged engine does not know how to run.

    Args:
        model (`PreTrainedModel`):
            The model.

    Raises:
        UnsupportedModelError: Names the layer or the field, and why.
    """
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; the paged engine runs decoder-only models.")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} keeps a recurrent state; the paged engine runs attention layers only.")
    text_config = config.get_text_config(decoder=True)
    for i, layer_type in enumerate(getattr(text_config, "layer_types", None) or ()):
        if layer_type not in _PAGED_LAYER_TYPES:
            raise UnsupportedModelError(f"Layer {i} of {name} is of type {layer_type!r}, which is not paged attention.")
    for field, why in _FOREIGN_FIELDS.items():
        if getattr(text_config, field, None):
            raise UnsupportedModelError(f"{name} has {why} (`config.{field}`), which the paged engine does not run.")
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"The attention layers of {name} do not go through Transformers' AttentionInterface, "
            "so paged attention cannot take their place."
        )


def configured_window(config: Any, layer_idx: int) -> int | None:
    """Returns a layer's sliding window as the configuration has it; the attention call must ask for the same.

    Args:
        config (`PreTrainedConfig`):
            The text configuration.
        layer_idx (`int`):
            The layer.
    """
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer_idx] != "sliding_attention":
        return None
    return window


def num_embeddings(model: Any) -> int:
    """Returns how many token ids a prompt may hold; more than the vocabulary where the embedding is padded.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    embeddings = model.get_input_embeddings()
    return getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0]  # packed rows have other shapes


def context_limit(config: Any) -> tuple[int | None, str | None]:
    """Returns how many tokens a sequence may have, and why if it is less than the configuration's own number.

    Dynamic and longrope embeddings change every earlier key once a sequence outgrows the length that the model was
    trained for, so that cached keys would no longer be what the model expects: the limit is that length.

    Args:
        config (`PreTrainedConfig`):
            The text configuration.
    """
    limit = getattr(config, "max_position_embeddings", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for rope in nested:
        kind = rope.get("rope_type")
        if kind in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            original = original or (limit if kind == "dynamic" else None)
            if original and (limit is None or original < limit or kind == "dynamic"):
                return int(min(original, limit or math.inf)), f"{kind} rotary embeddings are constant up to there"
    return limit, None
