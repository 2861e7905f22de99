"""Pictures of benchmarks show the figures of their reports, fit their texts, and say early what keeps them from it."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cpu import summary
from benchmarks.cpu.peers import PEERS
from benchmarks.serving import compare
from hf_paged.cli import exits, main
from hf_paged.errors import ConfigurationError, MissingDependencyError, UnknownNameError
from hf_paged.generation.stats import EngineStats
from hf_paged.tools.bench import comparison, concurrency, kernels, memory, plots, quantization, serve, start, step
from hf_paged.tools.bench.baseline_process import NoAnswerError
from hf_paged.tools.bench.baselines import BaselineResult
from hf_paged.tools.bench.engine_run import EngineRun
from hf_paged.tools.bench.kernel_cases import Case
from hf_paged.tools.bench.plots import ReportFileError, check_target, draw, plot_file, plot_report
from hf_paged.tools.bench.run_watch import request_times
from hf_paged.tools.bench.serve_records import RequestRecord
from hf_paged.tools.bench.serve_settings import parse_settings
from hf_paged.tools.bench.serve_statistics import summarize
from hf_paged.tools.bench.session import BenchOptions, BenchSession, run_benchmark
from hf_paged.tools.bench.systems import METHOD_TITLES
from hf_paged.tools.bench.workloads import TextTokens, Workload

MIB = 2**20
SPEEDS = {"hf_paged": 460.0, "one_by_one": 17.5, "static_batch": 93.0, "generate_batch": 75.0}
TOKEN_TIMES = [[10.2, 10.25, 10.31], [10.4, 10.45]]
SERVED = {
    "served_bytes": 1200 * MIB,
    "imported_bytes": 400 * MIB,
    "weight_bytes": 250 * MIB,
    "touched_pool_bytes": 480 * MIB,
    "other_bytes": 70 * MIB,
    "peak_loading_bytes": 900 * MIB,
}


class FakeWatch:
    """What `RunWatch` would have seen."""

    def __init__(self, engine: Any):
        self.requests = request_times(TOKEN_TIMES, [10.0, 10.0])
        self.timeline = {
            "seconds": [0.0, 0.5, 1.0, 1.5],
            "blocks_held": [0, 40, 60, 0],
            "blocks_cached": [5, 5, 5, 70],
            "tokens_stored": [0, 600, 950, 0],
            "running": [0, 2, 2, 0],
            "waiting": [2, 0, 0, 0],
            "num_blocks": 400,
            "block_size": 16,
            "bytes_per_block": MIB // 4,
        }


def fake_ours(session: Any, workload: Workload, watch: Any = None) -> dict[str, Any]:
    """As `measure_ours`, of a run that nobody made; more requests are faster."""
    speed = SPEEDS["hf_paged"] * len(workload) / 64
    run = EngineRun(speed, workload.num_output_tokens / speed, 0.3, 0.05, 119 * MIB, 115 * MIB, 0.036, 2000 * MIB,
                    None, None, EngineStats(num_steps=128))  # fmt: skip
    monkey = pytest.MonkeyPatch()
    monkey.setattr(comparison, "run_workload", lambda *words, **more: (run, []))
    monkey.setattr(comparison, "floor_seconds", lambda *words: run.seconds / 2)
    try:
        return REAL_OURS(session, workload, watch)
    finally:
        monkey.undo()


def fake_stock(session: Any, workload: Workload, method: str, sample: int | None, *rest: Any) -> dict[str, Any]:
    """As `measure_stock`, of a process that nobody started."""
    speed = SPEEDS[method] * len(workload) / 64
    result = BaselineResult(method, speed, 10.0, 5.0, method == "static_batch", "some of it", 369 * MIB, 121 * MIB,
                            0.644, measured_share=0.5, requests=request_times(TOKEN_TIMES, [9.8, 9.8]))  # fmt: skip
    return result.row() | {"read_bandwidth": 30e9, "requests": result.requests}


REAL_OURS = comparison.measure_ours


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch):
    """Benchmarks run as they are, on a model that is not there."""
    monkeypatch.setattr(BenchSession, "text", TextTokens(range(5000)))
    monkeypatch.setattr(BenchSession, "model", SimpleNamespace(engine=None))
    monkeypatch.setattr(BenchSession, "bandwidth", lambda self: 30e9)
    for module in (comparison, concurrency):
        monkeypatch.setattr(module, "measure_ours", fake_ours)
    monkeypatch.setattr(comparison, "measure_stock", fake_stock)
    monkeypatch.setattr(comparison, "RunWatch", FakeWatch)
    monkeypatch.setattr(memory, "measure_served", lambda session: SERVED)
    parts = {f"{part}_seconds": 0.001 for part in step.PARTS} | {"model_seconds": 0.06, "tokens_stored": 9000.0}
    monkeypatch.setattr(
        step,
        "measure_steps",
        lambda session, sampling, count: (
            parts | {"overhead_seconds": 0.005, "step_seconds": 0.065, "num_running": count}
        ),
    )
    floors = {"memory_floor_seconds": 0.02, "arithmetic_floor_seconds": 0.04, "floor_seconds": 0.04}
    monkeypatch.setattr(step, "step_floors", lambda *words: floors)
    monkeypatch.setattr(step, "measure_long_queue", lambda: 0.001)
    monkeypatch.setattr(start, "measure_in_fresh_process", fake_start)
    fake_kernels(monkeypatch)
    fake_quantization(monkeypatch)


def fake_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized weights of which each kind is half as large as the one before, and as fast."""

    def measure(name: str, settings: dict[str, Any]) -> dict[str, Any]:
        factor = 0.5 if settings["quantize"] else 1.0
        return {
            "model_bytes": 256 * MIB * factor,
            "growth_bytes": 300 * MIB * factor,
            "seconds_per_token": 0.02 * factor,
            "output_tokens_per_s": 400.0,
            "every_seconds_per_token": [0.02 * factor, 0.021 * factor],
            "every_output_tokens_per_s": [400.0, 390.0],
            "perplexity": 20.0 + (1 - factor),
            "perplexity_tokens": 20_440,
        }

    monkeypatch.setattr(BenchSession, "tokenizer", None)
    monkeypatch.setattr(quantization, "english_windows", lambda tokenizer: ([[1, 2]], "some English text"))
    monkeypatch.setattr(quantization.library, "load", lambda: True)
    monkeypatch.setattr(quantization, "_made", lambda session, source, *rest: (source, {}))
    monkeypatch.setattr(quantization, "measure_in_fresh_process", measure)


