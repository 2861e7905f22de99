"""The operator for whole layers against the same in plain torch, in float64 where torch's part allows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hf_paged.kernels.cpu import decoder
from hf_paged.kernels.layers import TENSORS, LayerArguments
from hf_paged.kernels.metadata import PagedAttentionMetadata
from hf_paged.modeling.patterns import reference
from tests.kernels.cpu.levels import LEVELS, at_level
from tests.kernels.layer_cases import HIDDEN, INNER, PLAIN, SHAPES, in_dtype, make_tensors, with_blocks

BLOCK_SIZE, NUM_BLOCKS = 8, 12
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request.param, decoder.load)


def make_metadata() -> PagedAttentionMetadata:
    """Two decoding requests and a chunk of a third."""
    tables = np.array([[3, 7, 0], [1, 0, 0], [2, 9, 4]], dtype=np.int32)
    return PagedAttentionMetadata.build(tables, np.array([1, 1, 6]), np.array([13, 4, 20]), BLOCK_SIZE)


def make_layer(name: str, dtype: torch.dtype) -> LayerArguments:
    numbers, extra = SHAPES[name]
    shape = dataclasses.replace(PLAIN, **numbers)
    return with_blocks(shape, make_tensors(shape, extra, dtype), dtype, NUM_BLOCKS, BLOCK_SIZE)


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(8, 16) * 6
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_layers_equal_the_same_in_plain_torch(level: str, name: str, dtype: torch.dtype):
    torch.manual_seed(1)
    layers = [make_layer(name, dtype)]
    if not layers[0].shape.is_block:
        layers.append(make_layer(name, dtype))
    in_float32 = [in_dtype(layer, torch.float32) for layer in layers]
    hidden, (cos, sin) = torch.randn(8, HIDDEN, dtype=dtype), angles()
    result = decoder.decoder_layers(hidden, layers, cos, sin, make_metadata())
    expected = reference.decoder_layers(hidden.float(), in_float32, cos, sin, make_metadata())
    assert result.dtype == dtype
    error = (result.float() - hidden.float()) - (expected - hidden.float())
    assert float(error.norm()) < TOLERANCE[dtype] * float((expected - hidden.float()).norm())
    for ours, theirs in zip(layers, in_float32, strict=True):
        if ours.key_cache is not None:
            assert float((ours.key_cache.float() - theirs.key_cache).norm()) < TOLERANCE[dtype] * 40
            assert float((ours.value_cache.float() - theirs.value_cache).norm()) < TOLERANCE[dtype] * 40


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gated", (1, 0))
@pytest.mark.parametrize("inner", (37, 130))
@pytest.mark.parametrize("num_tokens", (1, 7, 16, 23, 64, 75, 263, 530))
def test_an_mlp_of_any_width_over_any_number_of_tokens_equals_plain_torch(
    level: str, num_tokens: int, inner: int, gated: int, dtype: torch.dtype
):
    torch.manual_seed(3)
    shape = dataclasses.replace(PLAIN, residual_flow=3, has_attention=0, gated=gated)
    tensors: dict[str, torch.Tensor | None] = dict.fromkeys(TENSORS)
    for name, rows, columns in (("gate", inner, HIDDEN), ("up", inner, HIDDEN), ("down", HIDDEN, inner)):
        if name != "gate" or gated:
            tensors[f"{name}_weight"] = torch.randn(rows, columns, dtype=dtype) / columns**0.5
            tensors[f"{name}_bias"] = torch.randn(rows, dtype=dtype)
    layer, hidden = LayerArguments(shape, list(tensors.values())), torch.randn(num_tokens, HIDDEN, dtype=dtype)
    result = decoder.decoder_layers(hidden, [layer], None, None, None)
    expected = reference.decoder_layers(hidden.double(), [in_dtype(layer, torch.float64)], None, None, None)
    errors, sizes = (result.double() - expected).norm(dim=1), expected.norm(dim=1)
    assert bool((errors < TOLERANCE[dtype] * sizes).all())


@pytest.mark.parametrize("name", [name for name, (numbers, _) in SHAPES.items() if numbers.get("residual_flow") != 3])
def test_a_long_prompt_equals_the_same_in_plain_torch(level: str, name: str):
    torch.manual_seed(4)
    num_blocks, num_tokens = 42, 333
    layers = [make_layer(name, torch.bfloat16) for _ in range(2)]
    for layer in layers:
        layer.key_cache = torch.zeros(num_blocks, PLAIN.num_kv_heads, BLOCK_SIZE, PLAIN.key_dim, dtype=torch.bfloat16)
        layer.value_cache = torch.zeros_like(layer.key_cache)
    in_float32 = [in_dtype(layer, torch.float32) for layer in layers]
    table = np.random.default_rng(4).permutation(num_blocks).astype(np.int32)[None]
    metadata = PagedAttentionMetadata.build(table, np.array([num_tokens]), np.array([num_tokens]), BLOCK_SIZE)
    hidden, angle = torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16), torch.rand(num_tokens, 16) * 6
    result = decoder.decoder_layers(hidden, layers, angle.cos(), angle.sin(), metadata)
    expected = reference.decoder_layers(hidden.float(), in_float32, angle.cos(), angle.sin(), metadata)
    errors, sizes = (result.float() - expected).norm(dim=1), (expected - hidden.float()).norm(dim=1)
    assert bool((errors < 2 * TOLERANCE[torch.bfloat16] * sizes).all())


def test_all_layers_at_once_equal_one_after_the_other(level: str):
    torch.manual_seed(2)
    layers = [make_layer(name, torch.float32) for name in ("llama", "window and sinks", "normed heads")]
    copies = [in_dtype(layer, torch.float32) for layer in layers]
    hidden, (cos, sin), metadata = torch.randn(8, HIDDEN), angles(), make_metadata()
    expected = hidden
    for layer in copies:
        expected = decoder.decoder_layers(expected, [layer], cos, sin, metadata)
    assert torch.equal(decoder.decoder_layers(hidden, layers, cos, sin, metadata), expected)


def test_weights_written_in_place_are_seen_at_once(level: str):
    layer, metadata = make_layer("llama", torch.bfloat16), make_metadata()
    hidden, (cos, sin) = torch.randn(8, HIDDEN, dtype=torch.bfloat16), angles()
    before = decoder.decoder_layers(hidden, [layer], cos, sin, metadata)
    layer.tensors[TENSORS.index("down_weight")].mul_(2)
    assert not torch.equal(decoder.decoder_layers(hidden, [layer], cos, sin, metadata), before)


def test_the_linears_of_a_layer_may_have_different_dtypes(level: str):
    metadata, hidden, (cos, sin) = make_metadata(), torch.randn(8, HIDDEN), angles()
    plain = make_layer("llama", torch.float32)
    mixed = in_dtype(plain, torch.float32)
    for name in ("k_weight", "up_weight", "down_weight"):
        place = TENSORS.index(name)
        mixed.tensors[place] = plain.tensors[place].bfloat16()
        plain.tensors[place] = mixed.tensors[place].float()
    results = [decoder.decoder_layers(hidden, [layer], cos, sin, metadata) for layer in (mixed, plain)]
    assert torch.allclose(*results, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused_before_anything_is_read():
    if not decoder.load():
        pytest.skip("no native library on this machine")
    hidden, (cos, sin) = torch.randn(8, HIDDEN), angles()

    def refused(message: str, change: Any = None, **given: Any) -> None:
        layer, metadata = make_layer("llama", torch.float32), make_metadata()
        if change is not None:
            change(layer, metadata)
        arguments = {"hidden": hidden, "layers": [layer], "cos": cos, "sin": sin, "metadata": metadata} | given
        with pytest.raises(RuntimeError, match=message):
            decoder.decoder_layers(**arguments)

    def replaced(name: str, tensor: torch.Tensor | None) -> Any:
        return lambda layer, _: layer.tensors.__setitem__(TENSORS.index(name), tensor)

    refused("names block", lambda _, metadata: metadata.block_tables.__setitem__((0, 0), NUM_BLOCKS))
    refused("names block", lambda _, metadata: metadata.block_tables.__setitem__((0, 0), -1))
    refused("outside", lambda _, metadata: metadata.slot_mapping.__setitem__(0, NUM_BLOCKS * BLOCK_SIZE))
    refused("longer", lambda _, metadata: metadata.seq_lens.__setitem__(0, 99))
    refused("of 7 numbers", hidden=torch.randn(7, HIDDEN), cos=cos[:7], sin=sin[:7])
    refused("missing", replaced("v_weight", None))
    refused("weights must have x's k", replaced("down_weight", torch.randn(HIDDEN, INNER + 1)))
    refused("fit the heads", replaced("k_weight", torch.randn(31, HIDDEN)))
    refused("fit its input", replaced("norm1_weight", torch.randn(HIDDEN + 1)))
    refused("need cos", cos=None)
    refused("too short", cos=cos[:, :4], sin=sin[:, :4])
    refused(
        "do not fit the heads", lambda layer, _: setattr(layer, "key_cache", torch.randn(NUM_BLOCKS, 1, BLOCK_SIZE, 16))
    )
