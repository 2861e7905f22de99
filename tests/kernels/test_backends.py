from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hf_paged.kernels import PagedAttentionBackend, select_backend, torch_plan, torch_sdpa

from .attention_calls import CHUNKS, DECODES, MIXED, PREFILLS, Call, dense_attention, make_call

CPU_BACKENDS = ("reference", "torch_sdpa")
# Largest absolute error against float64 on the same inputs; values are of the order of 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FEATURES: dict[str, Any] = {
    "plain": {},
    "window": {"window": 20},
    "window of one token": {"window": 1},
    "window wider than the context": {"window": 1000},
    "softcap": {"softcap": 1.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": True},
    "all together": {"window": 20, "softcap": 2.0, "sinks": True, "alibi_slopes": True},
}


def features_for(name: str, num_heads: int) -> dict[str, Any]:
    features = dict(FEATURES[name])
    if "sinks" in features:
        # Strong enough to take most of the softmax for some heads and nothing for others.
        features["sinks"] = torch.linspace(-5.0, 5.0, num_heads)
    if "alibi_slopes" in features:
        features["alibi_slopes"] = 2.0 ** -torch.linspace(0.5, 8.0, num_heads)
    return features


def attend(backend: str | PagedAttentionBackend, call: Call, **features: Any) -> Any:
    if isinstance(backend, str):
        backend = select_backend(call.spec, backend)
    call.metadata.prepared.clear()
    backend.prepare(call.metadata, call.spec.num_kv_heads)
    scale = features.pop("scale", call.spec.key_dim**-0.5)
    return backend.attend(call.query, call.key_cache, call.value_cache, call.metadata, scale=scale, **features)


def oracle(call: Call, **features: Any) -> torch.Tensor:
    """The reference backend in float64, which is itself checked against the formula."""
    wide = dataclasses.replace(
        call,
        query=call.query.double(),
        key_cache=call.key_cache.double(),
        value_cache=call.value_cache.double(),
        spec=dataclasses.replace(call.spec, dtype=torch.float64),
    )
    return attend("reference", wide, **features)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("value_dim", [16, 24])
def test_reference_is_the_formula(features, value_dim):
    call = make_call(MIXED, num_heads=6, num_kv_heads=2, key_dim=16, value_dim=value_dim, dtype=torch.float64)
    settings = features_for(features, 6)
    expected, expected_lse = dense_attention(call, 0.3, **settings)
    actual, lse = attend("reference", call, scale=0.3, return_lse=True, **settings)
    assert_close(actual, expected, torch.float64)
    assert_close(lse, expected_lse, torch.float64)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_features_in_every_dtype(backend, dtype, features):
    call = make_call(MIXED, dtype=dtype)
    settings = features_for(features, 9)
    assert_close(attend(backend, call, **settings), oracle(call, **settings), dtype)


