"""Benchmarks that measure in processes of their own: memory of a served model, and the time of a start."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from hf_paged.configuration import PagedConfig
from hf_paged.tools.bench import session as session_module
from hf_paged.tools.bench.fresh_process import MeasurementError, measure_in_fresh_process
from hf_paged.tools.bench.machine import peak_resident_bytes, resident_bytes, touched_bytes
from hf_paged.tools.bench.memory import describe_served, measure_served
from hf_paged.tools.bench.session import BenchOptions, BenchSession, run_benchmark

MIB = 1 << 20


def options(model: Path) -> BenchOptions:
    config = PagedConfig(cpu_kv_cache_gib=0.05)
    return BenchOptions(model=str(model), runs=1, count=2, dtype="float32", config=config)


def test_a_start_is_timed_beside_transformers(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_module.BenchSession, "bandwidth", lambda self: 10e9)
    report = run_benchmark("start", options(tiny_checkpoint))
    assert [row["system"] for row in report.rows] == ["hf_paged", "transformers"]
    for row in report.rows:
        assert row["seconds"] == pytest.approx(row["load_seconds"] + row["first_token_seconds"])
        assert row["load_seconds"] > 0 and row["first_token_seconds"] > 0 and row["cpu_seconds"] > 0
    assert report.details["added_seconds"] == pytest.approx(report.rows[0]["seconds"] - report.rows[1]["seconds"])


def test_a_process_that_serves_takes_weights_pool_and_little_else(tiny_checkpoint: Path):
    served = measure_served(BenchSession(options(tiny_checkpoint)))
    if served["imported_bytes"] is None or served["touched_pool_bytes"] is None:
        assert describe_served(served) == []
        return
    assert served["weight_bytes"] > 0
    assert 0 < served["touched_pool_bytes"] <= 0.06 * 2**30
    parts = ("imported_bytes", "weight_bytes", "touched_pool_bytes", "other_bytes")
    assert sum(served[part] for part in parts) == served["served_bytes"]
    assert served["other_bytes"] < 150 * MIB
    text = "\n".join(describe_served(served))
    assert "after imports" in text and "while loading" in text


def test_a_process_that_fails_says_why():
    with pytest.raises(MeasurementError, match="no_such_process ended with 1: .*No module named"):
        measure_in_fresh_process("no_such_process", {})


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells how much memory a process has")
def test_only_touched_memory_counts():
    resident = resident_bytes()
    # Straight from the system: what `torch.empty` gives may be memory that another test has touched and freed.
    untouched = torch.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=torch.uint8)
    touched = touched_bytes(untouched)
    if touched == untouched.nbytes:
        pytest.skip("this system says that all memory is touched")
    assert touched is not None and touched < 4 * MIB
    untouched[: 32 * MIB].fill_(1)
    assert 32 * MIB <= touched_bytes(untouched) <= 36 * MIB  # type: ignore[operator]
    assert resident_bytes() >= resident + 30 * MIB  # type: ignore[operator]
    assert peak_resident_bytes() >= resident_bytes()  # type: ignore[operator]