def fake_start(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    load = 1.5 if settings["system"] == "hf_paged" else 1.0
    return {"load_seconds": load, "first_token_seconds": 0.25, "seconds": load + 0.25, "cpu_seconds": 2.0}


def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cases(list):
        dtype = "torch.bfloat16"

    cases = Cases([Case("linear o, 1 row", (), num_bytes=3e7), Case("linear o, 256 rows", (), operations=2e9)])
    monkeypatch.setattr(kernels, "make_cases", lambda session: cases)
    monkeypatch.setattr(kernels, "measure", lambda case, count: [[2e-3], [8e-3]] if case.num_bytes else [[4e-3]])
    monkeypatch.setattr(kernels.peaks, "used_instruction", lambda dtype: "fma")
    monkeypatch.setattr(kernels.peaks, "peak_instructions", lambda: ("fma",))
    monkeypatch.setattr(kernels.peaks, "peak_flops", lambda name: 1e12)


def report_of(name: str, **options: Any) -> dict[str, Any]:
    """A report as a file would hold it."""
    chosen = {"model": "/models/a-model", "compare": "transformers", "runs": 2} | options
    return json.loads(json.dumps(run_benchmark(name, BenchOptions(**chosen)).to_dict()))


def serve_report(detailed: bool = True) -> dict[str, Any]:
    settings = parse_settings(["--num-prompts", "3", "--dataset-name", "packaged"])
    records = [
        RequestRecord(start=5.0, arrivals=[5.1, 5.2, 5.4], end=5.4, output_tokens=6, is_complete=True),
        RequestRecord(start=5.0, arrivals=[5.3, 5.5], end=5.5, output_tokens=2, is_complete=True),
        RequestRecord(start=5.5, end=6.0, error_kind="http 503", error="no"),
    ]
    report = serve._about(settings, "a-model") | summarize(records, 1.0)
    kept = report if detailed else {k: v for k, v in report.items() if k not in serve.DETAILS}
    return json.loads(json.dumps(kept))


def engines_report() -> dict[str, Any]:
    def result(number: int, name: str) -> dict[str, Any]:
        w1 = {"output_tokens_per_s": 400.0 + number if name == "hf_paged" else 300.0}
        return {"workloads": {"W1": w1, "W3": {"seconds_per_token": 0.013}}, "errors": {}}

    peers = [PEERS["hf_paged"], PEERS["vllm"]]
    rows = summary.summarize(peers, SimpleNamespace(result=result), 2, None)  # type: ignore[arg-type]
    machine = {"processor": "A processor, 2 cores", "read_bandwidth": 30e9}
    return {"begun": "2026-01-02 03:04:05", "settings": {"rounds": 2, "model": "/models/a-model"}, "machine": machine,
            "rows": rows, "targets": [], "unavailable": {}}  # fmt: skip


def servers_report() -> dict[str, Any]:
    def run(speed: float) -> dict[str, Any]:
        return {"output_throughput": speed, "p99_ttft_ms": 900.0, "p99_itl_ms": 80.0, "failed": 0}

    results = {"burst": {"hf_paged": [run(400.0), run(420.0)], "vllm": [run(200.0), run(210.0)]}}
    medians = {load: {peer: compare.medians_of(runs) for peer, runs in by.items()} for load, by in results.items()}
    return {"date": "2026-01-02", "cores": [0, 1], "starts": {}, "results": results, "medians": medians, "targets": []}


def bar_ends(axis: Any) -> list[float]:
    return [round(patch.get_x() + patch.get_width(), 6) for patch in axis.patches]


def texts(figure: Any) -> str:
    found = [text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text"))]
    return " | ".join(found)


def shown_texts(figure: Any) -> list[Any]:
    """All but the labels of ticks outside of what an axis shows."""
    found = list(figure.texts)
    for axis in figure.axes:
        found += [*axis.texts, axis.title, axis._left_title, axis.xaxis.label, axis.yaxis.label]
        found += axis.get_legend().get_texts() if axis.get_legend() else []
        for side, limits in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
            found += [t.label1 for t in side.get_major_ticks() if min(limits) <= t.get_loc() <= max(limits)]
    return [text for text in found if text.get_text() and text.get_visible()]


def line_named(axis: Any, label: str) -> Any:
    return next(line for line in axis.lines if line.get_label() == label)


def all_reports() -> dict[str, dict[str, Any]]:
    names = [name for name in plots.PICTURES if name not in ("serve", "engines", "servers")]
    reports = {name: report_of(name) for name in names}
    others = {"serve": serve_report(), "engines": engines_report(), "servers": servers_report()}
    return reports | others | {"serve without details": serve_report(detailed=False)}


def test_every_picture_is_drawn_and_its_texts_lie_inside_it(tmp_path: Path):
    drawn: set[str] = set()
    for name, report in all_reports().items():
        for picture in [p for p in plots.PICTURES[plots.kind_of(report)] if p not in drawn or "details" in name]:
            drawn.add(picture)
            figure = draw(report, picture)
            figure.draw_without_rendering()
            page = figure.bbox
            for text in shown_texts(figure):
                box = text.get_window_extent()
                inside = page.x0 - 1 <= box.x0 and box.x1 <= page.x1 + 1 and page.y0 - 1 <= box.y0
                assert inside and box.y1 <= page.y1 + 1, f"{name}, {picture}: {text.get_text()!r}"
            panels = [axis.get_tightbbox() for axis in figure.axes]
            for text, panel in itertools.product(figure.texts, panels):
                box = text.get_window_extent()
                assert box.y0 > panel.y1 - 1 or box.y1 < panel.y0 + 1, f"{name}, {picture}: a text lies on a panel"
    plot_report(report, tmp_path / "new" / "a.png")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_foot_says_what_was_measured_on():
    report = report_of("throughput")
    report["load_average"] = [0.5, report["machine"]["num_threads"] + 4.0]
    shown = texts(draw(report)).replace(" | ", " ")  # lines of one text
    for words in (report["machine"]["processor"][:10], "30.0 GB/s", "a-model in bfloat16", "torch", report["date"]):
        assert words in shown
    assert "other processes ran beside it" in shown
    assert "other processes" not in texts(draw(report | {"load_average": [0.5]}))


def test_quantized_weights_have_their_size_quality_and_speed():
    report = report_of("quantization", only="int8", compare=None)
    size, lost, one, many = draw(report).axes
    assert bar_ends(size) == [256, 128] and bar_ends(lost) == [0, 2.5]
    assert bar_ends(one) == [20, 10] and bar_ends(many) == [400, 400]
    shown = texts(size.figure)
    assert "20.500 (+2.50%)" in shown and "some English text" in shown and "noise" not in shown
    assert "1.0% of noise" in texts(draw(report | {"noise": 0.01}))


def test_speed_has_a_bar_for_each_system_and_compares_it():
    report = report_of("throughput")
    (axis,) = draw(report).axes
    assert bar_ends(axis) == list(SPEEDS.values())
    shown = texts(axis.figure)
    assert "93.0 tok/s*   hf_paged is 4.9x as fast" in shown and "extrapolated" in shown
    report["rows"][2]["measured_share"] = 0.01
    assert "rough: 1.0% of it was measured" in texts(draw(report))


def test_concurrency_has_a_line_for_each_system_over_the_number_of_requests():
    report = report_of("concurrency")
    (axis,) = draw(report).axes
    line = line_named(axis, "hf_paged")
    assert list(line.get_xdata()) == [1, 2, 4, 8, 16, 32, 64]
    assert list(line.get_ydata()) == pytest.approx([460 * n / 64 for n in (1, 2, 4, 8, 16, 32, 64)])
    assert line_named(axis, "Transformers, generate_batch").get_ydata()[-1] == pytest.approx(75)
    assert axis.get_xlabel() == "requests at a time" and axis.get_ylabel() == "output tokens/s"
    assert [row["concurrency"] for row in report_of("concurrency", count=6, compare=None)["rows"]] == [1, 2, 4, 6]


@pytest.mark.parametrize("benchmark", ["throughput", "concurrency"])
def test_a_method_that_never_answers_is_left_out_and_named(benchmark: str, monkeypatch: pytest.MonkeyPatch):
    asked, dropped = [], []

    def slow_stock(session: Any, workload: Workload, method: str, *rest: Any) -> dict[str, Any]:
        asked.append(method)
        if method == "static_batch":
            raise NoAnswerError("Stock Transformers did not answer within 340 s; it was stopped.")
        return fake_stock(session, workload, method, *rest)

    monkeypatch.setattr(comparison, "measure_stock", slow_stock)
    monkeypatch.setattr(BenchSession, "drop_stock", lambda self: dropped.append(self))
    report = report_of(benchmark)
    assert asked.count("static_batch") == len(dropped) == 1
    titles = {row["system"] for row in report["rows"]}
    assert METHOD_TITLES["static_batch"] not in titles and METHOD_TITLES["generate_batch"] in titles
    assert any("static padded batch: left out" in note and "340 s" in note for note in report["notes"])


def test_memory_shows_what_is_reserved_and_what_is_used():
    kv, process = draw(report_of("memory")).axes
    assert bar_ends(kv) == [119, 369, 369, 369, 115, 121, 121, 121]
    assert bar_ends(process) == [400, 650, 1130, 1200]
    assert "369 MiB reserved, 121 used; 64.4% wasted" in texts(kv.figure)


def test_the_pool_over_time_adds_up():
    figure = draw(report_of("memory"), "pool")
    pool, requests = figure.axes[:2]
    heights = [area.get_paths()[0].vertices[:, 1].max() for area in pool.collections]
    assert heights == [60, 70, 400], "held, cached on top of it, and free up to the whole pool"
    assert list(pool.lines[0].get_ydata()) == [0, 600 / 16, 950 / 16, 0]
    assert list(requests.lines[0].get_ydata()) == [0, 2, 2, 0] and list(requests.lines[1].get_ydata()) == [2, 0, 0, 0]
    assert "at most 60 held" in texts(figure)


def test_latency_marks_percentiles_of_all_requests():
    first, between = draw(report_of("latency")).axes
    curve = line_named(first, "hf_paged")
    assert list(curve.get_xdata()[1:]) == pytest.approx([200, 200, 400, 400]), "two requests in each of two runs, ms"
    assert list(curve.get_ydata()) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert max(line_named(between, "hf_paged").get_xdata()) == pytest.approx(60)
    shown = texts(first.figure)
    assert "hf_paged: p50 300, max 400 ms" in shown and "memory allows" in shown


def test_a_step_is_cut_into_parts_beside_its_floors():
    whole, beside = draw(report_of("step")).axes
    assert [tick.get_text() for tick in whole.get_xticklabels()] == ["1", "2", "4", "8", "16", "32", "64"]
    model, rest = whole.containers
    assert [bar.get_height() for bar in model] == pytest.approx([60] * 7)
    assert [bar.get_height() for bar in rest] == pytest.approx([5] * 7)
    floors = [line.get_ydata()[0] for line in whole.lines if line.get_label() == "arithmetic_floor_seconds"]
    assert floors == pytest.approx([40] * 7)
    assert sum(container[0].get_height() for container in beside.containers) == pytest.approx(5)


def test_operators_are_shown_as_shares_of_their_floor():
    (axis,) = draw(report_of("kernels")).axes
    assert bar_ends(axis) == [50.0, 50.0]
    assert list(line_named(axis, "torch").get_xdata()) == pytest.approx([12.5])


def test_a_start_has_two_parts():
    (axis,) = draw(report_of("start")).axes
    assert bar_ends(axis) == [1.75, 1.25, 1.5, 1.0] and "1.50 + 0.25 s" in texts(axis.figure)


def test_a_served_run_is_drawn_from_its_details():
    requests, tokens, seconds, opened = draw(serve_report()).axes
    first = line_named(requests, "time to the first token").get_xdata()
    assert list(first[1:]) == pytest.approx([100, 300]), "the failed request has no first token"
    assert list(line_named(tokens, "between chunks").get_xdata()[1:]) == pytest.approx([100, 200, 200])
    assert sum(bar.get_height() for bar in seconds.patches) == pytest.approx(8)
    assert max(opened.lines[0].get_ydata()) == 2 and "1 failed" in texts(opened.figure)


def test_a_served_run_of_weeks_has_no_more_bars_than_can_be_seen():
    report = serve_report()
    report["ttfts"][0] = 3e6
    seconds = draw(report).axes[2]
    assert 1000 < len(seconds.patches) <= 2001
    assert sum(bar.get_height() for bar in seconds.patches) * 1501 == pytest.approx(8)
    assert seconds.get_xlim()[1] >= 3e6 and "each 1,501 s" in texts(seconds.figure)


def test_without_details_a_served_run_shows_its_percentiles():
    (axis,) = draw(serve_report(detailed=False)).axes
    report = serve_report()
    assert list(axis.lines[0].get_xdata()) == [report["median_ttft_ms"], report["p99_ttft_ms"]]


def test_peers_have_a_bar_and_a_dot_for_each_round():
    first, second, third, fourth = draw(engines_report()).axes
    assert bar_ends(first) == [401.5, 300] and list(first.lines[0].get_xdata()) == [401, 402]
    assert bar_ends(third) == [13, 13] and not bar_ends(second) and not bar_ends(fourth)
    axes = draw(servers_report()).axes
    assert bar_ends(axes[0]) == [410, 205] and bar_ends(axes[1]) == [900, 900]


def test_pyplot_is_not_touched():
    before = "matplotlib.pyplot" in sys.modules
    draw(report_of("throughput"))
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_a_picture_is_drawn_again_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report_of("memory")))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "plot", str(file), "--picture", "pool", "--plot", str(tmp_path / "pool.svg")])
    assert not ended.value.code and "pool.svg" in capsys.readouterr().err
    assert "<svg" in (tmp_path / "pool.svg").read_text()
    assert plot_file(file) == tmp_path / "report.png" and (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"benchmark": "throughput", "rows"', "is not whole JSON"),
        ("[1]", "holds list"),
        ('{"rows": [NaN]}', "report.json' is not whole JSON .NaN is no number that can be drawn"),
        ('{"rows": [-Infinity, 1e999]}', "-Infinity is no number that can be drawn"),
        ('{"rows": [1e999]}', "1e999 is no number that can be drawn"),
        ('{"rows": [' + "9" * 400 + "]}", "9{20} is no number that can be drawn"),
        ("[" * 100_000, "report.json' has too many brackets within one another"),
        ('{"rows": []}', "no report of a benchmark"),
        ('{"benchmark": "memory", "rows": [{"system": "hf_paged"}], "workload": "W1"}', "KeyError: 'kv_bytes_held'"),
        ('{"benchmark": "step", "rows": 5, "runs": 1}', "measure again"),
        ('{"benchmark": ["step"]}', "no report of a benchmark"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str, message: str):
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(ReportFileError, match=message):
        plot_file(file)
    assert not (tmp_path / "report.png").exists()


def test_a_name_that_cannot_be_written_out_is_drawn_without_warnings(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(serve_report() | {"model_id": "a\a\u009b\u6a21"}))
    assert plot_file(file).exists()
    assert not recwarn.list and not capfd.readouterr().err


def test_numbers_that_overflow_are_refused_without_warnings(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(serve_report() | {"ttfts": [1e308] * 3}))
    with pytest.raises(ReportFileError, match="report.json' lacks what the picture"):
        plot_file(file)
    assert not recwarn.list


def test_a_file_that_is_missing_or_binary_is_refused(tmp_path: Path):
    with pytest.raises(ReportFileError, match="No such file"):
        plot_file(tmp_path / "nothing.json")
    (tmp_path / "binary").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ReportFileError, match="not whole JSON"):
        plot_file(tmp_path / "binary")


