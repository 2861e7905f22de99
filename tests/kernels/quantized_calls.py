"""Calls and layers over quantized blocks, and the same over what their codes stand for."""

from __future__ import annotations

import dataclasses

import torch

from hf_paged.kernels.layers import LayerArguments
from hf_paged.kernels.quantized_blocks import Blocks, QuantizedBlocks, numbers, quantized, split
from tests.kernels.attention_calls import Call
from tests.kernels.layer_cases import in_dtype


def quantized_blocks(cache: torch.Tensor, dtype: torch.dtype) -> QuantizedBlocks:
    """Blocks of numbers as codes; slots of NaN have a scale of NaN and codes of anything."""
    codes, scales = quantized(cache, dtype)
    unused = scales.isnan()
    raw = codes.view(torch.int8)
    raw[unused] = torch.randint(-128, 127, raw[unused].shape, dtype=torch.int8)
    return QuantizedBlocks(codes, scales)


def in_float64(blocks: Blocks) -> torch.Tensor:
    return numbers(*split(blocks), torch.float64)


def quantized_call(call: Call, dtype: torch.dtype) -> tuple[Call, Call]:
    """A call over codes, and over float64 numbers, in which unused slots are NaN still."""
    blocks = [quantized_blocks(cache, dtype) for cache in (call.key_cache, call.value_cache)]
    over_codes = dataclasses.replace(
        call,
        key_cache=blocks[0],
        value_cache=blocks[1],
        spec=dataclasses.replace(call.spec, cache_dtype=dtype),
    )
    keys, values = map(in_float64, blocks)
    return over_codes, dataclasses.replace(call, key_cache=keys, value_cache=values)


def quantized_layer(layer: LayerArguments, dtype: torch.dtype) -> tuple[LayerArguments, LayerArguments]:
    """A layer over codes, and the same in float32 over a copy of them."""
    layer, wide = dataclasses.replace(layer), in_dtype(layer, torch.float32)
    for side in ("key_cache", "value_cache"):
        if getattr(layer, side) is not None:
            blocks = quantized_blocks(getattr(layer, side), dtype)
            setattr(layer, side, blocks)
            setattr(wide, side, QuantizedBlocks(blocks.codes.clone(), blocks.scales.clone()))
    return layer, wide
