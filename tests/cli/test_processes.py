"""Commands through real processes: with pipes, files and terminals, interrupted at many a moment."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_paged.cli import exits
from hf_paged.kernels.cpu import library
from tests.cli.helps import COMMANDS, example_lines, help_of
from tests.cli.processes import PATIENCE, CliProcess, Zygote

pytestmark = pytest.mark.slow


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# ------------------------------------------------------------------ examples

# A server has to be there for its load, see the test below; what writes a report is run before what draws it.
_NOT_HERE = re.compile(r"hf-paged (bench serve|serve )|--json latency.json$")
_NATIVE = {"HF_PAGED_CPU_ISA": ""}  # without, torch's operators are used, which are there at once
EXAMPLES = [line for words in COMMANDS for line in example_lines(help_of(words))]


@pytest.mark.parametrize("example", [line for line in dict.fromkeys(EXAMPLES) if not _NOT_HERE.search(line)])
def test_an_example_of_a_help_runs(example: str, hf_paged: Zygote, tmp_path: Path):
    before, found, command = example.rpartition("hf-paged ")
    if not found:  # it only makes a file for the next one
        assert subprocess.run(["bash", "-c", example], cwd=tmp_path).returncode == 0
        return
    if "requests.jsonl" in command:
        makes = next(line for line in EXAMPLES if line.endswith("> requests.jsonl"))
        subprocess.run(["bash", "-c", makes], cwd=tmp_path, check=True)
    if command.startswith("bench plot"):
        makes = next(line for line in EXAMPLES if line.endswith("--json latency.json"))
        assert hf_paged.run(*shlex.split(makes)[1:], within=tmp_path).exit_code == exits.DONE
    shell = before.strip().removesuffix("|")
    stdin = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    native = _NATIVE if command.startswith("bench kernels") else None
    if native and not library.load():
        pytest.skip("no native library on this machine")
    done = hf_paged.run(*shlex.split(command), stdin=stdin, within=tmp_path, environment=native)
    assert done.exit_code == exits.DONE, done.stderr
    written = [path for path in tmp_path.iterdir() if path.name not in ("requests.jsonl",)]
    assert done.stdout or written or "--system" in command  # a chat to which nothing is said


def test_the_examples_of_servers_and_of_load_run_together(hf_paged: Zygote):
    serve = next(line for line in EXAMPLES if line.startswith("hf-paged serve "))
    load = next(line for line in EXAMPLES if line.startswith("hf-paged bench serve"))
    server = hf_paged.start(*shlex.split(serve)[1:])
    url = ready(server)
    port = url.rpartition(":")[2]
    done = hf_paged.run(*shlex.split(load.replace("8000", port))[1:])
    assert done.exit_code == exits.DONE and "16" in done.stdout
    for flags in (["--max-tokens", "5"], ["--max-tokens", "5", "--temperature", "0"]):
        asked = hf_paged.run("chat", "--base-url", url, *flags, stdin="Hi\nAnd you?\n")
        assert asked.exit_code == exits.DONE and asked.stdout.count("\n") >= 2, asked.stderr
    talk = hf_paged.start("chat", "--base-url", f"{url}/v1", "--max-tokens", "5", columns=80)
    talk.wait_for("> ")
    talk.say("Hi", then="first after")
    server.signal(signal.SIGTERM)
    assert server.wait() == exits.DONE
    assert "hf-paged serve" in talk.say("Still there?", then="starts one.")
    talk.type("\x04")
    assert talk.wait() == exits.DONE


def ready(server: CliProcess) -> str:
    """The URL of a server, once it is ready."""
    wait_until(lambda: server.has_ended or "Try:" in server.stdout)
    return re.search(r"at (http://\S+) \(", server.stdout)[1]


# ------------------------------------------------------------------ a terminal


def test_a_chat_on_a_terminal(hf_paged: Zygote, tmp_path: Path):
    chat = hf_paged.start("chat", "--demo", "--max-tokens", "8", columns=80)
    chat.wait_for("/help lists the commands")
    chat.wait_for("> ")
    assert "tokens/s" in chat.say("Hello", then="first after")
    assert "did you mean /undo?" in chat.say("/udno", then="did you mean /undo?")
    assert "Taken back: two\nlines" in chat.say('"""\ntwo\nlines"""', then="first after") + chat.say(
        "/undo", then="lines"
    )
    assert "Saved 2 messages" in chat.say(f"/save {tmp_path}/talk.json", then="messages to")
    chat.say("/set max_tokens 4000", then="4000")
    chat.say("/set ignore_eos true", then="True")
    before = len(chat.screen)
    chat.type("Go on\n")
    wait_until(lambda: len(chat.screen) > before + 200)  # it answers
    chat.type("\x03")
    chat.wait_for("> ", after=chat.wait_for("(stopped", after=before))
    chat.type("half typed")
    end = chat.wait_for("half typed")
    chat.type("\x03")
    chat.wait_for("> ", after=end)
    chat.type("\x03")
    assert chat.wait() == exits.INTERRUPTED
    assert "Traceback" not in chat.screen and chat.screen.endswith("hf-paged: interrupted\n")
    assert [message["role"] for message in json.loads((tmp_path / "talk.json").read_text())["messages"]] == [
        *("user", "assistant")
    ]
    history = (hf_paged.folder / "state" / "hf_paged" / "chat_history").read_text()
    assert "/udno" in history


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_a_narrow_terminal_without_colours(variables: dict[str, str], hf_paged: Zygote):
    help = hf_paged.start("chat", "--help", columns=40, environment=variables)
    assert help.wait() == exits.DONE
    raw = help.raw.decode()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", raw), "colours"
    assert max(map(len, help.screen.splitlines())) <= 60 and "--default-chat-template-kwargs" in help.screen


# ------------------------------------------------------------------ files and pipes


def test_many_prompts_of_a_file_are_answered_in_order(hf_paged: Zygote, tmp_path: Path):
    prompts = [
        {"id": f"n{i}", "prompt": f"number {i}", "max_tokens": 1 + i % 5, "ignore_eos": True} for i in range(300)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts[:150]) + "{oops\n")
    with (tmp_path / "in.jsonl").open("a") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in prompts[150:])
    done = hf_paged.run("generate", "--demo", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    assert done.exit_code == exits.FAILED and done.stdout == ""
    assert "300 answered" in done.stderr and "1 failed; the first: Line 151: it is not JSON" in done.stderr
    entries = lines_of((tmp_path / "out.jsonl").read_text())
    assert [entry["id"] for entry in entries] == [
        *(f"n{i}" for i in range(150)),
        151,
        *(f"n{i}" for i in range(150, 300)),
    ]
    del entries[150]
    assert [entry["completion_tokens"] for entry in entries] == [1 + i % 5 for i in range(300)]
    again = hf_paged.run("generate", "--demo", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    assert again.exit_code == exits.WRONG_USAGE and "--overwrite" in again.stderr


def test_a_pipe_is_answered_as_it_comes_and_ctrl_c_ends_the_waiting(hf_paged: Zygote, tmp_path: Path):
    os.mkfifo(tmp_path / "in")
    process = hf_paged.start("generate", "--demo", "--max-tokens", "3", stdin=tmp_path / "in")
    with (tmp_path / "in").open("w") as pipe:
        for number in (1, 2):
            pipe.write("One, two,\n")
            pipe.flush()
            wait_until(lambda number=number: process.stdout.count("\n") == number or process.has_ended)
        process.signal(signal.SIGINT)
        assert process.wait() == exits.INTERRUPTED
    assert process.stderr.splitlines()[0].startswith("hf-paged: stopped early: 2 answered")
    assert process.stderr.splitlines()[1:] == ["hf-paged: interrupted"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, exits.INTERRUPTED), (signal.SIGTERM, exits.TERMINATED)])
def test_a_signal_leaves_what_is_finished(number: int, code: int, hf_paged: Zygote, tmp_path: Path):
    out = tmp_path / "out.jsonl"
    prompts = "".join(
        json.dumps({"prompt": "x", "max_tokens": 1 + 40 * i, "ignore_eos": True}) + "\n" for i in range(90)
    )
    process = hf_paged.start("generate", "--demo", "-o", out, stdin=prompts)
    wait_until(lambda: process.has_ended or (out.exists() and out.read_bytes().count(b"\n") >= 2))
    process.signal(number)
    assert process.wait() == code
    entries = lines_of(out.read_text())
    assert 2 <= len(entries) < 90 and out.read_bytes().endswith(b"\n")
    assert f"stopped early: {len(entries)} answered" in process.stderr and "Traceback" not in process.stderr


@pytest.mark.parametrize("verb", ["generate", "complete", "chat"])
def test_a_reader_that_goes_away_ends_it(verb: str, hf_paged: Zygote, tmp_path: Path):
    os.mkfifo(tmp_path / "out")
    sampling = ["--max-tokens", "3000", "--temperature", "1.5"]
    process = hf_paged.start(verb, "--demo", *sampling, stdin="Once\n" * 50, stdout=tmp_path / "out")
    with (tmp_path / "out").open("rb") as reader:
        assert reader.read(1)
    assert process.wait() == exits.READER_GONE
    assert process.stderr == ""


def test_ctrl_c_while_python_imports_ends_quietly(demo_is_tiny: dict[str, str]):
    """A true process of its own: what it imports is what is interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_paged", "complete", "--demo", "Hello"],
        env={**os.environ, **demo_is_tiny},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: process.poll() is not None or "libtorch" in maps.read_text())
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == exits.INTERRUPTED and out == ""
    assert errors == "hf-paged: interrupted\n"


def test_a_broken_checkpoint_is_told_in_two_lines(tiny_checkpoint: Path, hf_paged: Zygote, tmp_path: Path):
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 2000 if file.suffix == ".safetensors" else None])
    for arguments in (["complete", tmp_path, "Hi"], ["info", tmp_path]):
        done = hf_paged.run(*arguments)
        assert done.exit_code == exits.FAILED and done.stdout == ""
        first, second = done.stderr.splitlines()[-2:]
        assert first.startswith("hf-paged: ") and "--debug" in second and "Traceback" not in done.stderr
    assert str(tmp_path) in hf_paged.run("complete", tmp_path, "Hi").stderr


def test_debug_shows_the_traceback_anywhere_on_the_line(hf_paged: Zygote):
    done = hf_paged.run("chat", "no-such-folder/x/y", "--debug")
    assert done.exit_code == exits.FAILED and "Traceback" in done.stderr and "no-such-folder" in done.stderr
