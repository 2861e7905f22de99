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
        "copy_blocks_kernel",
        "chunk_kernel",
        "draw_kernel",
    }
    for variant in variants:
        module, _, name = variant.kernel.partition(":")
        arguments = getattr(importlib.import_module(module), name).arg_names
        assert sorted([*variant.signature, *variant.constexprs]) == sorted(arguments), variant.name
        assert variant.divisible <= set(variant.signature), variant.name
        assert variant.targets is None or "fp8" in variant.name
