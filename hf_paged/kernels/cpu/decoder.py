"""Decoder layers in one operator."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..layers import TENSORS, LayerArguments
from ..metadata import PagedAttentionMetadata
from ..quantized_blocks import split
from . import library

_IN_FLOAT32 = (TENSORS.index("sinks"), TENSORS.index("alibi_slopes"))


def decoder_layers(
    hidden: torch.Tensor,
    layers: Sequence[LayerArguments],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    metadata: PagedAttentionMetadata | None,
) -> torch.Tensor:
    """Runs decoder layers, one after the other, in one operator; stores their K/V.

    Args:
        hidden (`torch.Tensor`):
            `[tokens, hidden_size]`, float32, bfloat16 or float16.
        layers (`Sequence[LayerArguments]`):
            The layers, or one block alone.
        cos (`torch.Tensor`, *optional*):
            `[tokens, n]`, shared by all layers that rotate.
        sin (`torch.Tensor`, *optional*):
            The same.
        metadata (`PagedAttentionMetadata`, *optional*):
            Lengths and block tables; none if no layer has attention.

    Returns:
        `torch.Tensor`: `[tokens, hidden_size]` in the dtype of `hidden`; between layers all is float32.
    """
    tensors: list[torch.Tensor | None] = []
    ints: list[int] = []
    floats: list[float] = []
    caches: tuple[list[torch.Tensor], ...] = ([], [], [], [])  # keys, their scales, values, their scales
    for layer in layers:
        tensors += layer.tensors
        for place in _IN_FLOAT32:
            tensor = layer.tensors[place]
            tensors[place - len(TENSORS)] = None if tensor is None else tensor.float()
        ints += layer.shape.ints  # type: ignore[attr-defined]
        floats += layer.shape.floats  # type: ignore[attr-defined]
        if layer.key_cache is not None and layer.value_cache is not None:
            for tensor, found in zip((*split(layer.key_cache), *split(layer.value_cache)), caches, strict=True):
                if tensor is not None:
                    found.append(tensor)
    empty = torch.empty(0)
    given = (empty,) * 4
    if metadata is not None:
        given = (metadata.block_tables, metadata.slot_mapping, metadata.cu_seqlens_q, metadata.seq_lens)
    dtype = hidden.dtype
    if not layers[0].shape.is_block:
        hidden = hidden.to(torch.float32)
    output = torch.ops.hf_paged.decoder_layers(hidden, tensors, ints, floats, cos, sin, *caches, *given)
    return output.to(dtype)


@functools.cache
def load() -> bool:
    """Makes the operator of this file available, and returns whether it is."""
    if not library.load():
        return False

    def fake(
        hidden: torch.Tensor, tensors: Sequence[torch.Tensor | None], ints: Sequence[int], *_: object
    ) -> torch.Tensor:
        last = dict(zip(TENSORS, tensors[-len(TENSORS) :], strict=True))
        weight = last["down_weight"] if last["down_weight"] is not None else last["o_weight"]
        assert weight is not None, "a layer has a last linear"
        return hidden.new_empty(hidden.shape[0], weight.shape[0])

    torch.library.register_fake("hf_paged::decoder_layers", fake)
    return True
