"""What a command is told, and what it says when that makes no sense: in this process, without a model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from hf_paged.cli import answerer, exits, interrupts, main
from hf_paged.cli.app import app
from hf_paged.cli.options import takes_model, takes_sampling
from hf_paged.kernels.cpu import isa, threads
from hf_paged.serving import lifecycle
from hf_paged.serving.command_line import make_settings
from tests.cli.helps import COMMANDS, example_lines, help_of


def call(*arguments: str) -> int:
    """Runs a command in this process and returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is empty, whatever the tests are started from."""
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115


# ------------------------------------------------------------------ help


def test_every_verb_has_a_help_that_ends_with_examples():
    assert len(COMMANDS) >= 18
    for words in COMMANDS:
        found = example_lines(help_of(words))
        assert found, f"hf-paged {' '.join(words)} --help has no example"
        assert any(f"hf-paged {' '.join(words)}".strip() in line for line in found)


def test_the_codes_that_a_server_ends_with_are_among_all():
    assert (lifecycle.STOPPED, lifecycle.FAILED) == (exits.DONE, exits.FAILED)
    assert (lifecycle.WRONG_USAGE, lifecycle.ENGINE_DIED) == (exits.WRONG_USAGE, exits.ENGINE_DIED)
    codes = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    assert codes == set(exits.MEANINGS)
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes


def test_the_page_names_every_verb():
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
    verbs = typer.main.get_command(app).commands
    assert set(re.findall(r"^## `hf-paged ([\w-]+)", page, re.MULTILINE)) == set(verbs)


def test_completion_knows_verbs_and_flags_without_loading_torch():
    """One process asks for several; a shell would start one for each."""
    code = """
