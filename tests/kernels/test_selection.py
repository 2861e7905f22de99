from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from hf_paged.errors import UnknownNameError, UnsupportedAttentionError
from hf_paged.kernels import BACKENDS, AttentionSpec, PagedAttentionBackend, describe_backends, select_backend

SPEC = AttentionSpec(9, 3, 64, 64, torch.bfloat16, "cpu", 16)


@pytest.fixture
def without_native(monkeypatch):
    """As on a machine for which there is no native library."""
    native = BACKENDS.get("native_cpu")
    monkeypatch.setattr(native, "unavailable_reason", classmethod(lambda cls: "has no native library here"))


def test_the_fast_torch_backend_is_the_default_on_a_cpu_without_native_code(without_native):
    assert select_backend(SPEC).name == "torch_sdpa"
    with pytest.raises(UnsupportedAttentionError, match="has no native library here"):
        select_backend(SPEC, "native_cpu")


def test_native_code_is_the_default_where_there_is_any(monkeypatch):
    native = BACKENDS.get("native_cpu")
    monkeypatch.setattr(native, "unavailable_reason", classmethod(lambda cls: None))
    assert select_backend(SPEC).name == "native_cpu"
    for change in ({"device_type": "cuda"}, {"dtype": torch.float64}, {"features": frozenset({"batch_invariant"})}):
        assert select_backend(dataclasses.replace(SPEC, **change)).name != "native_cpu"


def test_the_native_library_is_not_asked_for_where_it_cannot_serve(monkeypatch):
    def unavailable_reason(cls):
        raise AssertionError("this may compile for a minute")

    monkeypatch.setattr(BACKENDS.get("native_cpu"), "unavailable_reason", classmethod(unavailable_reason))
    assert select_backend(dataclasses.replace(SPEC, device_type="xpu")).name == "torch_sdpa"


def test_a_backend_knows_what_it_was_made_for():
    assert select_backend(SPEC, "reference").spec == SPEC


def test_a_feature_that_only_the_reference_has_selects_it():
    spec = dataclasses.replace(SPEC, features=frozenset({"batch_invariant", "window"}))
    assert select_backend(spec).name == "reference"


def test_a_name_is_honoured_or_refused_with_its_reason():
    assert select_backend(SPEC, "reference").name == "reference"
    spec = dataclasses.replace(SPEC, features=frozenset({"batch_invariant"}))
    with pytest.raises(UnsupportedAttentionError, match=r"torch_sdpa.*has no batch_invariant.*can: reference"):
        select_backend(spec, "torch_sdpa")


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(UnknownNameError, match=r"'flash'; available: reference, torch_sdpa"):
        select_backend(SPEC, "flash")


def test_an_unavailable_name_says_why(monkeypatch):
    monkeypatch.setitem(BACKENDS._unavailable, "flash", "it is not installed")
    with pytest.raises(UnknownNameError, match=r"unavailable: .*flash \(it is not installed\)"):
        select_backend(SPEC, "flash")


def test_when_nothing_fits_every_backend_says_what_it_lacks():
    spec = dataclasses.replace(SPEC, dtype=torch.int8)
    with pytest.raises(UnsupportedAttentionError) as error:
        select_backend(spec)
    for name in ("reference", "torch_sdpa", "triton"):
        assert f"{name} (" in str(error.value)
    assert "has no torch.int8" in str(error.value)


def test_priority_decides_and_a_reserved_device_is_not_automatic(monkeypatch, without_native):
    class Eager(PagedAttentionBackend):
        name = "eager"
        priority = 99
        capabilities = BACKENDS.get("reference").capabilities

        def attend(self, *arguments, **settings):
            raise NotImplementedError

    monkeypatch.setitem(BACKENDS._entries, "eager", Eager)
    assert select_backend(SPEC).name == "eager"
    Eager.automatic_devices = frozenset({"cuda"})
    assert select_backend(SPEC).name == "torch_sdpa"
    assert select_backend(SPEC, "eager").name == "eager"
    described = {entry.name: entry for entry in describe_backends(SPEC)}
    assert described["eager"].fits and "only when asked for" in described["eager"].reason
    monkeypatch.setattr(Eager, "unavailable_reason", classmethod(lambda cls: "needs a coffee"))
    with pytest.raises(UnsupportedAttentionError, match="needs a coffee"):
        select_backend(SPEC, "eager")


def test_descriptions_cover_every_backend_in_the_order_of_preference(without_native):
    entries = describe_backends(SPEC)
    assert [entry.name for entry in entries if entry.fits] == ["torch_sdpa", "reference"]
    assert all(entry.reason for entry in entries if not entry.fits)
    assert "triton" in [entry.name for entry in entries]


def test_importing_the_kernels_imports_no_triton_and_needs_none():
    code = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
sys.modules["triton"] = None
from hf_paged.kernels import BACKENDS, select_backend
assert "torch_sdpa" in BACKENDS and "triton" not in BACKENDS
assert "not installed" in dict(BACKENDS.unavailable_items())["triton"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    code = "import sys, hf_paged.kernels; assert not any(m.startswith('triton') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
