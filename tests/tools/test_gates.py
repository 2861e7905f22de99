"""What `make gates` says of machine code that is as it should be, and of code that is not."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gates import __main__ as gates
from benchmarks.gates import baseline, processes, report, worker
from benchmarks.gates.architectures import ARCHITECTURES
from benchmarks.gates.checks import violations
from benchmarks.gates.machine_code import figures_of_amdgcn, figures_of_sass
from hf_paged.kernels.triton.variant import KernelVariant

SASS = """
	.headerflags	@"EF_CUDA_SM90"
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.128 [R9], desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.64 [R9], desc[UR4][R2.64] ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/                   STL [R1+0x8], R5 ;
        /*0060*/                   EXIT ;
        /*0070*/                   NOP ;
"""
USAGE = "Function kernel:\n  REG:168 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:600"
AMDGCN = """
kernel:
	s_load_dwordx2 s[0:1], s[4:5], 0x0
	global_load_dwordx4 v[2:5], v[0:1], off
	global_load_dword v9, v[0:1], off
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]
	s_endpgm
    .private_segment_fixed_size: 12
    .sgpr_spill_count: 4
    .vgpr_count:     118
    .vgpr_spill_count: 3
"""
GOOD = {"instructions": 1000, "registers": 128, "shared": 65536, "stack": 0, "spills": 0}
GOOD |= {"tensor_core": 16, "wide_loads": 8}


def make_row(target: str = "sm_90", **changed: Any) -> dict[str, Any]:
    row = {"name": "attention", "target": target, "version": "3.6", "has_dot": True, "wide_loads": True}
    return row | {"figures": GOOD | changed}


def test_figures_of_an_nvidia_kernel():
    figures = figures_of_sass(SASS, USAGE, shared=4096)
    assert figures.to_dict() == {
        "instructions": 7,
        "registers": 168,
        "shared": 4096,
        "stack": 16,
        "spills": 1,
        "tensor_core": 1,
        "wide_loads": 2,
    }


def test_figures_of_an_amd_kernel():
    figures = figures_of_amdgcn(AMDGCN, shared=4096)
    assert figures.to_dict() == {
        "instructions": 5,
        "registers": 118,
        "shared": 4096,
        "stack": 12,
        "spills": 3,
        "tensor_core": 1,
        "wide_loads": 1,
    }


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (make_row(stack=16), "stack"),
        (make_row(spills=2), "spills"),
        (make_row(tensor_core=0), "tensor cores"),
        (make_row(wide_loads=0), "128 bits"),
        (make_row("sm_120", shared=100 * 1024), "101,376 is the most"),
        (make_row("gfx942", shared=65 * 1024), "65,536 is the most"),
        (make_row(instructions=1160), "+16%"),
        (make_row(instructions=840), "-16%"),
        ({**make_row(), "figures": None, "error": "no such type"}, "does not compile: no such type"),
    ],
)
def test_each_violation_has_a_line(row, words):
    found = list(violations(row, 1000))
    assert len(found) == 1 and words in found[0]


def test_a_kernel_as_it_should_be_has_no_violation():
    for target in ARCHITECTURES:
        assert not list(violations(make_row(target, instructions=1149), 1000))
    plain = make_row(tensor_core=0, wide_loads=0) | {"has_dot": False, "wide_loads": False}
    assert not list(violations(plain, None))


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "share"),
    [
        ("sm_80", 32, 0, 4, 1.0),
        ("sm_80", 128, 0, 4, 0.25),
        ("sm_80", 32, 80 * 1024, 4, 0.125),  # two programs of 81 KiB in 164
        ("sm_90", 168, 113 * 1024, 8, 0.125),  # registers leave room for one program of eight warps
        ("gfx942", 128, 0, 4, 0.5),
        ("gfx942", 64, 64 * 1024, 4, 0.125),
    ],
)
def test_occupancy(target, registers, shared, warps, share):
    assert ARCHITECTURES[target].occupancy(registers, shared, warps) == share


def test_only_nvidias_compiler_is_told_how_many_registers_there_are():
    variant = KernelVariant("v", "m:k", {}, {}, num_warps=8, num_stages=2, max_registers=168)
    plain = {"num_warps": 8, "num_stages": 2}
    assert worker.compile_options(variant, ARCHITECTURES["sm_90"]) == {**plain, "maxnreg": 168}
    assert worker.compile_options(variant, ARCHITECTURES["gfx942"]) == plain
    without = dataclasses.replace(variant, max_registers=None)
    assert worker.compile_options(without, ARCHITECTURES["sm_90"]) == plain


def test_what_is_known_of_a_kernel_is_found_by_every_process():
    """Sets have another order in each process; the source's hash must not depend on it."""
    pytest.importorskip("triton")
    variant = next(v for v in worker.find_variants().values() if len(v.divisible) > 4)
    places = [place for (place,) in worker.source_of(variant).attrs]
    assert places == sorted(places) and len(places) == len(variant.divisible)


