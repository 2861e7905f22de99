"""The command line: fast help, answers on stdout, two-line errors, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_paged import __version__
from hf_paged.cli import main
from hf_paged.tools import packaged_model
from hf_paged.tools.bench import BENCHMARK_HELP


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hf_paged.cli", *arguments], capture_output=True, text=True)


def call(*arguments: str) -> int:
    """Runs a command in this process and returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["bench", "step", "--help"], ["--version"]])
def test_help_loads_neither_torch_nor_transformers(arguments: list[str]):
    code = (
        "import sys\nfrom hf_paged.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr


def test_version(capsys: pytest.CaptureFixture[str]):
    assert call("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["bench", "nonsense"], ["demo", "--nonsense"], ["bench", "step", "--runs", "0"]]
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert call(*arguments) == 2
    assert not capsys.readouterr().out


def test_an_error_is_two_lines_on_stderr(capsys: pytest.CaptureFixture[str]):
    assert call("bench", "latency", "--compare", "somebody") == 1
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert not captured.out and len(lines) == 2
    assert "'somebody'" in lines[0] and "transformers" in lines[0]
    assert "--debug" in lines[1]


@pytest.mark.parametrize("position", [0, 2, 4])
def test_debug_shows_the_traceback_wherever_it_stands(position: int):
    from hf_paged.errors import UnknownNameError

    arguments = ["bench", "latency", "--compare", "somebody"]
    arguments.insert(position, "--debug")
    with pytest.raises(UnknownNameError):
        main(arguments)


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupt() -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(packaged_model, "packaged_model_path", interrupt)
    assert call("demo", "--print-model-path") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_print_model_path_prints_the_folder_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    done = run("demo", "--print-model-path")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 and (Path(lines[0]) / "model.safetensors").is_file()


def test_every_benchmark_that_help_lists_exists():
    from hf_paged.tools.bench.session import all_benchmarks

    assert set(all_benchmarks()) == set(BENCHMARK_HELP)


def test_bench_prints_a_table_and_writes_json(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "new" / "figures.json"
    options = ["--model", str(tiny_checkpoint), "--runs", "1", "--dtype", "float32", "--json", str(file)]
    assert call("bench", "latency", *options) == 0
    captured = capsys.readouterr()
    assert "hf_paged" in captured.out and "run 1 of 1" not in captured.out and "run 1 of 1" in captured.err
    figures = json.loads(file.read_text())
    assert figures["benchmark"] == "latency" and figures["rows"][0]["first_token_seconds"] > 0
    assert figures["machine"]["processor"]


def test_info_as_json(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    assert call("info", str(tiny_checkpoint), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["num_blocks"] > 0 and found["plan"]["attn_backend"] in found["backends"]
    assert found["versions"]["torch"] and found["bandwidth"]["ordinary_pages"] > 0


def test_info_for_people(capsys: pytest.CaptureFixture[str]):
    assert call("info") == 0
    out = capsys.readouterr().out
    assert "GB/s" in out and "attention backends reference, torch_sdpa" in out
