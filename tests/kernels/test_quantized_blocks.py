"""Codes and scales of K/V, and the backends in plain torch over them, against float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hf_paged.errors import UnsupportedAttentionError
from hf_paged.kernels import BACKENDS, Capabilities, select_backend
from hf_paged.kernels.quantized_blocks import DTYPES, LARGEST, QuantizedBlocks, numbers, picked, quantized, tensors_of
from hf_paged.kernels.reference import ReferenceBackend, attention_weights
from tests.kernels.attention_calls import MIXED, make_call
from tests.kernels.quantized_calls import quantized_call
from tests.kernels.test_backends import FEATURES, TOLERANCE, attend, features_for, oracle

CODES = sorted(set(DTYPES.values()), key=str)
# Half of the largest step between codes, as a share of the largest number, or for float8 of the number itself.
HALF_STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}
SMALLEST = {torch.int8: 1.0, torch.float8_e4m3fn: 2**-6, torch.float8_e5m2: 2**-14}


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_numbers_come_back_within_half_a_step(dtype):
    torch.manual_seed(0)
    x = torch.randn(50, 3, 64) * torch.logspace(-1, 4, 50)[:, None, None]
    codes, scales = quantized(x, dtype)
    assert (codes.shape, codes.dtype, scales.shape, scales.dtype) == (x.shape, dtype, x.shape[:-1], torch.float16)
    top = x.abs().amax(-1, keepdim=True)
    assert (codes.float().abs().amax(-1, keepdim=True) / LARGEST[dtype] > 1 - HALF_STEP[dtype]).all()
    error = (numbers(codes, scales, torch.float32) - x).abs()
    if dtype is torch.int8:
        allowed = (HALF_STEP[dtype] + 2**-11) * top  # a float16 scale that was rounded down cuts the largest number
    else:
        smallest = SMALLEST[dtype] * top / LARGEST[dtype]
        allowed = (HALF_STEP[dtype] + 2**-11) * torch.maximum(x.abs(), smallest)
    assert (error <= allowed).all()


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_a_head_of_zeros_stays_one_and_one_with_a_nan_or_an_infinity_becomes_nan(dtype):
    x = torch.randn(5, 8)
    x[0], x[1, 3], x[2, 3], x[3, 3] = 0, math.nan, math.inf, -math.inf
    result = numbers(*quantized(x, dtype), torch.float32)
    assert not result[0].any() and result[1:4].isnan().all() and result[4].isfinite().all()


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_a_slot_depends_on_its_token_alone(dtype):
    x = torch.randn(40, 2, 16) * torch.logspace(-3, 3, 40)[:, None, None]
    whole = quantized(x, dtype)
    pieces = [quantized(part, dtype) for part in x.split([1, 7, 32])]
    for together, parts in zip(whole, zip(*pieces, strict=True), strict=True):
        assert torch.equal(together.view(torch.uint8), torch.cat([part.view(torch.uint8) for part in parts]))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", ("reference", "torch_sdpa"))
def test_features_in_every_dtype(backend, dtype, codes, features):
    call, wide = quantized_call(make_call(MIXED, dtype=dtype), codes)
    settings = features_for(features, 9)
    # What codes stand for is rounded to the dtype of the queries, which K/V that were never codes have already.
    allowed = TOLERANCE[dtype] * (2 if backend == "torch_sdpa" else 1)
    actual, expected = attend(backend, call, **settings), oracle(wide, **settings)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("backend", ("reference", "torch_sdpa"))
def test_store_writes_each_token_into_its_slot_and_nothing_else(backend, codes):
    call, _ = quantized_call(make_call([(1, 20), (39, 50)], dtype=torch.bfloat16), codes)
    key = torch.randn(3, 40, 64).bfloat16().transpose(0, 1)
    value = torch.randn(40, 3, 64).bfloat16()
    caches = [
        QuantizedBlocks(torch.zeros_like(cache.codes), torch.zeros_like(cache.scales))
        for cache in (call.key_cache, call.value_cache)
    ]
    select_backend(call.spec, backend).store(key, value, *caches, call.metadata)
    slots = call.metadata.slot_mapping
    for cache, new in zip(caches, (key, value), strict=True):
        held = numbers(cache.codes, cache.scales, torch.float32)[slots // 16, :, slots % 16]
        assert torch.equal(held, numbers(*quantized(new, codes), torch.float32))
        assert int((cache.scales != 0).any(1).sum()) == 40


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_attention_weights_are_those_over_the_numbers(codes):
    call, wide = quantized_call(make_call([(4, 30)], 6, 2, 16), codes)
    table = call.metadata.block_tables[0]
    actual = attention_weights(call.query, call.key_cache, table, 26, scale=0.3)
    expected = attention_weights(call.query.double(), wide.key_cache, table, 26, scale=0.3)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_blocks_are_picked_as_numbers(codes):
    call, wide = quantized_call(make_call(MIXED, 2, 2, 8), codes)
    ids = call.metadata.block_tables[-1, :2].long()
    assert torch.equal(picked(call.key_cache, ids, torch.float64), wide.key_cache[ids])
    assert len(tensors_of(call.key_cache, wide.key_cache)) == 3


def test_a_backend_without_quantized_kv_is_passed_over_and_refused_by_name(monkeypatch):
    plain = dataclasses.replace(ReferenceBackend.capabilities, cache_dtypes=frozenset())

    class Plain(ReferenceBackend):
        name, capabilities, priority = "plain", plain, 1000

    monkeypatch.setattr(BACKENDS, "_entries", {**BACKENDS._entries, "plain": Plain})
    spec = make_call([(1, 1)]).spec
    assert select_backend(spec).name == "plain"
    quantized_spec = dataclasses.replace(spec, cache_dtype=torch.int8)
    assert select_backend(quantized_spec).name != "plain"
    with pytest.raises(
        UnsupportedAttentionError, match=r"'plain' .* has no K/V in torch.int8. Backends that can: .*ref"
    ):
        select_backend(quantized_spec, "plain")
    assert not Capabilities(frozenset(), frozenset(), frozenset()).cache_dtypes  # of who does not know of them
