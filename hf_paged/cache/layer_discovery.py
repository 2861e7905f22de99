"""Finds out what each layer of a model brings to attention, by running it once on two tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .. import compat
from ..errors import UnsupportedModelError
from ..modeling.attention_patches import latent
from ..modeling.layer_groups import LayerGroup, LayerSpec, configured_window
from .step_cache import AttentionRequest, StepLength, attach_layer

_NUM_TOKENS = 2


class _Recorder(CacheLayerMixin):
    """A layer that writes down what attention is given, and answers it with zeros."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, layer_idx: int):
        self.layer_idx = layer_idx
        self.is_initialized = True
        self.updated = False
        self.spec: LayerSpec | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        self.updated = True
        attach_layer(key_states, self)
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, request: AttentionRequest
    ) -> torch.Tensor:
        wants = {"window": request.window, "softcap": request.softcap, "sinks": request.sinks}
        self.spec = LayerSpec(
            layer_idx=self.layer_idx,
            num_query_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            dtype=key.dtype,
            device=key.device,
            window=request.window,
            features=frozenset(name for name, wanted in wants.items() if wanted is not None),
        )
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return StepLength(query_length), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


@torch.inference_mode()
def find_layers(model: Any) -> tuple[LayerGroup, ...]:
    """Runs the model on two tokens and writes down what each of its layers brings to attention.

    Args:
        model (`PreTrainedModel`):
            The model, with our attention implementation set and its weights on a device.

    Returns:
        `tuple[LayerGroup, ...]`: One group: all layers share one block table, whatever their shapes and windows.

    Raises:
        UnsupportedModelError: If a layer does something other than attention over keys and values.
    """
    name = type(model).__name__
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        raise UnsupportedModelError("The model's weights are on the meta device or offloaded; load them first.")
    latent.patch(model)
    config = model.config.get_text_config(decoder=True)
    recorders = [_Recorder(i) for i in range(config.num_hidden_layers)]
    tokens = torch.zeros((1, _NUM_TOKENS), dtype=torch.long, device=device)
    try:
        model(
            input_ids=tokens,
            position_ids=torch.arange(_NUM_TOKENS, device=device)[None],
            use_cache=True,
            **{compat.cache_argument(model): Cache(layers=list(recorders))},
        )
    except torch.OutOfMemoryError:  # of the device, which says nothing about the model
        raise
    except NotImplementedError as error:
        raise UnsupportedModelError(f"{name} cannot run on the paged engine: {error}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} does not run with a paged cache: {type(error).__name__}: {error}"
        ) from error
    layers = [_checked(recorder, name, config) for recorder in recorders]
    if len({layer.device for layer in layers}) > 1:
        raise UnsupportedModelError(
            f"The layers of {name} are spread over several devices; the paged engine wants one. "
            "Load without `device_map`, or with one device."
        )
    if len({layer.dtype for layer in layers}) > 1:
        raise UnsupportedModelError(f"The layers of {name} use several dtypes for K/V; the paged engine wants one.")
    return (LayerGroup(tuple(layers)),)


def _checked(recorder: _Recorder, name: str, config: Any) -> LayerSpec:
    layer_idx, spec = recorder.layer_idx, recorder.spec
    if spec is None and recorder.updated:
        raise UnsupportedModelError(
            f"Layer {layer_idx} of {name} caches its keys but computes attention in a way that paged attention does "
            "not see."
        )
    if spec is None:
        raise UnsupportedModelError(f"Layer {layer_idx} of {name} caches no keys; it is not an attention layer.")
    window = configured_window(config, layer_idx)
    if spec.window != window:
        raise UnsupportedModelError(
            f"Layer {layer_idx} of {name} asks attention for a sliding window of {spec.window}, but its configuration "
            f"says {window}; its mask is made in a way that paged attention does not see."
        )
    return spec
