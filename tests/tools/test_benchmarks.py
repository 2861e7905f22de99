"""Every benchmark runs on a tiny model and reports what it promises; so does the demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_paged.configuration import PagedConfig
from hf_paged.errors import ConfigurationError, InvalidRequestError, UnknownNameError
from hf_paged.generation.stats import EngineStats
from hf_paged.tools.bench import BENCHMARK_HELP
from hf_paged.tools.bench import session as session_module
from hf_paged.tools.bench.baselines import BaselineResult
from hf_paged.tools.bench.engine_run import EngineRun
from hf_paged.tools.bench.machine import Bandwidth
from hf_paged.tools.bench.report import Column, Report, median_row, output_console, percent
from hf_paged.tools.bench.session import BenchOptions, run_benchmark
from hf_paged.tools.bench.workloads import TextTokens, Workload, build_workload
from hf_paged.tools.demo import make_report, run_demo


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """The probe of 512 MiB and the processes that measure are tested elsewhere."""
    monkeypatch.setattr(session_module.BenchSession, "bandwidth", lambda self: 10e9)
    monkeypatch.setattr("hf_paged.tools.bench.step.NUM_WAITING", 1000)
    monkeypatch.setattr("hf_paged.tools.bench.memory.measure_served", lambda session: {"other_bytes": None})


def options(model: Path, **changes) -> BenchOptions:
    config = PagedConfig(cpu_kv_cache_gib=0.05)
    return BenchOptions(**{"model": str(model), "runs": 1, "count": 2, "dtype": "float32", "config": config} | changes)


# Those have tests of their own: they take no requests.
OTHERS = {"kernels", "quantization", "start"}


@pytest.mark.parametrize("name", [name for name in BENCHMARK_HELP if name not in OTHERS])
def test_a_benchmark_reports_its_figures(name: str, tiny_checkpoint: Path):
    report = run_benchmark(name, options(tiny_checkpoint))
    assert report.rows and report.rows[0]["read_bandwidth"] == 10e9
    assert report.details["benchmark"] == name and report.details["machine"]["num_cores"] >= 1
    json.dumps(report.to_dict())
    if name == "step":
        assert {row["system"] for row in report.rows} == {"greedy", "top-k 50, top-p 0.9"}
        assert [row["num_running"] for row in report.rows] == [1, 2, 2]
        assert all(row["floor_seconds"] > 0 and row["overhead_seconds"] > 0 for row in report.rows)
        assert report.details["schedule_long_queue_seconds"] > 0
    else:
        ours = report.rows[0]
        assert ours["system"] == "hf_paged" and ours["output_tokens_per_s"] > 0 and ours["floor_seconds"] > 0
        assert 0 <= ours["kv_waste"] < 0.5 and 0 < ours["kv_bytes_used"] <= ours["kv_bytes_held"]


def test_every_run_of_the_prefix_benchmark_starts_cold_and_reuses_the_same(tiny_checkpoint: Path):
    report = run_benchmark("prefix", options(tiny_checkpoint, count=4, runs=2))
    first, second = (run["num_cached_tokens"] for run in report.details["every_run"]["hf_paged"])
    assert first == second
    assert 512 <= first <= 3 * 512, "the first request computes the 512 shared tokens, the others find them"


def test_the_pool_and_each_token_are_seen_while_requests_run(tiny_checkpoint: Path):
    report = run_benchmark("throughput", options(tiny_checkpoint, count=4))
    requests, line = report.details["requests"]["hf_paged"], report.details["timeline"]
    lengths = build_workload("W1", TextTokens(range(1000)), 4).output_lengths
    assert [len(gaps) + 1 for gaps in requests["itls"]] == lengths and len(requests["ttfts"]) == 4
    times = [ttft + sum(gaps) for ttft, gaps in zip(requests["ttfts"], requests["itls"], strict=True)]
    assert 0 < max(times) <= report.rows[0]["seconds"]
    assert line["num_blocks"] * line["bytes_per_block"] == report.rows[0]["kv_bytes_pool"]
    samples = zip(line["blocks_held"], line["blocks_cached"], line["tokens_stored"], strict=True)
    for held, cached, stored in samples:
        assert held + cached <= line["num_blocks"] and stored <= held * line["block_size"]
    assert len(line["seconds"]) == len(line["running"]) == len(line["waiting"]) == len(line["blocks_held"]) > 0


def test_transformers_is_measured_in_turns_on_the_same_requests(tiny_checkpoint: Path):
    report = run_benchmark("throughput", options(tiny_checkpoint, compare="transformers", runs=2))
    systems = [row["system"] for row in report.rows]
    assert systems[0] == "hf_paged" and len(systems) == 4
    for row in report.rows[1:]:
        assert row["speedup"] == pytest.approx(report.rows[0]["output_tokens_per_s"] / row["output_tokens_per_s"])
    assert all(len(measured) == 2 for measured in report.details["every_run"].values())
    assert list(report.details["requests"]) == systems
    assert all(len(found["ttfts"]) == len(found["itls"]) == 4 for found in report.details["requests"].values())


def test_impossible_options_are_refused_before_anything_is_loaded(tiny_checkpoint: Path):
    with pytest.raises(UnknownNameError, match="transformers"):
        options(tiny_checkpoint, compare="somebody")
    with pytest.raises(ConfigurationError, match="dtype"):
        options(tiny_checkpoint, dtype="bf17")
    with pytest.raises(UnknownNameError, match="throughput"):
        run_benchmark("nothing", options(tiny_checkpoint))


def test_a_workload_that_does_not_fit_the_model_is_refused(tiny_checkpoint: Path):
    with pytest.raises(InvalidRequestError, match="`max_model_len`"):
        run_benchmark("long", options(tiny_checkpoint, config=PagedConfig(max_model_len=1000)))


def test_the_demo_shows_answers_and_a_table(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "demo.json"
    run_demo(str(tiny_checkpoint), file, count=4)
    out = capsys.readouterr().out
    assert out.count("> ") >= 3, "three questions with their answers"
    for system in ("one by one", "static padded", "generate_batch", "hf_paged"):
        assert system in out
    figures = json.loads(file.read_text())
    for name in ("speedup_one_by_one", "speedup_static_batch", "speedup_generate_batch", "output_tokens_per_s"):
        assert figures[name] > 0
    assert 0 <= figures["kv_waste_percent"] < 50
    assert figures["bandwidth"]["ordinary_pages"] > 0
    assert torch.get_num_threads() == figures["machine"]["num_threads"]


@pytest.fixture
def bandwidth(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hf_paged.tools.demo.measure_bandwidth", lambda: Bandwidth(1e9, None))


def made_report(load: float, **measured: object) -> Report:
    memory = {"kv_bytes_held": 1, "kv_bytes_used": 1, "kv_waste": 0.0}
    slow = BaselineResult(
        "one_by_one", 1.1, 4.0, 40.0, how="46 of 4,961 tokens", **memory, **{"extrapolated": True, **measured}
    )
    whole = BaselineResult("static_batch", 9.0, 4.0, 4.0, False, "all", **memory)
    ours = EngineRun(99.0, 1.0, 0.1, 0.1, **memory, kv_bytes_pool=1, huge_page_bytes=None, resident_bytes=None,
                     stats=EngineStats())  # fmt: skip
    return make_report(Workload("demo", [[1]], [2]), ours, [slow, whole], load)


def test_the_demo_marks_rows_that_say_little(bandwidth: None):
    report = made_report(0.0, measured_share=0.01)
    assert [row["system"] for row in report.rows] == [
        "Transformers, one by one *", "Transformers, static padded batch", "hf_paged"
    ]  # fmt: skip
    assert report.notes[0] == "Transformers, one by one *: 46 of 4,961 tokens in 40 s, the rest is extrapolated"
    assert report.notes[1].startswith("* measured on less than 5 %") and len(report.notes) == 3
    report = made_report(0.0, measured_share=0.1)
    assert "*" not in "".join(report.notes) + report.rows[0]["system"]


def test_the_demo_says_when_others_use_the_machine(bandwidth: None):
    threads = torch.get_num_threads()
    report = made_report(threads + 5.0, extrapolated=False)
    assert report.notes[0].startswith(f"load average {threads + 5}.0 on ") and report.details["load_average"] > threads
    assert not any("load average" in note for note in made_report(threads + 0.5, extrapolated=False).notes)


def test_a_table_leaves_out_columns_without_values(capsys: pytest.CaptureFixture[str]):
    columns = [Column("system", "system"), Column("a", "first"), Column("b", "second", percent)]
    report = Report("title", columns, [{"system": "x", "a": None, "b": 0.5}, {"system": "y", "b": None}], ["a note"])
    report.print(output_console())
    out = capsys.readouterr().out
    assert "50.0 %" in out and "second" in out and "first" not in out and "a note" in out


def test_medians_of_numbers_and_the_last_of_words():
    rows = [{"n": 1, "w": "a", "x": None}, {"n": 5, "w": "b", "x": 2}, {"n": 3, "w": "c", "x": 2}]
    assert median_row(rows) == {"n": 3, "w": "c", "x": 2}
