"""Native operators over quantized K/V, at each instruction set: attention, the store, and whole layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_paged.kernels.cpu import attention, decoder, rope
from hf_paged.kernels.cpu.rope import RopeLayout
from hf_paged.kernels.quantized_blocks import QuantizedBlocks, numbers, quantized
from hf_paged.modeling.patterns import reference
from tests.kernels.attention_calls import CHUNKS, DECODES, MIXED, PREFILLS, Call, make_call
from tests.kernels.cpu.levels import LEVELS, at_level
from tests.kernels.cpu.test_attention import LSE_TOLERANCE, TOLERANCE, sharing, without_unused_slots
from tests.kernels.cpu.test_attention import attend as attend_plainly
from tests.kernels.cpu.test_decoder import HIDDEN, angles, make_layer, make_metadata
from tests.kernels.layer_cases import SHAPES
from tests.kernels.quantized_calls import in_float64, quantized_call, quantized_layer
from tests.kernels.test_backends import FEATURES, features_for, oracle
from tests.kernels.test_quantized_blocks import CODES


@pytest.fixture(params=LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request.param, lambda: attention.load() and rope.load() and decoder.load())


def check(call: Call, codes: torch.dtype, **features: Any) -> None:
    """Compares a call, its unused slots made NaN, with float64 over the same codes."""
    over_codes, wide = quantized_call(without_unused_slots(call), codes)
    wanted, wanted_lse = oracle(wide, return_lse=True, **features)
    output, lse = attend_plainly(over_codes, **features)
    assert output.dtype == call.query.dtype
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=TOLERANCE[call.query.dtype])
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=LSE_TOLERANCE)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_features_in_every_dtype(codes, features):
    for dtype in TOLERANCE:
        check(make_call(MIXED, dtype=dtype), codes, **features_for(features, 9))


@pytest.mark.parametrize("block_size", [8, 12, 16, 128])
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, CHUNKS, MIXED], ids=["decode", "prefill", "chunks", "mixed"])
def test_lengths_around_block_boundaries(lengths, block_size):
    for codes in CODES:
        call = make_call(lengths, 6, 2, 32, block_size=block_size)
        check(call, codes)
        check(call, codes, window=17)


@pytest.mark.parametrize("dims", [(40, 40), (80, 80), (128, 128), (192, 128), (24, 20), (17, 9)], ids=str)
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_head_sizes(codes, dims):
    call = make_call([(1, 17), (1, 100), (20, 40)], 6, 2, *dims)
    check(call, codes)
    check(call, codes, **features_for("all together", 6))


@pytest.mark.parametrize("heads", [(1, 1), (12, 3), (7, 1), (16, 2), (71, 1)])
def test_head_groups(heads):
    for codes in CODES:
        check(make_call([(1, 17), (1, 130), (3, 40)], *heads, key_dim=32), codes, **features_for("sinks", heads[0]))


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_what_requests_share_is_read_once(codes):
    call = sharing(make_call([(1, 200)] * 5 + [(1, 40), (9, 220)], 6, 2, 32), [[0, 1, 2, 3, 4, 6]], 11)
    over_codes, wide = quantized_call(call, codes)
    wanted = oracle(wide)
    torch.testing.assert_close(attend_plainly(over_codes)[0].double(), wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_a_nan_is_seen_by_whoever_sees_its_key_and_by_nobody_else(codes):
    call = make_call([(1, 90), (30, 70)], 4, 2, 32)
    block = call.metadata.block_tables[0, 3]
    call.key_cache[block, 0, 2, 5] = math.nan  # of the heads 0 and 1
    output, lse = attend_plainly(quantized_call(call, codes)[0])
    assert output[0, :2].isnan().all() and lse[0, :2].isnan().all()
    assert output[0, 2:].isfinite().all() and output[1:].isfinite().all()


# ------------------------------------------------------------------ the store


def blocks(heads: int, dim: int, codes: torch.dtype) -> QuantizedBlocks:
    """Six blocks of eight slots whose scales are -1, which none is that was stored."""
    zeros = torch.zeros(6, heads, 8, dim, dtype=torch.int8).view(codes)
    return QuantizedBlocks(zeros, torch.full((6, heads, 8), -1.0, dtype=torch.float16))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_codes_and_scales_are_those_of_plain_torch(codes, dtype):
    torch.manual_seed(2)
    for dims in ((64, 64), (40, 24), (17, 9)):
        query = torch.randn(7, 4, dims[0]).to(dtype)
        key, value = ((torch.randn(7, 2, dim) * torch.logspace(-5, 3, 7)[:, None, None]).to(dtype) for dim in dims)
        key[1], value[2, 1], value[3, 0, 3], key[4, 1, 2] = 0, 0, math.nan, math.inf
        caches, slots = [blocks(2, dim, codes) for dim in dims], torch.tensor([9, 47, -1, 3, 12, 0, 30])
        rope.rope_store(query, key, value, None, RopeLayout(0), tuple(caches), slots)
        kept = slots >= 0
        for cache, new in zip(caches, (key, value), strict=True):
            expected, scales = quantized(new[kept], codes)
            places = slots[kept] // 8, slice(None), slots[kept] % 8
            torch.testing.assert_close(cache.scales[places], scales, rtol=0, atol=0, equal_nan=True)
            finite = scales.isfinite()
            assert torch.equal(cache.codes.float()[places][finite], expected.float()[finite])
            assert int((cache.scales == -1).sum()) == cache.scales.numel() - 2 * int(kept.sum())


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_every_code_is_stored_and_read(codes):
    """Whole numbers and all float8 numbers up to the largest are their own codes where the scale is 1."""
    every = torch.arange(-128, 128, dtype=torch.int8).view(codes).float()
    largest = 127.0 if codes is torch.int8 else 448.0
    every = every[every.abs() <= largest]
    heads = torch.cat([torch.tensor([largest]), every])[None, None]
    cache = blocks(1, heads.shape[2], codes)
    rope.rope_store(heads, heads, heads, None, RopeLayout(0), (cache, cache), torch.tensor([5]))
    assert cache.scales[0, 0, 5] == 1 and torch.equal(cache.codes[0, 0, 5].float(), heads[0, 0])


@pytest.mark.parametrize("layout", [RopeLayout(40), RopeLayout(20, "interleaved")])
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_keys_are_rotated_before_they_become_codes(codes, layout):
    torch.manual_seed(3)
    query, key, value = torch.randn(4, 3, 40), torch.randn(4, 2, 40), torch.randn(4, 2, 24)
    angle = torch.randn(4, layout.rotary_dim)
    slots, tables = torch.tensor([9, 47, 2, 3]), (angle.cos(), angle.sin())
    caches = blocks(2, 40, codes), blocks(2, 24, codes)
    rotated = rope.rope_store(query, key, value, tables, layout, caches, slots)
    assert torch.equal(rotated, rope.rope(query, *tables, layout))
    expected, _ = quantized(rope.rope(key, *tables, layout), codes)
    assert torch.equal(caches[0].codes.float()[slots // 8, :, slots % 8], expected.float())


# ------------------------------------------------------------------ layers


@pytest.mark.parametrize("name", [name for name, (given, _) in SHAPES.items() if given.get("has_attention", 1)])
@pytest.mark.parametrize("codes", CODES, ids=str)
def test_layers_equal_the_same_in_plain_torch(codes, name):
    """One layer: a code that rounds to its neighbour is as likely in the next one as an equal one."""
    torch.manual_seed(1)
    for dtype, allowed in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        layer, wide = quantized_layer(make_layer(name, dtype), codes)
        hidden, (cos, sin) = torch.randn(8, HIDDEN, dtype=dtype), angles()
        result = decoder.decoder_layers(hidden, [layer], cos, sin, make_metadata())
        expected = reference.decoder_layers(hidden.float(), [wide], cos, sin, make_metadata())
        error = (result.float() - hidden.float()) - (expected - hidden.float())
        assert float(error.norm()) < allowed * float((expected - hidden.float()).norm())
        for ours, theirs in ((layer.key_cache, wide.key_cache), (layer.value_cache, wide.value_cache)):
            difference = in_float64(ours) - in_float64(theirs)
            assert float(difference.norm()) < allowed * float(in_float64(theirs).norm())


def test_results_do_not_depend_on_the_number_of_threads():
    before, results = torch.get_num_threads(), []
    calls = [quantized_call(make_call(MIXED, 6, 2, 32), codes)[0] for codes in CODES]
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([attend_plainly(call)[0] for call in calls])
    finally:
        torch.set_num_threads(before)
    assert all(itertools.starmap(torch.equal, zip(*results, strict=True)))


def test_what_does_not_fit_is_refused():
    cache, other = blocks(1, 16, torch.int8), blocks(2, 16, torch.int8)
    x, slots = torch.ones(1, 1, 16), torch.tensor([3])
    for caches in (
        (cache, QuantizedBlocks(cache.codes, other.scales)),
        (cache, QuantizedBlocks(cache.codes, cache.scales.float())),
        (cache, numbers(cache.codes, cache.scales, torch.float32)),
        (cache, cache.codes),
    ):
        with pytest.raises(RuntimeError, match="hf_paged rope"):
            rope.rope_store(x, x, x, None, RopeLayout(0), caches, slots)
    wide, wide_cache = torch.ones(1, 1, 1040), blocks(1, 1040, torch.int8)
    with pytest.raises(RuntimeError, match="at most 1024"):
        rope.rope_store(wide, wide, wide, None, RopeLayout(0), (wide_cache, wide_cache), slots)