@pytest.mark.parametrize("features", ["plain", "window", "all together"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_log_sum_exp(backend, dtype, features):
    call = make_call(MIXED, dtype=dtype)
    settings = features_for(features, 9)
    output, lse = attend(backend, call, return_lse=True, **settings)
    expected, expected_lse = oracle(call, return_lse=True, **settings)
    assert lse.dtype == torch.float32
    assert_close(output, expected, dtype)
    assert_close(lse, expected_lse, torch.float32)


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, CHUNKS, MIXED], ids=["decode", "prefill", "chunks", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_around_block_boundaries(dtype, lengths, block_size):
    call = make_call(lengths, block_size=block_size, dtype=dtype)
    assert_close(attend("torch_sdpa", call), oracle(call), dtype)
    assert_close(attend("torch_sdpa", call, window=17), oracle(call, window=17), dtype)


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (9, 3), (8, 2), (16, 2), (12, 12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_groups(dtype, heads):
    call = make_call(MIXED, *heads, dtype=dtype)
    for features in ("plain", "softcap", "alibi"):
        settings = features_for(features, heads[0])
        assert_close(attend("torch_sdpa", call, **settings), oracle(call, **settings), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_dim", [32, 40, 64, 80, 96, 112, 128, 192, 256])
def test_head_sizes_with_energy_only_in_the_last_dimensions(key_dim, dtype):
    # triton-lang/triton#621: a kernel that used the first 64 dimensions of larger heads.
    call = make_call([(1, 17), (1, 100), (20, 40)], 6, 2, key_dim, dtype=dtype)
    call.query[..., :-8] = 0
    call.query[..., -8:] *= 4
    assert_close(attend("torch_sdpa", call), oracle(call), dtype)
    assert_close(attend("reference", call), oracle(call), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(64, 32), (48, 80), (192, 128)], ids=str)
def test_values_of_another_size_than_keys(dims, dtype):
    call = make_call(MIXED, key_dim=dims[0], value_dim=dims[1], dtype=dtype)
    for features in FEATURES:
        settings = features_for(features, 9)
        assert_close(attend("torch_sdpa", call, **settings), oracle(call, **settings), dtype)


def test_large_scores_keep_their_precision_in_bfloat16():
    # Scores of about 100 differ by less than a bfloat16 step of 0.5: they must not be rounded before the softmax.
    call = make_call([(1, 200)] * 4, dtype=torch.bfloat16)
    assert_close(attend("torch_sdpa", call, scale=4.0), oracle(call, scale=4.0), torch.bfloat16)


def test_queries_and_new_keys_may_have_any_strides():
    call = make_call(MIXED)
    expected = attend("torch_sdpa", call)
    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        inverse = [order.index(dim) for dim in range(3)]
        strided = dataclasses.replace(call, query=call.query.permute(order).contiguous().permute(inverse))
        for backend in CPU_BACKENDS:
            assert_close(attend(backend, strided), expected, torch.float32)


@pytest.mark.parametrize("features", ["plain", "window", "alibi", "all together"])
def test_long_contexts_in_small_slices(monkeypatch, features):
    call = make_call([(1, 900), (1, 30), (200, 200), (130, 700)], 6, 2, 32)
    settings = features_for(features, 6)
    expected = oracle(call, **settings)
    monkeypatch.setattr(torch_plan, "MAX_SCORE_BYTES", 100_000)
    monkeypatch.setattr(torch_plan, "MAX_GATHERED_KEYS", 512)
    monkeypatch.setattr(torch_plan, "MAX_KEPT_MASK_BYTES", 0)
    assert_close(attend("torch_sdpa", call, **settings), expected, torch.float32)


def test_no_matrix_of_scores_is_larger_than_its_limit(monkeypatch):
    monkeypatch.setattr(torch_plan, "MAX_SCORE_BYTES", 50_000)
    call = make_call([(300, 600)], 4, 2, 16)
    sizes = []
    original = torch_sdpa.attend_explicit

    def recording(query, keys, *arguments):
        sizes.append(query.shape[1] * query.shape[2] * keys.shape[2] * 4)
        return original(query, keys, *arguments)

    monkeypatch.setattr(torch_sdpa, "attend_explicit", recording)
    assert_close(attend("torch_sdpa", call, softcap=2.0), oracle(call, softcap=2.0), torch.float32)
    assert len(sizes) > 10 and max(sizes) <= 50_000


def test_layers_with_different_windows_share_a_step():
    call = make_call(MIXED)
    windows = (None, 5, None, 20, 5)
    expected = [oracle(call, scale=0.1, window=window) for window in windows]
    backend = select_backend(call.spec, "torch_sdpa")
    call.metadata.prepared.clear()
    for window, wanted in zip(windows, expected, strict=True):
        output = backend.attend(call.query, call.key_cache, call.value_cache, call.metadata, scale=0.1, window=window)
        assert_close(output, wanted, torch.float32)
    assert len(call.metadata.prepared) == 3


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_store_writes_each_token_into_its_slot_and_nothing_else(backend, num_tokens):
    call = make_call([(1, 20)] if num_tokens == 1 else [(1, 20), (39, 50)], dtype=torch.bfloat16)
    key = torch.randn(3, num_tokens, 64).bfloat16().transpose(0, 1)
    value = torch.randn(num_tokens, 3, 64).bfloat16()
    key_cache, value_cache = torch.zeros_like(call.key_cache), torch.zeros_like(call.value_cache)
    select_backend(call.spec, backend).store(key, value, key_cache, value_cache, call.metadata)
    slots = call.metadata.slot_mapping.tolist()
    for token, slot in enumerate(slots):
        assert torch.equal(key_cache[slot // 16, :, slot % 16], key[token])
        assert torch.equal(value_cache[slot // 16, :, slot % 16], value[token])
    assert int((key_cache != 0).any(-1).any(1).sum()) == num_tokens == len(set(slots))
    assert int((value_cache != 0).any(-1).any(1).sum()) == num_tokens


class TestBatchInvariance:
    LENGTHS = (1, 9, 17, 64, 65, 200)

    @staticmethod
    def backend(call: Call) -> PagedAttentionBackend:
        return select_backend(dataclasses.replace(call.spec, features=frozenset({"batch_invariant"})))

    @staticmethod
    def part(call: Call, request: int, query_len: int, seq_len: int) -> Call:
        """One request of a call alone, with the queries of its positions `seq_len - query_len ... seq_len - 1`."""
        table = call.metadata.block_tables[request : request + 1].numpy()
        metadata = type(call.metadata).build(table, [query_len], [seq_len], call.metadata.block_size)
        end = int(call.metadata.cu_seqlens_q[request + 1]) - (int(call.metadata.seq_lens[request]) - seq_len)
        return dataclasses.replace(call, metadata=metadata, query=call.query[end - query_len : end])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("features", ["plain", "all together"])
    def test_a_request_does_not_depend_on_its_batch_mates(self, dtype, features):
        call = make_call([(1, length) for length in self.LENGTHS] + [(40, 90), (30, 30)], dtype=dtype)
        settings = features_for(features, 9)
        backend = self.backend(call)
        together = attend(backend, call, **settings)
        starts = call.metadata.cu_seqlens_q.tolist()
        for request, (query_len, seq_len) in enumerate(
            zip(call.query_lens, call.metadata.seq_lens.tolist(), strict=True)
        ):
            alone = attend(backend, self.part(call, request, query_len, seq_len), **settings)
            assert torch.equal(alone, together[starts[request] : starts[request + 1]])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_request_does_not_depend_on_how_its_prefill_was_chunked(self, dtype):
        call = make_call([(150, 150)], dtype=dtype)
        backend = self.backend(call)
        whole = attend(backend, call)
        for sizes in ([150], [64, 64, 22], [7, 100, 43], [149, 1], [1] * 150):
            chunks, end = [], 0
            for size in sizes:
                end += size
                chunks.append(attend(backend, self.part(call, 0, size, end)))
            assert torch.equal(torch.cat(chunks), whole), sizes
