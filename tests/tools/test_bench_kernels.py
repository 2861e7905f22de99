"""`hf-paged bench kernels` times what it says: the operators compute what torch does, and floors follow from sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_paged.configuration import PagedConfig
from hf_paged.errors import NotSupportedError
from hf_paged.kernels.cpu import library, peaks
from hf_paged.tools.bench import kernels
from hf_paged.tools.bench import session as session_module
from hf_paged.tools.bench.kernel_cases import Case, KernelCases, Sizes
from hf_paged.tools.bench.kernels import Limits, make_cases, make_row, measure
from hf_paged.tools.bench.session import BenchOptions, BenchSession, run_benchmark

TINY = Sizes((1, 3), (2,), ((3, 20), (1, 40)), (3, 32, 5), ((4, 4), (4, 24)), 3, (1, 2), 18)
native = pytest.mark.skipif(not library.load(), reason=library.status().describe())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """Little of everything, and no probe of 512 MiB."""
    monkeypatch.setattr(session_module.BenchSession, "bandwidth", lambda self: 10e9)
    monkeypatch.setattr(kernels, "SIZES", TINY)
    monkeypatch.setattr(kernels, "SAMPLES_PER_RUN", 1)


def options(model: Path, dtype: str = "float32") -> BenchOptions:
    return BenchOptions(model=str(model), runs=1, dtype=dtype, config=PagedConfig(cpu_kv_cache_gib=0.05))


def cases_of(model: Path, dtype: str = "float32") -> tuple[BenchSession, KernelCases]:
    session = BenchSession(options(model, dtype))
    return session, make_cases(session)


@native
def test_every_operator_is_reported_with_its_floor(tiny_checkpoint: Path):
    report = run_benchmark("kernels", options(tiny_checkpoint, "bfloat16"))
    names = " ".join(row["system"] for row in report.rows)
    for part in ("q, k, v", "gate, up", "down", "LM head", "decode", "shared", "prefill", "norm", "rope", "silu"):
        assert part in names
    for part in ("greedy", "top-k", "2 layers"):
        assert part in names
    for row in report.rows:
        assert row["seconds"] >= row["best_seconds"] > 0 and row["floor_share"] > 0
        assert (row["bytes_per_second"] is None) == (row["bound"] == "arithmetic")
    assert report.details["peak_flops"][report.details["instruction"]] > 1e9
    json.dumps(report.to_dict())


@native
@pytest.mark.parametrize("names", ["linear q, k, v", "linear o", "linear gate", "LM head", "decode, 3 x 20", "prefill"])
def test_torch_beside_an_operator_computes_the_same(names: str, tiny_checkpoint: Path):
    session, cases = cases_of(tiny_checkpoint)
    try:
        chosen = [case for case in cases if names in case.name]
        for case in chosen:
            for ours, theirs in zip(case.calls, case.torch_calls, strict=True):
                result, expected = ours(), theirs()
                if isinstance(expected, list):
                    expected = torch.cat(expected, -1)
                if isinstance(result, tuple):  # attention: blocks of a request lie anywhere, torch's in order
                    result, expected = result[0].abs().sum(), expected.abs().sum()
                    assert 0.3 < float(result / expected) < 3
                else:
                    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        assert chosen
    finally:
        session.close()


@native
def test_a_layer_is_counted_once_for_each_of_its_weights(tiny_checkpoint: Path):
    session, cases = cases_of(tiny_checkpoint)
    hidden, heads, kv_heads, head_dim, wide = 32, 4, 2, 8, 64
    linears = (heads + 2 * kv_heads) * head_dim * hidden + heads * head_dim * hidden + 3 * hidden * wide
    try:
        one_row = list(cases.linears(1))
        assert sum(case.num_bytes for case in one_row) == 4 * linears
        assert sum(case.operations for case in one_row) == 2 * linears
        assert all(len(case.calls) == 2 for case in one_row), "calls take the layers in turns"
        stack = cases.stack(2)
        kv = 2 * 2 * 18 * kv_heads * head_dim * 2
        assert stack.num_bytes == pytest.approx(4 * (2 * linears + kv), rel=0.02), "norms are small"
    finally:
        session.close()


def test_floors_are_the_longer_of_memory_and_arithmetic():
    limits = Limits(read_bandwidth=1e9, peak_flops=1e12)
    by_memory = make_row(Case("a", (), num_bytes=1e6, operations=1e6), [[2e-3, 1e-3, 4e-3]], limits)
    assert by_memory["bound"] == "memory" and by_memory["floor_seconds"] == pytest.approx(1e-3)
    assert by_memory["seconds"] == 2e-3 and by_memory["floor_share"] == pytest.approx(0.5)
    assert by_memory["bytes_per_second"] == pytest.approx(5e8) and by_memory["speedup"] is None
    by_operations = make_row(Case("b", (), num_bytes=1e3, operations=1e9), [[2e-3], [6e-3]], limits)
    assert by_operations["bound"] == "arithmetic" and by_operations["flops"] == pytest.approx(5e11)
    assert by_operations["speedup"] == pytest.approx(3)


def test_calls_are_made_in_turns_and_those_of_torch_between_them():
    made: list[str] = []
    calls = [lambda name=name: made.append(name) for name in "ab"]
    samples = measure(Case("x", calls, [lambda: made.append("t")]), 3)
    assert [len(each) for each in samples] == [3, 3]
    assert made[:3] == ["a", "b", "t"], "one call for whatever happens only once, one to learn how long it takes"
    ours = [name for name in made if name != "t"]
    assert all(first != second for first, second in zip(ours, ours[1:], strict=False))


def test_without_native_operators_there_is_nothing_to_measure(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "load", lambda: False)
    with pytest.raises(NotSupportedError, match="nothing to measure"):
        make_cases(BenchSession(options(tiny_checkpoint)))
    with pytest.raises(NotSupportedError, match="native operators"):
        peaks.used_instruction(torch.bfloat16)