import os, sys
from hf_paged.cli import main
for words in ("hf-paged c", "hf-paged chat --max-mo", "hf-paged serve --max-num-queued", "hf-paged bench la"):
    os.environ |= {"_HF_PAGED_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    try: main([])
    except SystemExit as end: assert not end.code
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert found == [
        "chat",
        "complete",
        "--max-model-len",
        "--max-num-queued-reqs",
        "--max-num-queued-tokens",
        "latency",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_can_be_shown(shell, capsys, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert call("--show-completion", shell) == 0
    assert "_HF_PAGED_COMPLETE" in capsys.readouterr().out


# ------------------------------------------------------------------ wrong usage


@pytest.mark.parametrize(
    ("arguments", "message", "help"),
    [
        (["chta"], "Did you mean 'chat'?", "hf-paged"),
        (["bench", "latncy"], "Did you mean 'latency'?", "hf-paged bench"),
        (
            ["chat", "--max-modle-len", "3"],
            "Unknown flag `--max-modle-len`; did you mean `--max-model-len`?",
            "hf-paged chat",
        ),
        (["generate", "--temprature", "1"], "did you mean `--temperature`?", "hf-paged generate"),
        (["info", "--jsno"], "did you mean `--json`?", "hf-paged info"),
        (["env", "--nothing-like-it"], "Unknown flag `--nothing-like-it`.", "hf-paged env"),
        (["bench", "serve", "--num-promts", "3"], "did you mean `--num-prompts`?", "hf-paged bench serve"),
        (["run-batch", "m", "-i", "a", "-o", "b", "--overwrte"], "did you mean `--overwrite`?", "hf-paged run-batch"),
        (["chat"], "Name a MODEL", "hf-paged chat"),
        (["chat", "--demo", "--top-k", "many"], "Invalid value for '--top-k'", "hf-paged chat"),
        (["chat", "m", "--demo"], "not both", "hf-paged chat"),
        (["chat", "m", "--dtype", "int3"], "`--dtype` must be one of", "hf-paged"),
        (["bench", "step", "--kv-cache-dtype", "int4"], "`kv_cache_dtype` must be one of auto, fp8,", "hf-paged"),
        (["chat", "m", "--num-blocks", "few"], "`--num-blocks` must be a whole number", "hf-paged"),
        (["chat", "m", "--api-key", "k"], "--base-url", "hf-paged"),
        (
            ["chat", "--base-url", "http://127.0.0.1:1", "--num-blocks", "3"],
            "`--num-blocks` is for a model of this",
            "hf",
        ),
        (["complete", "m"], "standard input is empty", "hf-paged"),
        (["complete", "--demo", "two", "prompts"], "There is one PROMPT, got 2", "hf-paged"),
        (["generate", "m", "a", "--input", "b"], "Give either prompts", "hf-paged"),
        (["generate", "m", "--input", "no-such-file"], "No such file", "hf-paged"),
        (["generate", "m", "a", "--output", "no/such/folder"], "no folder that exists", "hf-paged"),
        (["info", "m", "--generate"], "leave out MODEL", "hf-paged"),
    ],
)
def test_wrong_usage_is_two_lines_and_exit_code_two(arguments, message, help, capsys):
    assert call(*arguments) == exits.WRONG_USAGE
    captured = capsys.readouterr()
    first, second = captured.err.strip().splitlines()
    assert not captured.out and first.startswith("hf-paged: ") and message in first
    assert second.startswith(f"(see {help}") and second.endswith("--help)")


def test_an_error_on_stderr_is_not_obeyed_by_a_terminal(capsys, monkeypatch):
    def broken(settings: Any) -> None:
        raise ValueError("no \x1b[2J and \u202e")

    monkeypatch.setattr(answerer, "fetched", broken)
    assert call("chat", "m") == exits.FAILED
    assert capsys.readouterr().err.startswith("hf-paged: no \ufffd[2J and \ufffd\n")
    assert call("chat", "--\x9b2Jm") == exits.WRONG_USAGE
    assert "\x9b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "check"),
    [
        (isa.VARIABLE, "avx3", isa.requested_isa),
        (isa.VARIABLE, "amx", lambda: isa.check_available("amx", ("avx2", "torch"))),
        (threads.PIN_VARIABLE, "yes", threads.pinning_requested),
    ],
)
def test_a_wrong_variable_of_the_native_operators_is_wrong_usage(variable, value, check, capsys, monkeypatch):
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(answerer, "fetched", lambda settings: check())
    assert call("chat", "m") == exits.WRONG_USAGE
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"hf-paged: {variable}={value!r}") and second == "(see hf-paged --help)"


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:abc", "http://127.0.0.1:80 80", "http://u:p@host"])
def test_a_wrong_url_of_a_server_is_wrong_usage(url, capsys):
    assert call("complete", "--base-url", url, "Hi") == exits.WRONG_USAGE
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("hf-paged: `--base-url` must") and second == "(see hf-paged complete --help)"


def test_a_key_that_can_be_none_is_wrong_usage(capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secr€t")
    assert call("complete", "--base-url", "http://127.0.0.1:1", "Hi") == exits.WRONG_USAGE
    assert capsys.readouterr().err.startswith("hf-paged: OPENAI_API_KEY is no key")


def test_without_a_verb_the_help_is_shown(capsys):
    assert call() == exits.WRONG_USAGE
    assert "Commands" in capsys.readouterr().out


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    "arguments", [["chat"], ["complete"], ["generate"], ["info"], ["demo", "--model"], ["bench", "latency", "--model"]]
)
def test_a_model_that_is_not_there_is_told_before_anything_is_loaded(arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", open(__file__))  # noqa: SIM115
    assert call(*arguments, "./no-such-folder") == exits.FAILED
    first, second = capsys.readouterr().err.strip().splitlines()
    assert "There is no folder './no-such-folder'" in first and "--debug" in second


def test_a_folder_that_is_no_model_and_a_broken_config_file_are_told(tmp_path, capsys):
    assert call("chat", str(tmp_path)) == exits.FAILED
    assert "holds no config.json" in capsys.readouterr().err
    (tmp_path / "serve.yaml").write_text("block_size: [")
    assert call("chat", "m", "--config", str(tmp_path / "serve.yaml")) == exits.WRONG_USAGE
    assert "is not YAML" in capsys.readouterr().err
    (tmp_path / "serve.yaml").write_text("blok_size: 16")
    assert call("chat", "m", "--config", str(tmp_path / "serve.yaml")) == exits.WRONG_USAGE
    assert "unknown key `blok_size`; did you mean `block_size`?" in capsys.readouterr().err


def test_a_cache_folder_that_cannot_be_written_is_told(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "file" / "cache"))
    assert call("chat", "--demo") == exits.FAILED
    assert "HF_PAGED_CACHE" in capsys.readouterr().err.splitlines()[0]


def test_an_interrupt_that_an_import_made_an_error_of_is_still_one(capsys, monkeypatch):
    def broken_import(settings: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 1)
        except KeyboardInterrupt:
            raise ImportError("numpy is broken") from None

    monkeypatch.setattr(answerer, "fetched", broken_import)
    assert call("chat", "m") == exits.INTERRUPTED
    assert capsys.readouterr().err == "hf-paged: interrupted\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, exits.INTERRUPTED), (signal.SIGTERM, exits.TERMINATED)])
def test_a_signal_while_something_is_done_ends_it(number, code, capsys, monkeypatch):
    def wait(settings: Any) -> None:
        os.kill(os.getpid(), number)
        signal.sigtimedwait([], 5)

    before = signal.getsignal(number)
    monkeypatch.setattr(answerer, "fetched", wait)
    assert call("chat", "m") == code
    assert "Traceback" not in capsys.readouterr().err
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, exits.INTERRUPTED), (signal.SIGTERM, exits.TERMINATED)])
def test_a_signal_while_the_command_line_itself_is_imported_ends_it(number, code, capsys, monkeypatch):
    class Signaller:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "hf_paged.cli.running":
                os.kill(os.getpid(), number)
                signal.sigtimedwait([], 5)

    before = signal.getsignal(number)
    monkeypatch.delitem(sys.modules, "hf_paged.cli.running")
    monkeypatch.setattr(sys, "meta_path", [Signaller(), *sys.meta_path])
    assert call("--version") == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == f"hf-paged: {'interrupted' if code == 130 else 'terminated'}\n"
    assert signal.getsignal(number) is before


