"""How a model is looked at when it is loaded. tests/generation/test_engine.py has what is found."""

from __future__ import annotations

import pytest
import torch

from hf_paged.generation import probe


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="threads cannot be set after they have run")
def test_small_models_are_looked_at_by_one_thread_and_large_ones_by_all(three_threads, monkeypatch):
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError), probe.one_thread_if_small(model):
        assert torch.get_num_threads() == 1
        raise ValueError
    assert torch.get_num_threads() == 3
    monkeypatch.setattr(probe, "_SMALL_MODEL", 4 * 4 * 4)
    with probe.one_thread_if_small(model):
        assert torch.get_num_threads() == 3
