"""Runs products with packed rows in Triton's interpreter against float64. A program, see `interpreted.py`."""

from __future__ import annotations

import itertools
import json

import torch

from hf_paged.kernels.packed_rows import Codes, dequantized, pack_rows
from hf_paged.kernels.triton.packed_linear import packed_linear
from tests.kernels.test_packed_rows import numbers
from tests.kernels.triton import interpreter  # noqa: F401 - mends the interpreter's bfloat16

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def case(kind: Codes, dtype: torch.dtype, tokens: int, size: int, num_groups: int, bias: bool) -> tuple[float, float]:
    weight = pack_rows(numbers(kind, 70, size, num_groups))
    x = torch.randn(tokens, size + 3).to(dtype)[:, :size]
    added = torch.randn(70).to(dtype) if bias else None
    expected = torch.nn.functional.linear(
        x.double(), dequantized(weight, size).double(), None if added is None else added.double()
    )
    error = (packed_linear(x, weight, added).double() - expected).abs().amax(1) / expected.abs().amax(1)
    return float(error.max()), ROUNDING[dtype]


if __name__ == "__main__":
    torch.set_num_threads(1)
    shapes = ((1, 128, 2), (3, 192, 6), (17, 256, 2), (5, 96, 1), (2, 45, 1), (70, 64, 1))
    for kind, dtype in itertools.product(Codes, ROUNDING):
        for place, (tokens, size, num_groups) in enumerate(shapes):
            if kind is Codes.W8A8 and num_groups > 1:
                continue
            torch.manual_seed(place)
            error, allowed = case(kind, dtype, tokens, size, num_groups, bias=bool(place % 2))
            name = f"{kind.name}, {dtype}, {tokens} x {size} in {num_groups}"
            print(json.dumps({"name": name, "error": min(error, 1e9), "allowed": allowed}), flush=True)