def test_an_older_report_without_a_timeline_says_so(tmp_path: Path):
    file = tmp_path / "report.json"
    file.write_text(json.dumps({k: v for k, v in report_of("throughput").items() if k != "timeline"}))
    with pytest.raises(ReportFileError, match="KeyError: 'timeline'.*measure again"):
        plot_file(file, picture="pool")
    assert plot_file(file).exists()


def test_an_unknown_picture_lists_those_that_there_are(tmp_path: Path):
    with pytest.raises(UnknownNameError, match="available: memory, pool, speed, latency"):
        check_target(tmp_path / "a.png", "memory", "nonsense")


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """What the command line says before it measures anything, and ends with a code."""

    def measure(*words: Any) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr("hf_paged.tools.bench.session.run_benchmark", measure)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert ended.value.code == code
    return capsys.readouterr().err


def test_what_prevents_a_picture_is_said_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    for words, message in (
        (["--plot", "a.gif"], "must name a file that ends in .png, .svg, .pdf"),
        (["--plot", str(tmp_path / "file" / "a.png")], "cannot be written"),
        (["--plot", str(tmp_path)], "must name a file"),
        (["--picture", "cats"], "available: speed, latency, memory, pool"),
        (["--json", str(tmp_path / "file" / "a.json")], "`--json` names"),
    ):
        assert message in refused(monkeypatch, capsys, exits.WRONG_USAGE, "throughput", *words)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = refused(monkeypatch, capsys, exits.FAILED, "step", "--plot", str(tmp_path / "a.png"))
    assert "pip install 'hf-paged[bench]'" in said
    assert not (tmp_path / "a.png").exists()


def test_a_link_to_where_the_picture_will_be_stays(tmp_path: Path):
    link, target = tmp_path / "link.png", tmp_path / "target.png"
    link.symlink_to(target)
    check_target(link)
    assert link.is_symlink() and not target.exists(), "what was made for the check goes, and nothing else"
    target.write_text("an older one")
    check_target(link)
    assert link.is_symlink() and target.read_text() == "an older one"
    loop = tmp_path / "loop.png"
    loop.symlink_to(loop)
    for path in (loop, tmp_path / ("a" * 300 + ".png")):
        with pytest.raises(ConfigurationError, match="cannot be written"):
            check_target(path)
    assert loop.is_symlink()


def test_a_server_is_not_asked_for_a_picture_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    for name, error in ((tmp_path / "file" / "a.png", "cannot be written"), (tmp_path / "a.jpeg", "must name a file")):
        with pytest.raises(ConfigurationError, match=error):
            serve.run_serve_benchmark(parse_settings(["--plot", str(name), "--base-url", "http://127.0.0.1:1"]))


def test_without_matplotlib_a_report_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "report.json").write_text(json.dumps(serve_report()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="matplotlib"):
        plot_file(tmp_path / "report.json")
