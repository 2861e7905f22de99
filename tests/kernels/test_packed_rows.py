"""Packed rows: what goes in comes out, and nothing else passes for one."""

from __future__ import annotations

import pytest
import torch

from hf_paged.kernels.packed_rows import Codes, Numbers, can_pack, dequantized, format_of, pack_rows, unpack_rows

SHAPES = ((64, 2), (96, 1), (37, 1), (256, 8), (1, 1))


def numbers(kind: Codes, rows: int, k: int, num_groups: int) -> Numbers:
    codes = {
        Codes.Q4: lambda: torch.randint(0, 16, (rows, k), dtype=torch.uint8),
        Codes.Q8: lambda: torch.randint(-128, 128, (rows, k), dtype=torch.int8),
        Codes.W8A8: lambda: torch.randint(-127, 128, (rows, k), dtype=torch.int8),
        Codes.E4M3: lambda: torch.randn(rows, k).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn),
    }[kind]()
    zero = torch.randint(-8, 17, (rows, num_groups)).float() * (kind in (Codes.Q4, Codes.Q8))
    return Numbers(codes, torch.rand(rows, num_groups) / 7, zero, kind)


@pytest.mark.parametrize("kind", Codes)
@pytest.mark.parametrize(("k", "num_groups"), SHAPES)
def test_packing_is_undone_by_unpacking(kind: Codes, k: int, num_groups: int):
    if kind is Codes.W8A8 and num_groups > 1:
        pytest.skip("these have one group")
    torch.manual_seed(0)
    before = numbers(kind, 5, k, num_groups)
    packed = pack_rows(before)
    assert packed.dtype == kind.tensor_dtype and format_of(packed, k) == (kind, num_groups)
    after = unpack_rows(packed, k)
    assert torch.equal(after.codes.view(torch.uint8), before.codes.view(torch.uint8))
    assert torch.equal(after.scale, before.scale) and torch.equal(after.zero, before.zero)
    size = k // num_groups
    expected = (before.codes.double() - before.zero.double().repeat_interleave(size, 1)) * (
        before.scale.double().repeat_interleave(size, 1)
    )
    assert torch.allclose(dequantized(packed, k).double(), expected, rtol=1e-6, atol=0)


def test_four_bits_take_half_a_byte_each():
    assert pack_rows(numbers(Codes.Q4, 3, 256, 2)).shape == (3, 2 * (8 + 64))
    assert pack_rows(numbers(Codes.Q8, 3, 256, 2)).shape == (3, 2 * (8 + 128))


@pytest.mark.parametrize(("size", "k"), [(40, 65), (8, 32), (0, 32), (41, 64), (64, 64), (33, 64)])
def test_rows_that_fit_no_format_are_refused(size: int, k: int):
    with pytest.raises(ValueError, match=f"{size} bytes cannot hold {k} numbers"):
        format_of(torch.empty(2, size, dtype=torch.uint8), k)


def test_groups_are_whole_chunks():
    assert can_pack(96, 3) and can_pack(37, 1)
    assert not can_pack(96, 2) and not can_pack(80, 5) and not can_pack(0, 1)
