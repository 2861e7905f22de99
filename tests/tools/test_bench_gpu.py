"""The script for a GPU, on a CPU: how parts are run, what targets are made of, and a dry run of everything."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import conductor, run
from benchmarks.gpu.busy import MARGIN, share_of
from benchmarks.gpu.conductor import Conductor, fit
from benchmarks.gpu.hardware import Copies
from benchmarks.gpu.parts import essentials
from benchmarks.gpu.problems import PagedProblem, Problem
from benchmarks.gpu.rivals import flex_attention, sdpa
from benchmarks.gpu.settings import PARTS, PLOT_SECONDS, TOTAL_SECONDS, Deadline, Part, Run, Settings
from benchmarks.gpu.shared_prompt import WAYS
from benchmarks.gpu.targets import all_targets

ROOT = Path(__file__).parents[2]
# What a part does is in its name.
FAKE_CHILD = """
import json, os, sys, time
def tell(**words): print(json.dumps(words), flush=True)
known = sorted(json.load(open(sys.argv[2]))["parts"])
for word in sys.argv[3:]:
    name, _, seconds = word.partition(":")
    tell(part=name, begun=True)
    tell(part=name, row={"process": os.getpid(), "seconds": float(seconds), "known": known})
    if name == "crashes":
        os.abort()
    if name == "hangs":
        time.sleep(60)
    if name == "raises":
        tell(part=name, error="ValueError: no")
    tell(part=name, ended=True, seconds=0.1)
    if name == "breaks":
        tell(part=name, error="the device does not answer any more")
        os._exit(3)
