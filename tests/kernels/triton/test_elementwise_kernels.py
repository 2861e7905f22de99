"""Norms, activations, rope with the store of K/V, and copies of blocks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from hf_paged.errors import NotSupportedError
from hf_paged.kernels.triton.layer_cache import LayerCache
from tests.kernels.triton.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What the cases came to; they share a process, which takes longer to start than most of them."""
    return run_interpreted("-m", "tests.kernels.triton.run_operator_cases")


@pytest.mark.parametrize(("kernel", "least"), [("norms", 14), ("activations", 16), ("cache", 21)])
def test_kernels_agree_with_float64(results, kernel, least):
    cases = [result for result in results if result["kernel"] == kernel]
    assert len(cases) >= least
    assert not [result for result in cases if not result["error"] <= result["allowed"]]


def heads(num_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(3, num_heads, dim, dtype=dtype)


def blocks(num_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(2, num_heads, 16, dim, dtype=dtype)


def test_what_kernels_cannot_do_they_refuse():
    from hf_paged.kernels.cpu.rope import RopeLayout
    from hf_paged.kernels.triton.activations import activation, gated_activation
    from hf_paged.kernels.triton.cache import BlockCopies, rope_store
    from hf_paged.kernels.triton.norms import MAX_SIZE, Norm, add_normalized, normalized

    x, slots = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    query, key, value = heads(4, 8), heads(2, 8), heads(2, 8)
    cache = LayerCache(blocks(2, 8), blocks(2, 8))
    angles, layout = (torch.zeros(3, 8), torch.zeros(3, 8)), RopeLayout(8)
    int8 = torch.int8
    for wrong in (
        lambda: activation(x.double(), 1),
        lambda: activation(x, 9),
        lambda: gated_activation(x, x[:, :4], 1),
        lambda: gated_activation(x, x.half(), 1),
        lambda: normalized(x.double(), Norm(1)),
        lambda: normalized(torch.zeros(1, MAX_SIZE + 1), Norm(1)),
        lambda: normalized(x, Norm(1, torch.ones(7))),
        lambda: normalized(x, Norm(1, torch.ones(16)[::2])),
        lambda: add_normalized(x, x[:2], Norm(1)),
        lambda: add_normalized(x, x, Norm(1), other=x[:, :4]),
        lambda: rope_store(query.double(), key, value, angles, layout, cache, slots),
        lambda: rope_store(query, key.half(), value, angles, layout, cache, slots),
        lambda: rope_store(query, key[:2], value, angles, layout, cache, slots),
        lambda: rope_store(query, key, heads(1, 8), angles, layout, cache, slots),
        lambda: rope_store(query, key, value, angles, RopeLayout(16), cache, slots),
        lambda: rope_store(query, key, value, (angles[0], angles[1][:2]), layout, cache, slots),
        lambda: rope_store(query, key, value, (angles[0][:, :3], angles[1][:, :3]), layout, cache, slots),
        lambda: rope_store(query, key, value, angles, layout, LayerCache(blocks(3, 8), blocks(2, 8)), slots),
        lambda: rope_store(query, key, value, angles, layout, cache, slots.int()),
        lambda: rope_store(query, key, value, angles, layout, cache, slots[:2]),
        lambda: rope_store(
            query, key, value, angles, layout, LayerCache(blocks(2, 8, int8), blocks(2, 8, int8)), slots
        ),
        lambda: rope_store(
            query, key, value, angles, layout, LayerCache(blocks(2, 8, int8), blocks(2, 8, int8), x, x), slots
        ),
        lambda: BlockCopies([torch.zeros(4, 3)]),
        lambda: BlockCopies([torch.zeros(4, 4)]).copy(torch.zeros(1, 2, dtype=torch.int64)),
    ):
        with pytest.raises(NotSupportedError):
            wrong()


def test_nothing_is_launched_for_nothing():
    from hf_paged.kernels.triton.activations import activation
    from hf_paged.kernels.triton.cache import BlockCopies, rope_store
    from hf_paged.kernels.triton.norms import Norm, normalized

    none = torch.zeros(0, dtype=torch.int64)
    cache = LayerCache(blocks(2, 8), blocks(2, 8))
    assert activation(torch.zeros(0, 8), 1).shape == (0, 8)
    assert normalized(torch.zeros(0, 8), Norm(1)).shape == (0, 8)
    assert rope_store(heads(4, 8)[:0], heads(2, 8)[:0], heads(2, 8)[:0], None, None, cache, none).shape == (0, 4, 8)
    BlockCopies([torch.zeros(4, 4)]).copy(torch.zeros(2, 0, dtype=torch.int64))