VARIANTS = [
    {"name": "decode a", "kernel": "attention:kernel", "has_dot": True, "targets": ["sm_80", "sm_90"]},
    {"name": "decode b", "kernel": "attention:kernel", "has_dot": True, "targets": ["sm_80"]},
    {"name": "merge", "kernel": "merge:kernel", "has_dot": False, "targets": ["sm_80", "sm_90"]},
]


def test_what_is_compiled():
    everything = gates.choose(VARIANTS, ["sm_80", "sm_90"])
    assert len(everything) == 5 and {"variant": "decode b", "target": "sm_90"} not in everything
    assert len(gates.choose(VARIANTS, ["sm_80", "sm_90"], only="merge")) == 2
    assert len(gates.choose(VARIANTS, ["sm_90"], only="attention:")) == 1


def test_a_sample_holds_every_kernel_for_every_architecture():
    common = {"kernel": "k:decode", "has_dot": True, "targets": list(ARCHITECTURES)}
    many = [{"name": f"decode {i}", **common} for i in range(20)]
    jobs = gates.choose([*many, VARIANTS[2]], list(ARCHITECTURES), sample=True)
    decodes = [job for job in jobs if job["variant"] != "merge"]
    assert len(decodes) == gates.SAMPLE[True] * len(ARCHITECTURES) and len(jobs) == len(decodes) + 2
    assert len({job["variant"] for job in decodes}) > gates.SAMPLE[True], "architectures get different configurations"


def test_the_baseline_is_kept_where_a_run_was_partial(tmp_path):
    path = tmp_path / "baseline.json"
    baseline.record([make_row("sm_80"), make_row("sm_90", instructions=7)], path)
    baseline.record([make_row("sm_80", instructions=8)], path, keep=True)
    assert baseline.read(path) == {"attention": {"3.6": {"sm_80": 8, "sm_90": 7}}}
    baseline.record([make_row("sm_80", instructions=9)], path)
    assert json.loads(path.read_text()) == {"attention": {"3.6": {"sm_80": 9}}}
    assert gates.is_partial(gates.parse(["--targets", "sm_80"])) and not gates.is_partial(gates.parse([]))


def test_the_table_of_figures_has_a_line_for_each_kernel_and_version(tmp_path):
    rows = [make_row("sm_80") | {"occupancy": 0.25}, make_row("gfx942") | {"occupancy": 0.5, "version": "3.9"}]
    report.write_figures(rows, tmp_path / "figures.md")
    lines = (tmp_path / "figures.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| attention")] == [
        "| attention | 128, 64.0, 25% |  |  |  |  |  |",
        "| attention |  |  |  |  |  | 128, 64.0, 50% |",
    ]
    assert "## Triton 3.6" in lines and "## Triton 3.9" in lines


def test_a_kernel_that_nobody_recorded_is_a_violation_and_a_new_triton_is_not():
    counts = {"attention": {"3.6": {"sm_80": 1000}}}
    assert "not recorded" in gates.missing(make_row("sm_90"), counts)[0]
    assert gates.missing(make_row("sm_80"), counts) == []
    assert gates.missing(make_row("sm_90") | {"version": "3.10"}, counts) == []


def test_only_a_sample_is_compiled_where_no_kernel_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(baseline, "is_of_these_sources", lambda: True)
    assert gates.parse(["--sample-if-unchanged"]).sample and not gates.parse([]).sample
    monkeypatch.setattr(baseline, "is_of_these_sources", lambda: False)
    assert not gates.parse(["--sample-if-unchanged"]).sample and gates.parse(["--sample"]).sample


def test_any_change_of_a_kernel_is_a_change_of_the_sources(tmp_path):
    (tmp_path / "inner").mkdir()
    digests = []
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("inner/b.py", ""), ("inner/c.py", "")):
        (tmp_path / name).write_text(text)
        digests.append(baseline.sources_digest(tmp_path))
    assert len(set(digests)) == 4
    (tmp_path / "figures.md").write_text("no source")
    assert baseline.sources_digest(tmp_path) == digests[-1]


FAKE_WORKER = """
import json, os, sys
for line in sys.stdin:
    job = json.loads(line)
    if job["target"] == "crash":
        os.abort()
    print(json.dumps({"figures": {}, "process": os.getpid()}), flush=True)
"""


def test_a_compiler_that_crashes_costs_one_compilation(tmp_path, monkeypatch):
    (tmp_path / "fake_worker.py").write_text(FAKE_WORKER)
    monkeypatch.setattr(processes, "WORKER", (str(tmp_path / "fake_worker.py"),))
    monkeypatch.setattr(processes, "FOLDER", tmp_path)
    triton = SimpleNamespace(version="3.6", variables=lambda: {})
    jobs = [{"variant": "v", "target": target} for target in ("a", "crash", "b", "c")]
    rows = processes.compile_all(jobs, triton, 1, lambda row: None)
    assert [row["target"] for row in rows] == ["a", "crash", "b", "c"]
    assert "ended with status" in rows[1]["error"] and all("figures" in row for row in (rows[0], *rows[2:]))
    assert rows[0]["process"] != rows[2]["process"] == rows[3]["process"]
