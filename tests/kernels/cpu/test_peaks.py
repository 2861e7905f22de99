"""Peaks: every instruction of the level is measured, and those that do more at once are not slower."""

from __future__ import annotations

import pytest
import torch

from hf_paged.errors import NotSupportedError, UnknownNameError
from hf_paged.kernels.cpu import library, peaks

pytestmark = pytest.mark.skipif(not library.load(), reason=library.status().describe())


def test_each_instruction_of_the_level_has_a_peak():
    names = peaks.peak_instructions()
    assert names[0] == "fma" and set(names) <= {"fma", "bf16_dot", "amx"}
    rates = {name: peaks.peak_flops(name) for name in names}
    assert all(1e9 < rate < 1e15 for rate in rates.values())
    if "amx" in rates:
        assert rates["amx"] > rates["fma"]


def test_wider_registers_have_their_own_peak():
    levels = [level for level in torch.ops.hf_paged.available_isas() if level != "torch"]
    before = torch.ops.hf_paged.isa()
    try:
        for level in levels:
            torch.ops.hf_paged.set_isa(level)
            assert peaks.peak_flops("fma") > 1e9
            assert ("amx" in peaks.peak_instructions()) == (level == "amx")
            assert "bf16_dot" not in peaks.peak_instructions() or level != "avx2"
        torch.ops.hf_paged.set_isa("torch")
        assert peaks.peak_instructions() == ()
        with pytest.raises(NotSupportedError):
            peaks.peak_flops("fma")
    finally:
        torch.ops.hf_paged.set_isa(before)


def test_an_instruction_that_the_level_lacks_is_refused_by_name():
    with pytest.raises(UnknownNameError, match="'mmx'.*fma"):
        peaks.peak_flops("mmx")
    with pytest.raises(RuntimeError, match="no 'mmx'"):
        torch.ops.hf_paged.peak_flops("mmx")


def test_bfloat16_uses_what_was_measured_faster():
    assert peaks.used_instruction(torch.float32) == "fma"
    assert peaks.used_instruction(torch.bfloat16) in peaks.peak_instructions()
    if "bf16_dot" in peaks.peak_instructions() and "amx" not in peaks.peak_instructions():
        torch.ops.hf_paged.set_bf16_dot(1)
        try:
            assert peaks.used_instruction(torch.bfloat16) == "bf16_dot"
            torch.ops.hf_paged.set_bf16_dot(0)
            assert peaks.used_instruction(torch.bfloat16) == "fma"
        finally:
            torch.ops.hf_paged.set_bf16_dot(-1)
