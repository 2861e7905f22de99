from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from hf_paged.errors import UnsupportedAttentionError
from hf_paged.kernels import BACKENDS, AttentionSpec, select_backend
from hf_paged.kernels.triton import device

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

SPEC = AttentionSpec(8, 2, 64, 64, torch.bfloat16, "cuda", 16)


@pytest.fixture
def gpu(monkeypatch):
    """As on a machine with a GPU of the newest kind."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
    return monkeypatch


def test_a_recent_gpu_with_a_recent_triton_is_enough(gpu):
    assert device.unavailable_reason() is None
    assert select_backend(SPEC).name == "triton"


def test_without_a_gpu_the_next_backend_serves_and_the_reason_is_told(gpu):
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    assert select_backend(SPEC).name == "torch_sdpa"
    with pytest.raises(UnsupportedAttentionError, match="needs a GPU, and torch sees none"):
        select_backend(SPEC, "triton")


def test_an_old_gpu_or_an_old_triton_is_refused_with_its_version(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "capability 8.0 or more, not 7.5" in str(device.unavailable_reason())
    gpu.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    gpu.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.5.1"))
    assert "Triton 3.6 or newer, not 3.5.1" in str(device.unavailable_reason())
    gpu.setitem(sys.modules, "triton", None)
    assert "cannot be imported" in str(device.unavailable_reason())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 8}, r"block size of \[16, 32, 64, 128\], not 8"),
        ({"key_dim": 320}, "heads of up to 256, not 320"),
        ({"dtype": torch.float64}, "no torch.float64"),
        ({"num_query_heads": 71, "num_kv_heads": 1, "key_dim": 256}, "no room for 71 query heads to a K/V head of 256"),
        ({"features": frozenset({"batch_invariant"})}, "no batch_invariant"),
        ({"device_type": "xpu"}, "not on xpu"),
    ],
)
def test_what_the_kernels_lack_is_declared(change, reason):
    import dataclasses

    with pytest.raises(UnsupportedAttentionError, match=reason):
        select_backend(dataclasses.replace(SPEC, **change), "triton")


def test_the_backend_is_known_by_what_it_declares():
    backend = BACKENDS.get("triton")
    assert backend.capabilities.features >= {"window", "softcap", "sinks", "alibi", "lse"}
    assert backend.capabilities.max_head_dim == 256
