"""What the command line of a gateway's script makes of arguments, findings and troubles."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from benchmarks.cpu.environments import PeerUnavailableError
from examples.gateways.common import program
from examples.gateways.common.checks import AFTER, Findings, Phase
from examples.gateways.common.load import LOST, Outcome
from examples.gateways.common.program import Gateway, main

GOOD = Findings([Phase(AFTER, [Outcome("answered", seconds=1.0)])], 0.1, blocks_free=True)
BAD = Findings([Phase(AFTER, [Outcome(LOST, "502: gone")])], 0.1, blocks_free=True)


def gateway(trouble: BaseException | None = None) -> Gateway:
    def prepare(log) -> Path:
        if trouble is not None:
            raise trouble
        return Path("nowhere")

    return Gateway("A gateway 1.0", prepare, contextlib.nullcontext, ("known: it is slow",))


@pytest.fixture(autouse=True)
def signals_as_before(monkeypatch):
    """What SIGTERM does to the process that runs the tests is not a gateway's business."""
    monkeypatch.setattr(program, "end_servers_when_terminated", lambda: None)


@pytest.mark.parametrize(("found", "code"), [(GOOD, 0), (BAD, 1)])
def test_the_exit_code_and_the_file_say_what_was_found(found, code, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(program, "_run", lambda *arguments: found)
    figures = tmp_path / "new" / "figures.json"
    assert main(gateway(), ["--json", str(figures)]) == code
    told, said = json.loads(figures.read_text()), capsys.readouterr().out
    assert told["problems"] == found.problems() and "known: it is slow" in told["notes"]
    assert "A gateway 1.0 with our settings" in said and ("502: gone" in said) == bool(code)


@pytest.mark.parametrize(
    ("trouble", "code", "words"),
    [
        (PeerUnavailableError("npm is not installed"), 1, "A gateway 1.0: npm is not installed"),
        (OSError("no space left"), 1, "no space left"),
        (KeyboardInterrupt(), 130, "all that was started has been ended"),
    ],
)
def test_troubles_are_a_line_and_an_exit_code(trouble, code, words, capsys):
    assert main(gateway(trouble), []) == code
    assert words in capsys.readouterr().err


def test_a_folder_that_holds_no_model_is_refused_before_anything_is_started(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(gateway(AssertionError("it is started")), ["--model", str(tmp_path)])
    assert ended.value.code == 2 and "has no config.json" in capsys.readouterr().err