def test_where_ctrl_c_was_ignored_it_still_is():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.handled():
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.received() is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_reader_that_has_gone_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hf_paged", "chat", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == exits.READER_GONE and done.stderr == ""


@pytest.mark.parametrize("closed", [["stdin"], ["stdout"], ["stderr"], ["stdin", "stdout", "stderr"]])
def test_standard_streams_that_are_closed_are_no_error_of_their_own(closed, capsys, monkeypatch):
    for name in closed:
        monkeypatch.setattr(sys, name, None)
    assert call("--version") == exits.DONE
    for verb in ("chat", "complete", "generate"):
        # A folder that is not there is told only where somebody can read it.
        arguments = [verb, "--model", "no/where/at"] if verb != "chat" else [verb, "no/where/at"]
        assert call(*arguments) != exits.DONE
        captured = capsys.readouterr()
        assert "NoneType" not in captured.err and bool(captured.err) == ("stderr" not in closed)


def test_a_full_disk_is_told_once(capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert call("--version") == exits.FAILED
        first, second = capsys.readouterr().err.splitlines()
        assert "No space left on device; make room" in first and "--debug" in second


def test_debug_behind_two_dashes_is_a_word(capsys):
    assert call("info", "--", "--debug") == exits.FAILED
    assert "'--debug'" in capsys.readouterr().err


# ------------------------------------------------------------------ flags


def given(*arguments: str) -> dict[str, Any]:
    """What a command gets for its flags."""
    found: dict[str, Any] = {}

    @takes_model
    @takes_sampling
    def command(*, engine: dict[str, Any], sampling: dict[str, Any]) -> None:
        found.update(engine=engine, sampling=sampling)

    small = typer.Typer(context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
    small.command()(command)
    typer.main.get_command(small).main(list(arguments), standalone_mode=False)
    return found


def test_flags_of_the_engine_mean_what_they_mean_to_a_server():
    found = given(
        *("--max-model-len", "8k", "--no-enable-prefix-caching", "--enforce-eager", "--attention-backend", "reference"),
        *("--cuda-graph-sizes", "1,2", "--num_blocks", "64"),
    )
    settings = make_settings({**found["engine"], "model": "m"}, {"HF_PAGED_BLOCK_SIZE": "32"})
    assert (settings.max_model_len, settings.num_blocks, settings.block_size) == (8000, 64, 32)
    assert settings.enforce_eager and not settings.enable_prefix_caching
    assert settings.attn_backend == "reference" and settings.cuda_graph_sizes == (1, 2)
    assert given() == {"engine": {}, "sampling": {}}


def test_flags_of_sampling_are_those_that_were_given():
    found = given("--temperature", "0", "--stop", "a", "--stop", "b", "--seed", "0")
    assert found["sampling"] == {"temperature": 0.0, "stop": ["a", "b"], "seed": 0}