"""


@pytest.fixture
def conduct(tmp_path, monkeypatch):
    """Runs parts of the fake child and returns what became of each."""
    (tmp_path / "child.py").write_text(FAKE_CHILD)
    monkeypatch.setattr(conductor, "CHILD", (str(tmp_path / "child.py"),))
    monkeypatch.setattr(conductor, "GRACE_SECONDS", 0.2)

    def run_parts(*names: str, seconds: float = 30.0, each: float = 5.0) -> dict[str, Any]:
        path = tmp_path / "results.json"
        boss = Conductor(Settings("cpu", True), path, seconds + PLOT_SECONDS, lambda line: None)
        found = boss.run([Part(name, each) for name in names])
        assert json.loads(path.read_text()) == found, "what is returned was written"
        return found["parts"]

    return run_parts


def process_of(part: dict[str, Any]) -> int:
    return part["rows"][0]["process"]


def test_parts_run_in_one_process_and_keep_their_rows(conduct):
    parts = conduct("a", "b")
    assert [part["error"] for part in parts.values()] == [None, None]
    assert process_of(parts["a"]) == process_of(parts["b"])


@pytest.mark.parametrize(("name", "word"), [("crashes", "ended with status"), ("hangs", "was ended after")])
def test_a_part_that_takes_its_process_with_it_costs_itself(conduct, name, word):
    parts = conduct("a", name, "b", each=1.0)
    assert word in parts[name]["error"] and parts[name]["rows"], "its rows are kept"
    assert parts["b"]["error"] is None and process_of(parts["b"]) != process_of(parts["a"])
    assert parts["b"]["rows"][0]["known"] == ["a", name], "a new process is given what is known"


def test_after_an_error_of_the_device_a_new_process_goes_on(conduct):
    parts = conduct("breaks", "b")
    assert "device" in parts["breaks"]["error"]
    assert parts["b"]["error"] is None and process_of(parts["b"]) != process_of(parts["breaks"])


def test_an_exception_in_a_part_is_noted(conduct):
    parts = conduct("raises", "b")
    assert "ValueError" in parts["raises"]["error"] and parts["b"]["error"] is None


def test_a_run_ends_in_time(conduct):
    begin = time.monotonic()
    parts = conduct("hangs", "a", seconds=2.0)
    assert time.monotonic() - begin < 8
    assert parts["a"]["error"] == "no time was left"
    assert sum(part.seconds for part in PARTS) + PLOT_SECONDS <= TOTAL_SECONDS
    assert fit([3, 1], 2) == [1.5, 0.5] and fit([3, 1], 9) == [3, 1]


def test_rows_of_a_part_that_is_cut_off_are_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(conductor, "SECONDS_BETWEEN_WRITES", 0.0)
    path = tmp_path / "results.json"
    boss = Conductor(Settings("cpu", True), path, 9.0, lambda line: None)
    boss._take({"part": "a", "row": {"figure": 1}})
    assert json.loads(path.read_text())["parts"]["a"]["rows"] == [{"figure": 1}]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import time; time.sleep(60)", "was ended after"),
        ("import os; os.abort()", "ended with status -6"),
        ('print(\'{"case": "one", "passed": false, "why": "wrong"}\')', "wrong"),
    ],
)
def test_a_check_that_hangs_or_crashes_costs_itself(tmp_path, monkeypatch, script, why):
    (tmp_path / "python").write_text(f"#!{sys.executable}\n{script}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(essentials.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(essentials, "CHECKS", {"one": None})
    found, total = essentials.run(Run(Settings("cpu", True), Deadline(essentials.MARGIN_SECONDS + 1.5), {}))
    assert found["case"] == "one" and not found["passed"] and why in found["why"]
    assert total["failed_checks"] == 1


def test_the_busy_share_is_that_of_the_union():
    assert share_of([]) is None
    assert share_of([(0, 50), (10, 100)]) == 1.0
    assert share_of([(0, 50), (40, 45), (75, 100)]) == pytest.approx(1 - 25 / (100 * (1 - 2 * MARGIN)))


@pytest.mark.parametrize("problem", [Problem("d", 3, 1, 40, 4, 2, 16), Problem("p", 2, 5, 21, 4, 2, 16)])
def test_rivals_compute_what_the_paged_reference_computes(problem):
    paged = PagedProblem(problem, "cpu", torch.float32, 0, cold_bytes=2 * problem.num_bytes(torch.float32))
    assert len(paged.calls) == 2
    expected = [call() for call in paged.paged_calls(paged.backend("reference"))]
    for rival in (sdpa, flex_attention):
        for call, wanted in zip(rival(paged), expected, strict=True):
            torch.testing.assert_close(call().transpose(1, 2).flatten(0, 1), wanted, rtol=0, atol=1e-5)


def test_the_work_of_a_problem():
    problem = Problem("p", 2, 3, 10, num_heads=4, num_kv_heads=2, head_dim=16)
    assert problem.operations == 4 * 2 * 4 * 16 * (8 + 9 + 10)
    assert problem.num_bytes(torch.bfloat16) == 2 * 2 * 16 * (2 * 10 * 2 + 2 * 3 * 4)


def test_launches_on_another_device_keep_views_of_one_memory_together():
    whole = torch.arange(12.0).view(3, 4)
    row, column, alone = whole[1], whole[:, 2], torch.zeros(2)
    # The CPU stands for a GPU: what counts is that the memory is another.
    copies = Copies("cpu")
    there_row, there_column, there_alone = map(copies.moved, (row, column, alone))
    assert copies.moved(None) is None and copies.moved(3) == 3
    there_row += 100
    there_alone += 1
    assert there_column.tolist() == [2, 106, 10], "two views see what is written through one"
    assert column.tolist() == [2, 6, 10], "nothing is written here before the launch is over"
    copies.take_back()
    assert column.tolist() == [2, 106, 10] and alone.tolist() == [1, 1]
    assert there_row.data_ptr() % 16 == row.data_ptr() % 16, "as well aligned as it was"


def test_targets_are_unproven_until_measured_and_take_the_worst():
    assert {target.is_met for target in all_targets({})} == {None}
    decode = {"kind": "decode", "system": "hf_paged", "seconds": 1.0, "num_requests": 32, "context": 2048}
    prefill = {"kind": "prefill", "problem": "p", "num_requests": 1, "context": 9}
    rows: dict[str, list[dict[str, Any]]] = {
        "attention": [
            decode | {"bandwidth_share": 0.9, "problem": "a"},
            decode | {"bandwidth_share": 0.8, "problem": "b"},
            decode | {"bandwidth_share": 0.1, "problem": "c", "system": "sdpa"},
            prefill | {"system": "sdpa", "seconds": 0.95},
            prefill | {"system": "hf_paged", "seconds": 1.0},
        ],
        "large_model": [
            {"mode": "graphs", "over_floor": 1.1, "busy_share": 0.98},
            {"mode": "graphs", "over_floor": 1.2},
            {"mode": "eager", "over_floor": 5.0, "busy_share": 0.2},
            {"system": "hf_paged", "requests": 256, "output_tokens_per_s": 100.0},
            {"system": "hf_paged", "requests": 64, "output_tokens_per_s": 10.0},
            {"system": "generate_batch", "requests": 256, "output_tokens_per_s": 20.0},
            {"system": "generate, one by one", "requests": 256, "output_tokens_per_s": 2.0},
        ],
        "memory": [{"first_step_share": -0.5}, {"memory_share": -0.03}, {"sleep_failures": 0}],
        "essentials": [{"passed": True}, {"failed_checks": 0}],
        "parity": [{"worst_regret": 1.0, "passed": False}],
    }
    found = {target.what: target for target in all_targets(rows)}
    decoding = found["decoding 32 and more x 2k and more: share of copy"]
    assert decoding.figure == 0.8 and decoding.is_met is False
    assert found["prefill against SDPA's flash kernel"].is_met
    assert found["8B: tokens/s against generate_batch"].figure == 5.0
    assert found["8B: tokens/s against generate, one by one"].figure == 50.0
    assert found["parity failures"].is_met is False
    assert found["essential checks that fail"].is_met and found["sleeps that fail"].is_met
    memory = found["memory used beside the plan, share of all"]
    assert memory.figure == 0.03 and memory.is_met is False, "less than was promised is missed, too"
    assert found["8B: decode step over what memory allows"].figure == 1.2, (
        "an engine without graphs is beside the point"
    )
    assert found["8B: share of time in which the GPU is busy"].figure == 0.98
    assert run.exit_code({"a": {"error": None}}, list(found.values())) == 1


def test_parts_have_more_time_where_more_was_given():
    few = [Part("a", 10), Part("b", 30)]
    assert run.stretched(few, 86.0) == [Part("a", 20), Part("b", 60)]
    assert run.stretched(few, 30.0) == few, "less is shared out as it is spent"


def test_without_a_gpu_the_reason_is_given(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_executes_every_part(tmp_path):
    pytest.importorskip("triton")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--dry-run", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "bench_gpu.json").read_text())
    assert list(results["parts"]) == [part.name for part in PARTS]
    assert all(part["rows"] for part in results["parts"].values())
    unavailable = [row for part in results["parts"].values() for row in part["rows"] if "unavailable" in row]
    assert {row["system"] for row in unavailable} <= {"flash_attention"}, unavailable
    rows = {name: part["rows"] for name, part in results["parts"].items()}
    steps = [row for row in rows["large_model"] if "step_seconds" in row]
    assert {row["mode"]: row["replays"] > 0 for row in steps} == {"graphs": True, "eager": False}
    (start,) = [row for row in rows["large_model"] if "start_seconds" in row]
    assert start["graphs"] == start["wanted_graphs"] > 0 and start["capture_seconds"] > 0
    assert [row["way"] for row in rows["large_model"] if "way" in row] == list(WAYS)
    assert all(row["passed"] for row in rows["essentials"] if "case" in row)
    assert results["targets"] and (tmp_path / "attention.png").exists()
