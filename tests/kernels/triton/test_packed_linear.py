from __future__ import annotations

import importlib.util

import pytest
import torch

from hf_paged.errors import NotSupportedError
from tests.kernels.triton.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_products_with_packed_rows_agree_with_float64():
    results = run_interpreted("-m", "tests.kernels.triton.run_packed_linear")
    assert len(results) >= 60
    assert not [result for result in results if not result["error"] <= result["allowed"]]


def test_what_does_not_fit_is_refused():
    from hf_paged.kernels.triton.packed_linear import packed_linear

    weight = torch.zeros(4, 40, dtype=torch.uint8)
    for x, rows, words in (
        (torch.zeros(2, 64, dtype=torch.float64), weight, "float64"),
        (torch.zeros(2, 65), weight, "40 bytes cannot hold 65 numbers"),
        (torch.zeros(2, 64), weight.t(), "contiguous"),
    ):
        with pytest.raises(NotSupportedError, match=words):
            packed_linear(x, rows)
