"""Native paged attention against float64, at each instruction set and dtype."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_paged.kernels.cpu import attention
from tests.kernels.attention_calls import CHUNKS, DECODES, MIXED, PREFILLS, Call, make_call
from tests.kernels.cpu.levels import at_level
from tests.kernels.test_backends import FEATURES, features_for, oracle

# Largest absolute error of values of the order of 1, and of a log-sum-exp.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LSE_TOLERANCE = 2e-5
LEVELS = ("avx2", "avx512", "avx512 with bf16 dot", "amx")


@pytest.fixture(params=LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test at each level; the bfloat16 dot product counts as one."""
    for level in at_level(request.param.split()[0], attention.load):
        dot = request.param.endswith("dot")
        if dot and not torch.ops.hf_paged.has_bf16_dot():
            pytest.skip("this machine has no bfloat16 dot product")
        torch.ops.hf_paged.set_bf16_dot(int(dot))
        yield level
        torch.ops.hf_paged.set_bf16_dot(-1)


def attend(call: Call, scale: float | None = None, **features: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the operator."""
    metadata = call.metadata
    return attention.paged_attention(
        call.query,
        (call.key_cache, call.value_cache),
        metadata.block_tables,
        (metadata.cu_seqlens_q, metadata.seq_lens),
        call.spec.key_dim**-0.5 if scale is None else scale,
        return_lse=True,
        **features,
    )


def check(
    call: Call, tolerance: float | None = None, lse_tolerance: float = LSE_TOLERANCE, **features: Any
) -> torch.Tensor:
    """Compares a call, its unused slots made NaN, with float64; returns the output."""
    wanted, wanted_lse = oracle(call, return_lse=True, **features)
    output, lse = attend(without_unused_slots(call), **features)
    assert output.dtype == call.query.dtype and lse.dtype == torch.float32
    tolerance = tolerance or TOLERANCE[call.key_cache.dtype]
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=lse_tolerance)
    return output


def without_unused_slots(call: Call) -> Call:
    """The same call with NaN in every slot that no request uses."""
    metadata = call.metadata
    used = torch.zeros(call.key_cache.shape[0], metadata.block_size, dtype=torch.bool)
    for row, length in zip(metadata.block_tables, metadata.seq_lens.tolist(), strict=True):
        positions = torch.arange(length)
        used[row[positions // metadata.block_size].long(), positions % metadata.block_size] = True
    caches = (cache.masked_fill(~used[:, None, :, None], math.nan) for cache in (call.key_cache, call.value_cache))
    return dataclasses.replace(call, key_cache=next(caches), value_cache=next(caches))


def sharing(call: Call, groups: list[list[int]], num_blocks: int) -> Call:
    """The same call, in which the requests of each group have their first blocks in common."""
    tables = call.metadata.block_tables.clone()
    for group in groups:
        tables[group, :num_blocks] = tables[group[0], :num_blocks]
    return dataclasses.replace(call, metadata=dataclasses.replace(call.metadata, block_tables=tables, prepared={}))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_features_in_every_dtype(dtype, features):
    check(make_call(MIXED, dtype=dtype), **features_for(features, 9))


@pytest.mark.parametrize("block_size", [8, 12, 16, 128])
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, CHUNKS, MIXED], ids=["decode", "prefill", "chunks", "mixed"])
def test_lengths_around_block_boundaries(lengths, block_size):
    for dtype in (torch.float32, torch.bfloat16):
        call = make_call(lengths, 6, 2, 32, block_size=block_size, dtype=dtype)
        check(call)
        check(call, window=17)


@pytest.mark.parametrize(
    "heads", [(1, 1), (2, 1), (12, 3), (5, 1), (12, 2), (7, 1), (16, 2), (10, 1), (71, 1), (130, 1)]
)
def test_head_groups(heads):
    lengths = MIXED if heads[0] < 71 else [(1, 17), (1, 130), (3, 40)]
    for dtype in (torch.float32, torch.bfloat16):
        call = make_call(lengths, *heads, key_dim=32, dtype=dtype)
        for features in ("plain", "all together"):
            check(call, **features_for(features, heads[0]))


@pytest.mark.parametrize("key_dim", [32, 40, 80, 96, 112, 128, 192, 256])
def test_head_sizes_with_energy_only_in_the_last_dimensions(key_dim):
    # triton-lang/triton#621: the first dimensions alone; sgl-project/sglang#1159: sizes that are no power of two.
    for dtype in TOLERANCE:
        call = make_call([(1, 17), (1, 100), (20, 40)], 6, 2, key_dim, dtype=dtype)
        call.query[..., :-8] = 0
        call.query[..., -8:] *= 4
        check(call)


@pytest.mark.parametrize("dims", [(64, 32), (48, 80), (192, 128), (24, 20)], ids=str)
def test_values_of_another_size_than_keys(dims):
    for dtype in (torch.float32, torch.bfloat16):
        call = make_call(MIXED, 6, 2, dims[0], dims[1], dtype=dtype)
        for features in ("plain", "all together"):
            check(call, **features_for(features, 6))


def test_large_scores_keep_their_precision():
    # Scores of about 100 differ by less than a bfloat16 step of 0.5: they must not be rounded before the softmax.
    for lengths in ([(1, 200)] * 4, [(40, 200)]):
        check(make_call(lengths, dtype=torch.bfloat16), tolerance=2e-2, scale=4.0)
        check(make_call(lengths, dtype=torch.float32), tolerance=1e-4, scale=4.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_queries_over_a_narrower_cache(dtype):
    call = make_call(MIXED, dtype=dtype)
    call = dataclasses.replace(call, query=torch.randn(call.query.shape))
    rounds_queries = dtype == torch.bfloat16 and torch.ops.hf_paged.prefers_bf16_dot()
    exact = not rounds_queries and torch.ops.hf_paged.isa() != "amx"
    check(call, 5e-6 if exact else 1.6e-2, LSE_TOLERANCE if exact else 1e-2)


@pytest.mark.parametrize("window", [(1 << 32) + 5, 1 << 40, (1 << 62)])
def test_a_window_wider_than_any_context(window):
    call = make_call([(1, 300), (30, 300)], 6, 2, 32)
    assert torch.equal(attend(call, window=window)[0], attend(call)[0])


def test_queries_may_have_any_strides():
    call = make_call(MIXED)
    expected, _ = attend(call)
    wide = torch.zeros(call.query.shape[0], 15, 64)
    wide[:, :9] = call.query
    strided = [wide[:, :9], call.query.transpose(0, 1).contiguous().transpose(0, 1)]
    for query in strided:
        assert torch.equal(attend(dataclasses.replace(call, query=query))[0], expected)


@pytest.mark.parametrize("features", FEATURES)
def test_long_contexts_of_few_requests_are_cut_and_merged(features):
    for lengths in ([(1, 2600)], [(1, 40), (1, 900), (3, 1500)]):
        call = make_call(lengths, 6, 2, 32)
        check(call, **features_for(features, 6))
    call = make_call([(1, 1030), (20, 700)], 4, 2, 64, dtype=torch.bfloat16)
    check(call, **features_for(features, 4))
    check(make_call([(1, 800)], 130, 1, 16), **features_for(features, 130))


@pytest.mark.parametrize("features", ["plain", "window wider than the context", "window", "all together"])
@pytest.mark.parametrize("num_blocks", [1, 5, 17])
def test_prefixes_that_requests_share(num_blocks, features):
    lengths = [(1, 280), (1, 300), (1, 275), (1, 20), (1, 400), (1, 290), (2, 290), (5, 300), (60, 350)]
    for dtype in (torch.float32, torch.bfloat16):
        call = sharing(make_call(lengths, 6, 2, 32, dtype=dtype), [[0, 2, 5, 6, 8], [1, 4, 7]], num_blocks)
        check(call, **features_for(features, 6))


def test_a_prefix_shared_by_many_requests_is_cut_by_rows_and_keys():
    call = sharing(make_call([(1, 1030)] * 40, 6, 1, 32), [list(range(40))], 64)
    output = check(call, **features_for("sinks", 6))
    alone = dataclasses.replace(
        call,
        query=call.query[7:8],
        metadata=type(call.metadata).build(call.metadata.block_tables[7:8].numpy(), [1], [1030], 16),
    )
    torch.testing.assert_close(attend(alone, **features_for("sinks", 6))[0], output[7:8], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [[(1, 2600)], [(1, 500)] * 20 + [(50, 600)], MIXED], ids=["one", "mixed", "short"])
def test_results_do_not_depend_on_the_number_of_threads(lengths):
    call = make_call(lengths, dtype=torch.bfloat16)
    call = sharing(call, [list(range(len(lengths) // 2 + 1))], 20) if len(lengths) == 21 else call
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results += [attend(call), attend(call)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(output, results[0][0]) and torch.equal(lse, results[0][1]) for output, lse in results)


def test_nothing_visible_is_nothing_and_empty_requests_are_skipped():
    call = make_call([(1, 20), (4, 33)], 6, 2, 32)
    expected, _ = attend(call)
    metadata = dataclasses.replace(
        call.metadata,
        block_tables=call.metadata.block_tables[[0, 0, 1]],
        cu_seqlens_q=torch.tensor([0, 1, 1, 5], dtype=torch.int32),
        seq_lens=torch.tensor([20, 0, 33], dtype=torch.int32),
    )
    assert torch.equal(attend(dataclasses.replace(call, metadata=metadata))[0], expected)
    none = dataclasses.replace(
        call,
        query=call.query[:0],
        metadata=dataclasses.replace(
            metadata, cu_seqlens_q=torch.zeros(1, dtype=torch.int32), seq_lens=metadata.seq_lens[:0]
        ),
    )
    assert attend(none)[0].shape == (0, 6, 32)


class TestBadCalls:
    @pytest.mark.parametrize("block_id", [-1, 1 << 30, -(1 << 31)])
    @pytest.mark.parametrize("lengths", [[(1, 100), (1, 90)], [(50, 100), (50, 90)]])
    def test_a_block_that_is_not_in_the_cache(self, lengths, block_id):
        call = make_call(lengths, 6, 2, 32)
        call.metadata.block_tables[1, 2] = block_id
        with pytest.raises(RuntimeError, match=f"request 1 names block {block_id}"):
            attend(call)

    def test_entries_past_the_context_may_be_anything(self):
        call = make_call([(1, 100), (1, 30)], 6, 2, 32)
        expected, _ = attend(call)
        call.metadata.block_tables[1, 2:] = 1 << 30
        assert torch.equal(attend(call)[0], expected)

    def test_a_table_shorter_than_the_context(self):
        call = make_call([(1, 100)], 6, 2, 32)
        call.metadata.seq_lens[0] = 1000
        with pytest.raises(RuntimeError, match="names only"):
            attend(call)

    def test_lengths_that_contradict_each_other(self):
        call = make_call([(1, 10), (4, 30)], 6, 2, 32)
        for field, index, value in (("seq_lens", 1, 2), ("cu_seqlens_q", 1, 9), ("cu_seqlens_q", 2, 6)):
            broken = dataclasses.replace(call.metadata, **{field: getattr(call.metadata, field).clone()})
            getattr(broken, field)[index] = value
            with pytest.raises(RuntimeError, match="hf_paged::paged_attention"):
                attend(dataclasses.replace(call, metadata=broken))

    def test_shapes_and_dtypes_that_do_not_fit(self):
        call = make_call([(1, 10)], 6, 2, 32)
        for change in (
            {"query": call.query[..., :16].contiguous()},
            {"query": call.query[:, :5]},
            {"query": call.query.half()},
            {"key_cache": call.key_cache[:, :1].contiguous()},
            {"value_cache": call.value_cache.bfloat16()},
        ):
            with pytest.raises(RuntimeError, match="hf_paged::paged_attention"):
                attend(dataclasses.replace(call, **change))


def test_compiles_without_graph_breaks():
    call = make_call([(1, 20), (4, 33)], 6, 2, 32)
    metadata = call.metadata

    def layer(query: torch.Tensor) -> torch.Tensor:
        output, lse = torch.ops.hf_paged.paged_attention(
            query * 2,
            call.key_cache,
            call.value_cache,
            None,
            None,
            metadata.block_tables,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            0.1,
            0,
            0.0,
            None,
            None,
            True,
        )
        return output.sum(-1) + lse

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(call.query), layer(call.query))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("lengths", [[(1, 200), (1, 33)], [(1, 90), (30, 70)]], ids=["few rows", "many rows"])
def test_a_nan_is_seen_by_whoever_sees_its_key_and_by_nobody_else(lengths, softcap):
    for dtype in TOLERANCE:
        call = make_call(lengths, 4, 2, 32, dtype=dtype)
        metadata = call.metadata
        position, (last_query_len, last_len) = 50, lengths[-1]
        block = metadata.block_tables[0, position // metadata.block_size]
        call.key_cache[block, 0, position % metadata.block_size, 3] = math.nan  # of the heads 0 and 1
        call.query[-1, 3] = math.nan
        output, lse = attend(call, softcap=softcap)
        lost = torch.zeros(output.shape[:2], dtype=torch.bool)
        lost[0, :2] = lost[-1, 3] = True
        assert last_len - last_query_len < last_len and len(lost) == 1 + last_query_len
        assert torch.equal(output.isnan().all(dim=-1), lost) and torch.equal(output.isnan().any(dim=-1), lost)
        assert torch.equal(lse.isnan(), lost)


def test_tables_may_be_views():
    call = make_call(MIXED, dtype=torch.float32)
    expected, _ = attend(call)
    tables = call.metadata.block_tables
    wide = torch.full((len(tables), tables.shape[1] + 3), -1, dtype=torch.int32)
    wide[:, 2:-1] = tables
    metadata = dataclasses.replace(call.metadata, block_tables=wide[:, 2:-1], prepared={})
    assert torch.equal(attend(dataclasses.replace(call, metadata=metadata))[0], expected)

    call = make_call([(1, 40)] * 3, dtype=torch.float32)
    row = call.metadata.block_tables[:1]
    results = []
    for tables in (row.repeat(3, 1), row.expand(3, -1)):
        metadata = dataclasses.replace(call.metadata, block_tables=tables, prepared={})
        results.append(attend(dataclasses.replace(call, metadata=metadata))[0])
    assert torch.equal(*results)
