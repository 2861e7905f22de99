"""Decoder layers of every kind, for the tests of each implementation of the operator for layers."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.kernels.layers import TENSORS, LayerArguments, LayerShape

HIDDEN, INNER = 40, 56
PLAIN = LayerShape(
    num_query_heads=6, num_kv_heads=2, key_dim=16, value_dim=16, rope_layout=1, rotary_dim=16, scale=0.25
)
SHAPES: dict[str, tuple[dict[str, Any], set[str]]] = {
    # name -> numbers that differ from PLAIN, tensors beside the linears' weights and the two norms'
    "llama": ({}, set()),
    "biases everywhere": ({}, {"q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias"}),
    "layer norms, ungated": ({"norm_kind": 2, "gated": 0, "activation": 3}, {"norm1_bias", "norm2_bias", "up_bias"}),
    "parallel, one norm": ({"residual_flow": 1, "norm_kind": 2}, {"norm1_bias", "no norm2"}),
    "parallel, two norms": ({"residual_flow": 2, "norm_kind": 2, "gated": 0, "activation": 2}, {"up_bias"}),
    "norms before and after": (
        {"norm_offset": 1.0, "softcap": 5.0, "activation": 3},
        {"post_attention_norm_weight", "post_mlp_norm_weight"},
    ),
    "norms after only": (
        {"qk_norm_kind": 2},
        {
            "no norm1",
            "no norm2",
            "post_attention_norm_weight",
            "post_mlp_norm_weight",
            "q_norm_weight",
            "k_norm_weight",
        },
    ),
    "normed heads": ({"qk_norm_kind": 1, "qk_norm_offset": 1.0}, {"q_norm_weight", "k_norm_weight"}),
    "norms without weights": ({"bare_norms": 1, "bare_qk_norms": 1, "qk_norm_kind": 1}, {"no norm1", "no norm2"}),
    "interleaved partial rope": ({"rope_layout": 2, "rotary_dim": 8, "rotary_begin": 4, "cos_step": 2}, set()),
    "no rope, slopes": ({"rope_layout": 0}, {"alibi_slopes"}),
    "window and sinks": ({"window": 5}, {"sinks"}),
    "multiplied residuals": ({"residual_multiplier": 0.3, "sin_sign": -1.0}, set()),
    "attention alone": ({"residual_flow": 3, "has_mlp": 0}, {"o_bias"}),
    "MLP alone": ({"residual_flow": 3, "has_attention": 0}, {"down_bias"}),
}


def sizes_of(shape: LayerShape, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Rows and columns of the weights."""
    query, key, value = (
        shape.num_query_heads * shape.key_dim,
        shape.num_kv_heads * shape.key_dim,
        shape.num_kv_heads * shape.value_dim,
    )
    attention = {"q": (query, hidden), "k": (key, hidden), "v": (value, hidden), "o": (hidden, query)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    sizes = (attention if shape.has_attention else {}) | (mlp if shape.has_mlp else {})
    return {name: size for name, size in sizes.items() if name != "gate" or shape.gated}


def make_tensors(
    shape: LayerShape, extra: set[str], dtype: torch.dtype, hidden: int = HIDDEN, inner: int = INNER
) -> dict[str, torch.Tensor | None]:
    """Weights of the linears and the two norms, and what `extra` names or takes away."""
    tensors: dict[str, torch.Tensor | None] = dict.fromkeys(TENSORS)
    for name, (rows, columns) in sizes_of(shape, hidden, inner).items():
        tensors[f"{name}_weight"] = (torch.randn(rows, columns) / columns**0.5).to(dtype)
        if f"{name}_bias" in extra:
            tensors[f"{name}_bias"] = torch.randn(rows).to(dtype) / 4
    wide = shape.qk_norm_kind == 2
    heads = {"q_norm_weight": shape.num_query_heads if wide else 1, "k_norm_weight": shape.num_kv_heads if wide else 1}
    names = {f"{name}_weight" for name in ("norm1", "norm2") if f"no {name}" not in extra}
    # Sorted, so that a seed gives the same numbers in every process.
    for name in sorted(
        (names if shape.residual_flow != 3 else set()) | {n for n in extra & set(TENSORS) if "norm" in n}
    ):
        tensors[name] = torch.randn(heads[name] * shape.key_dim if name in heads else hidden).to(dtype)
    for name in sorted({"sinks", "alibi_slopes"} & extra):
        tensors[name] = torch.rand(shape.num_query_heads).to(dtype)
    return tensors


def with_blocks(
    shape: LayerShape, tensors: dict[str, torch.Tensor | None], dtype: torch.dtype, num_blocks: int, block_size: int
) -> LayerArguments:
    """A layer with blocks full of numbers, if it attends."""
    layer = LayerArguments(shape, list(tensors.values()))
    if shape.has_attention:
        layer.key_cache = torch.randn(num_blocks, shape.num_kv_heads, block_size, shape.key_dim).to(dtype)
        layer.value_cache = torch.randn(num_blocks, shape.num_kv_heads, block_size, shape.value_dim).to(dtype)
    return layer


def in_dtype(layer: LayerArguments, dtype: torch.dtype) -> LayerArguments:
    tensors = [None if tensor is None else tensor.to(dtype) for tensor in layer.tensors]
    caches = [None if cache is None else cache.to(dtype) for cache in (layer.key_cache, layer.value_cache)]
    return LayerArguments(layer.shape, tensors, *caches)
