from __future__ import annotations

import itertools

import numpy as np
import pytest

from hf_paged.kernels.triton import configs, shared_prefix
from hf_paged.kernels.triton.device import architecture_of
from hf_paged.kernels.triton.launching import MAX_REGISTERS


@pytest.mark.parametrize("architecture", configs.ARCHITECTURES)
def test_every_shape_of_a_model_has_a_configuration(architecture):
    for group, head_dim, itemsize, longest_query in itertools.product(
        (1, 3, 4, 7, 8, 16, 20, 71), (32, 64, 80, 128, 192, 256), (2, 4), (1, 2, 5, 16, 100, 8192)
    ):
        config = configs.launch_config(architecture, group, head_dim, itemsize, longest_query)
        assert config.block_m >= max(16, group)
        for number in (config.block_m, config.tile, config.num_warps):
            assert number & (number - 1) == 0
        assert 16 <= config.tile <= 128
        assert MAX_REGISTERS * 32 * config.num_warps <= 65536


def test_decoding_holds_one_group_and_prefill_as_many_rows_as_there_are():
    def block_m(group: int, longest_query: int) -> int:
        return configs.launch_config("sm_90", group, 128, 2, longest_query).block_m

    assert [block_m(group, 1) for group in (1, 8, 20, 64)] == [16, 16, 32, 64]
    assert [block_m(4, queries) for queries in (2, 4, 5, 16, 17, 1000)] == [16, 16, 64, 64, 128, 128]


def test_contexts_are_split_to_keep_a_device_busy_but_not_into_crumbs():
    assert configs.split_count(132, 8, 32768) == 33  # one request of 8 K/V heads: two programs a multiprocessor
    assert configs.split_count(132, 8, 512) == 2  # 256 keys each
    assert configs.split_count(132, 8, 100) == 1
    assert configs.split_count(132, 64 * 8, 32768) == 1  # enough requests
    assert configs.split_count(132, 1, 1_000_000) == configs.MAX_SPLITS
    assert configs.split_count(1, 1000, 0) == 1


def test_the_list_of_configurations_names_each_once_and_holds_whole_signatures():
    variants = configs.all_configurations()
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        assert not set(variant.signature) & set(variant.constexprs)
        assert variant.divisible <= set(variant.signature)
    attention = [variant for variant in variants if "paged_attention_kernel" in variant.kernel]
    assert {frozenset({*v.signature, *v.constexprs}) for v in attention} == {
        frozenset({*attention[0].signature, *attention[0].constexprs})
    }
    assert {target for v in attention for target in v.targets} == set(configs.ARCHITECTURES)
    assert all("sm_80" not in v.targets for v in attention if "fp8" in v.name)


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_89"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
    ],
)
def test_a_gpu_uses_the_configurations_of_its_kind(capability, architecture):
    assert architecture_of(capability) == architecture


class TestSharedPrefixes:
    BLOCK_SIZE = 64  # four blocks are the least that is worth a launch

    def runs(self, tables: list[list[int]], seq_lens: list[int]) -> list[tuple[int, int, int]]:
        width = max(map(len, tables))
        padded = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
        return shared_prefix.find_runs(padded, np.array(seq_lens), self.BLOCK_SIZE)

    def test_neighbours_that_begin_alike_are_a_run(self):
        tables = [[1, 2, 3, 4, 10 + i] for i in range(5)] + [[30, 31, 32, 33, 34]]
        assert self.runs(tables, [300] * 6) == [(0, 5, 256), (5, 6, 0)]

    def test_few_requests_or_few_blocks_are_not_worth_a_launch(self):
        assert self.runs([[1, 2, 3, 4, 10 + i] for i in range(3)], [300] * 3) == [(0, 3, 0)]
        assert self.runs([[1, 2, 3, 10 + i, 20 + i] for i in range(5)], [300] * 5) == [(i, i + 1, 0) for i in range(5)]

    def test_only_blocks_before_every_new_token_are_shared(self):
        tables = [[1, 2, 3, 4, 5]] * 4
        assert self.runs(tables, [320, 320, 320, 320]) == [(0, 4, 256)]
        assert self.runs(tables, [320, 257, 320, 321]) == [(0, 4, 256)]
        assert self.runs(tables, [256] * 4) == [(i, i + 1, 0) for i in range(4)]

    def test_a_long_prefix_is_not_given_up_for_one_more_member(self):
        long = [list(range(1, 17)) + [20 + i] for i in range(4)]
        tables = [*long, [1, 2, 3, 4, *range(50, 63)]]
        assert self.runs(tables, [1060] * 5) == [(0, 4, 1024), (4, 5, 0)]

    def test_padded_requests_share_nothing(self):
        tables = [[1, 2, 3, 4, 10 + i] for i in range(4)] + [[0] * 5] * 4
        assert self.runs(tables, [300] * 4 + [0] * 4) == [(0, 4, 256), *((i, i + 1, 0) for i in range(4, 8))]
