from __future__ import annotations

import importlib

import pytest

pytest.importorskip("triton")


def test_each_configuration_has_a_name_and_a_whole_signature():
    from hf_paged.kernels.triton import operator_configs

    variants = operator_configs.all_configurations()
    assert len({variant.name for variant in variants}) == len(variants)
    kernels = {variant.kernel for variant in variants}
    assert {kernel.rpartition(":")[2] for kernel in kernels} == {
        "norm_kernel",
        "activation_kernel",
        "rope_store_kernel",
        "packed_linear_kernel",
        "copy_blocks_kernel",
        "chunk_kernel",
        "draw_kernel",
    }
    for variant in variants:
        module, _, name = variant.kernel.partition(":")
        arguments = getattr(importlib.import_module(module), name).arg_names
        assert sorted([*variant.signature, *variant.constexprs]) == sorted(arguments), variant.name
        assert variant.divisible <= set(variant.signature), variant.name
    every = {"sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"}
    for kernel in kernels:
        assert set().union(*(v.targets or every for v in variants if v.kernel == kernel)) == every


def test_a_thread_loads_16_bytes_of_heads_at_a_time_whatever_the_size_of_a_warp():
    from hf_paged.kernels.triton.cache import heads_of_program, warps_of_program

    for num_heads, head_dim in ((32, 128), (9, 64), (3, 64), (1, 64), (16, 256), (1, 1024)):
        for threads in (32, 64):
            heads = heads_of_program(num_heads, head_dim)
            warps = warps_of_program(heads, head_dim, threads)
            assert warps == 1 or heads * head_dim >= 8 * threads * warps
            assert warps == 4 or heads * head_dim < 8 * threads * 2 * warps
