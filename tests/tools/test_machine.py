"""The machine describes itself, and where it cannot, it says nothing instead of failing."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from hf_paged.tools.bench import machine


def test_a_machine_has_a_name_and_cores():
    info = machine.machine_info()
    assert info.processor and info.num_cores >= 1 and info.num_threads == torch.get_num_threads()
    assert info.processor in info.describe()


def test_bandwidth_is_positive_and_the_better_kind_of_page_counts():
    bandwidth = machine.measure_bandwidth(num_bytes=8 << 20, repeats=1)
    assert bandwidth.ordinary_pages > 0
    assert bandwidth.best >= bandwidth.ordinary_pages
    assert "GB/s" in bandwidth.describe()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_counters_grow_with_what_is_touched():
    before = machine.resident_bytes()
    buffer = mmap.mmap(-1, 64 << 20)  # fresh pages; an allocator might hand out what an earlier test touched
    torch.frombuffer(buffer, dtype=torch.uint8).fill_(1)
    after = machine.resident_bytes()
    assert before is not None and after is not None
    assert after - before > 32 << 20


@pytest.mark.skipif(not machine._grants_huge_pages(), reason="no huge pages here")
def test_a_buffer_that_asks_for_huge_pages_is_on_them():
    before = machine.huge_page_bytes()
    buffer = machine._buffer(64 << 20, "MADV_HUGEPAGE")
    after = machine.huge_page_bytes()
    assert before is not None and after is not None
    assert after - before >= 32 << 20
    del buffer


def test_without_linux_files_the_counters_are_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_read", lambda path: None)
    assert machine.huge_page_bytes() is None
    assert machine.resident_bytes() is None
    info = machine.machine_info()
    assert info.processor and info.instruction_sets == []


def test_without_memory_advice_only_ordinary_pages_are_measured(monkeypatch: pytest.MonkeyPatch):
    for name in ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE"):
        monkeypatch.delattr(machine.mmap, name, raising=False)
    bandwidth = machine.measure_bandwidth(num_bytes=1 << 20, repeats=1)
    assert bandwidth.huge_pages is None and bandwidth.best == bandwidth.ordinary_pages
