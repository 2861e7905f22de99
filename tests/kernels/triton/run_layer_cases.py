"""Runs whole decoder layers on Triton's kernels in the interpreter; a program, see `interpreted.py`.

Prints for each case its error against the same layers in plain torch and what is allowed; for one layer and two, what
was launched and how many bytes were moved.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import torch

from hf_paged.kernels import AttentionSpec, PagedAttentionMetadata, select_backend
from hf_paged.kernels.layers import LayerArguments, LayerShape
from hf_paged.kernels.triton.operators import TritonLayers
from hf_paged.modeling.patterns import reference
from tests.kernels.layer_cases import HIDDEN, INNER, PLAIN, SHAPES, in_dtype, make_tensors, with_blocks
from tests.kernels.quantized_calls import in_float64, quantized_layer
from tests.kernels.triton import interpreter  # noqa: F401 - mends the interpreter's bfloat16
from tests.kernels.triton.meter import Meter

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BLOCK_SIZE = 16
CASES: dict[str, tuple[dict[str, Any], set[str]]] = SHAPES | {
    "one weight for q, k, v and one for gate, up": ({}, {"joined", "q_bias", "k_bias", "v_bias"}),
    "q, k and v head by head": ({"num_kv_heads": 6}, {"by head", "q_bias", "k_bias", "v_bias"}),
}


def make_layer(
    shape: LayerShape, extra: set[str], dtype: torch.dtype, hidden: int = HIDDEN, inner: int = INNER, blocks: int = 10
) -> LayerArguments:
    tensors = make_tensors(shape, extra, dtype, hidden, inner)
    if "joined" in extra:
        join(tensors, ("q", "k", "v"))
        join(tensors, ("gate", "up"))
    if "by head" in extra:
        by_head(tensors, shape.num_query_heads)
    return with_blocks(shape, tensors, dtype, blocks, BLOCK_SIZE)


def join(tensors: dict[str, Any], names: tuple[str, ...]) -> None:
    """Makes weights, and biases, views of one."""
    for kind in ("weight", "bias"):
        parts = [tensors[f"{name}_{kind}"] for name in names]
        if parts[0] is not None:
            views = torch.cat(parts).split([len(part) for part in parts])
            tensors.update({f"{name}_{kind}": view for name, view in zip(names, views, strict=True)})


def by_head(tensors: dict[str, Any], num_heads: int) -> None:
    """Makes q, k and v the parts of each head of one weight."""
    for kind in ("weight", "bias"):
        parts = [tensors[f"{name}_{kind}"].unflatten(0, (num_heads, -1)) for name in "qkv"]
        views = torch.stack(parts, dim=1).unbind(1)
        tensors.update({f"{name}_{kind}": view for name, view in zip("qkv", views, strict=True)})


def triton_layers(shape: LayerShape, dtype: torch.dtype) -> TritonLayers:
    dims = (shape.num_query_heads, shape.num_kv_heads, shape.key_dim, shape.value_dim)
    return TritonLayers(select_backend(AttentionSpec(*dims, dtype, "cpu", BLOCK_SIZE), "triton"))


def compare(name: str, dtype: torch.dtype, codes: torch.dtype | None = None) -> dict[str, Any]:
    """Two decoding requests and a chunk of a third."""
    tables = np.array([[3, 7, 0], [1, 0, 0], [2, 9, 4]], dtype=np.int32)
    metadata = PagedAttentionMetadata.build(tables, np.array([1, 1, 6]), np.array([21, 4, 40]), BLOCK_SIZE)
    numbers, extra = CASES[name]
    shape = dataclasses.replace(PLAIN, **numbers)
    layers = [make_layer(shape, extra, dtype) for _ in range(1 if shape.is_block else 2)]
    wide = [in_dtype(layer, torch.float32) for layer in layers]
    if codes is not None:
        layers, wide = map(list, zip(*(quantized_layer(layer, codes) for layer in layers), strict=True))
    hidden, angle = torch.randn(8, HIDDEN).to(dtype), torch.rand(8, 16) * 6
    cos, sin = angle.cos(), angle.sin()
    result = triton_layers(shape, dtype)(hidden, layers, cos, sin, metadata)
    expected = reference.decoder_layers(hidden.float(), wide, cos, sin, metadata)
    change = (expected - hidden.float()).norm()
    error = float((result.float() - expected).norm() / change) if result.dtype == dtype else math.inf
    for ours, theirs in zip(layers, wide, strict=True):
        for cache in ("key_cache", "value_cache"):
            if getattr(ours, cache) is not None:
                exact = in_float64(getattr(theirs, cache))
                error = max(error, float((in_float64(getattr(ours, cache)) - exact).norm() / exact.norm()))
    # A code may round to its neighbour.
    allowed = TOLERANCE[dtype] if codes is None else 1e-2
    return {"name": f"{name}, {codes or dtype}", "error": error, "allowed": allowed}


# ------------------------------------------------------------------ launches and bytes


def measure(num_layers: int, joined: bool, context: int) -> dict[str, Any]:
    """Four requests decode on layers whose weights outweigh their activations, as in a model."""
    torch.manual_seed(0)
    shape = LayerShape(
        num_query_heads=8, num_kv_heads=2, key_dim=32, value_dim=32, rope_layout=1, rotary_dim=32, scale=0.2
    )
    dtype, hidden_size, inner, num_tokens = torch.bfloat16, 256, 704, 4
    num_blocks = -(-context // BLOCK_SIZE)
    tables = np.arange(num_tokens * num_blocks, dtype=np.int32).reshape(num_tokens, num_blocks)
    lengths = np.full(num_tokens, context)
    metadata = PagedAttentionMetadata.build(tables, np.ones(num_tokens), lengths, BLOCK_SIZE)
    extra = {"joined"} if joined else set()
    layers = [make_layer(shape, extra, dtype, hidden_size, inner, tables.size) for _ in range(num_layers)]
    angle = torch.rand(num_tokens, 32)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    run = triton_layers(shape, dtype)
    hidden = torch.randn(num_tokens, hidden_size).to(dtype)
    with Meter() as meter:
        run(hidden, layers, cos, sin, metadata)
    weights = sum(tensor.nbytes for layer in layers for tensor in layer.tensors if tensor is not None)
    kv_bytes = num_layers * num_tokens * (context + 1) * 2 * shape.num_kv_heads * shape.key_dim * 2
    ideal = weights + kv_bytes + 2 * num_tokens * hidden_size * 2
    return {
        "name": f"{num_layers} layers{' joined' * joined}, context {context}",
        "launches": dict(meter.launches),
        "total": meter.launches.total(),
        "bytes": meter.num_bytes,
        "ideal": ideal,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        for case in CASES:
            torch.manual_seed(1)
            print(json.dumps(compare(case, torch.float32)), flush=True)
        for case, narrow in (
            ("llama", torch.bfloat16),
            ("norms before and after", torch.float16),
            ("window and sinks", torch.bfloat16),
        ):
            torch.manual_seed(1)
            print(json.dumps(compare(case, narrow)), flush=True)
        for code_dtype in (torch.int8, torch.float8_e4m3fn):
            print(json.dumps(compare("llama", torch.float32, code_dtype)), flush=True)
        for count, is_joined, length in (
            (1, True, 90),
            (2, True, 90),
            (2, True, 300),
            (1, True, 300),
            (2, False, 90),
            (1, False, 90),
        ):
            print(json.dumps(measure(count, is_joined, length)), flush=True)
