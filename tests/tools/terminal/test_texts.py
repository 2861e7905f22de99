"""Texts of a server or a model that would do something to a terminal."""

from __future__ import annotations

import json
import sys

import pytest

from hf_paged.tools.terminal.generate import GenerateSummary
from hf_paged.tools.terminal.screen import Screen
from hf_paged.tools.terminal.texts import printable, to_json

ODD = "Grö\x1b[31mße\x07\x7f\x9b2J\u202e\u2066\ud800\n\tend"


def test_what_a_terminal_would_obey_is_shown():
    assert printable(ODD) == "Grö\ufffd[31mße\ufffd\ufffd\ufffd2J\ufffd\ufffd\ufffd\n\tend"
    assert printable("שלום, 世界 👩‍💻") == "שלום, 世界 👩‍💻"


def test_json_says_the_same_without_what_a_terminal_would_obey():
    text = to_json({"text": ODD})
    assert printable(text) == text and "Grö" in text and json.loads(text) == {"text": ODD}


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_on_stderr_is_obeyed_by_a_terminal(terminal: bool, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen()
    screen.interactive = True
    for say in (screen.note, screen.tell, screen.complain):
        say("a\x1b]0;title\x07\x9b2Jb")
        assert capsys.readouterr().err == "a\ufffd]0;title\ufffd\ufffd2Jb\n"


def test_the_first_error_of_many_prompts_is_not_obeyed_by_a_terminal():
    summary = GenerateSummary()
    summary.count({"error": {"message": "no \x1b[2J"}})
    assert summary.describe().endswith("1 failed; the first: no \ufffd[2J")
