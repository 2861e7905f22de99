from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.generation import kv_pool
from hf_paged.kernels import PagedAttentionMetadata
from hf_paged.kernels.triton import shared_prefix
from hf_paged.modeling.layer_groups import LayerGroup, LayerSpec
from tests.kernels.triton.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def results():
    return {result["name"]: result for result in run_interpreted("-m", "tests.kernels.triton.run_pool_cases")}


@pytest.mark.parametrize("name", ["alike", "of different heads", "of codes"])
def test_blocks_of_all_layers_are_copied_in_one_launch(results, name):
    result = results[name]
    assert result["equal"] and result["launches"] == {"copy_blocks_kernel": 1}


def test_blocks_that_the_kernel_does_not_take_are_copied_by_torch(results):
    result = results["of blocks that no kernel takes"]
    assert result["equal"] and result["launches"].keys() == {"index_select", "index_copy_"}


@pytest.mark.parametrize("name", ["prompts", "branches"])
def test_what_requests_share_is_read_once_and_changes_nothing(results, name):
    result = results[name]
    assert result["tokens"] == result["expected"]
    # One of the steps has five decoding requests; in the others nobody searches.
    assert result["steps_that_share"] == result["searches"] == 1 < result["steps"]


def pool_of(value_dims: tuple[int, ...]) -> kv_pool.KVPool:
    cpu = torch.device("cpu")
    layers = [LayerSpec(i, 2, 2, 8, dim, torch.float32, cpu, None) for i, dim in enumerate(value_dims)]
    return kv_pool.KVPool(LayerGroup(tuple(layers)), 6, 16)


class Calls(TorchDispatchMode):
    """Counts operators of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


class TestPrepared:
    BLOCK_SIZE = 64

    def metadata(self, tables: list[list[int]], seq_lens: list[int], on_host: bool = True) -> PagedAttentionMetadata:
        array = np.array(tables, dtype=np.int32)
        ones = np.ones(len(tables), dtype=np.int32)
        data = PagedAttentionMetadata.build(array, ones, np.array(seq_lens), self.BLOCK_SIZE)
        data.block_tables_host = array if on_host else None
        return data

    def test_prefixes_are_found_by_the_tables_on_the_host(self):
        tables = [[1, 2, 3, 4, 10 + i] for i in range(5)]
        found = shared_prefix.prepared_prefixes(self.metadata(tables, [300] * 5))
        assert found is not None and found.lengths.tolist() == [256] and found.starts.tolist() == [256] * 5
        assert shared_prefix.keys_saved(np.array(tables), np.array([300] * 5), self.BLOCK_SIZE) == 4 * 256
        assert shared_prefix.prepared_prefixes(self.metadata(tables, [300] * 5, on_host=False)) is None
        assert shared_prefix.prepared_prefixes(self.metadata(tables[:3], [300] * 3)) is None

    @pytest.mark.parametrize(
        ("tables", "seq_len"),
        [
            ([[i, 20 + i, 30 + i, 40 + i, 50 + i] for i in range(6)], 300),
            ([[1, 2, 3] for _ in range(6)], 180),  # less than a split's worth
            ([[0] * 8] * 6, 512),  # padding
        ],
    )
    def test_without_a_common_block_nothing_is_searched(self, tables, seq_len, monkeypatch):
        def find_runs(*args):
            raise AssertionError("must not be called")

        monkeypatch.setattr(shared_prefix, "find_runs", find_runs)
        assert shared_prefix.prepared_prefixes(self.metadata(tables, [seq_len] * 6)) is None

    def test_the_quick_look_misses_no_run(self):
        source = np.random.default_rng(5)
        found = 0
        for _ in range(200):
            count, width = source.integers(6, 10), source.integers(5, 7)
            tables = np.arange(count * width, dtype=np.int32).reshape(count, width)
            for row in range(1, count):
                if source.random() < 0.85:
                    shared = source.integers(3, width)
                    tables[row, :shared] = tables[row - 1, :shared]
            seq_lens = source.integers(250, width * self.BLOCK_SIZE, count)
            lengths = [length for _, _, length in shared_prefix.find_runs(tables, seq_lens, self.BLOCK_SIZE)]
            is_found = shared_prefix.prepared_prefixes(self.metadata(tables.tolist(), list(seq_lens))) is not None
            assert is_found == any(lengths)
            found += is_found
        assert 20 < found < 180


@pytest.mark.parametrize("dims", [(8, 8), (8, 16)])
def test_on_a_device_blocks_of_all_layers_are_cleared_by_one_operator_for_each_shape(dims):
    pool = pool_of(dims)
    tensors = [*pool.keys, *pool.values]
    for tensor in tensors:
        tensor.normal_()
    expected = [tensor.clone() for tensor in tensors]
    with Calls() as calls:
        kv_pool._clear_at_once(pool._slabs, torch.tensor([1, 4]))
    assert calls.counts["index_fill_"] == len(set(dims))
    for now, then in zip(tensors, expected, strict=True):
        then[[1, 4]] = 0
        assert torch.equal(now, then)


def test_a_pool_on_a_cpu_copies_and_clears_as_ever():
    pool = pool_of((8, 16))
    tensors = [*pool.keys, *pool.values]
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    assert pool.take([0, 1, 2, 3], []) == []
    pool.copy(torch.tensor([[1, 2], [4, 5]]))
    pool.clear(torch.tensor(pool.take([4, 5], [2])))
    for now, then in zip(tensors, before, strict=True):
        then[4], then[5] = then[1], then[2]
        then[2] = 0
        assert torch.equal(now, then)
