"""What a bug report gets to see, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path

from hf_paged.tools import environment
from hf_paged.tools.environment import collect_environment, describe_environment, relevant_variables


def test_variables_that_matter_are_shown_and_secrets_are_not():
    given = {
        "HF_TOKEN": "hf_secret",
        "HF_PAGED_API_KEY": "secret",
        "HF_PAGED_API_KEY_FILE": "/secret",
        "HF_ENDPOINT": "https://user:secret@example.org/hub",
        "HF_HOME": str(Path.home() / "hub"),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "2",
        "AWS_SECRET": "secret",
        "PATH": "/bin",
    }
    found = relevant_variables(given)
    assert "secret" not in json.dumps(found).replace("(set, not shown)", "")
    assert found["HF_TOKEN"] == found["HF_PAGED_API_KEY"] == "(set, not shown)"
    assert found["HF_ENDPOINT"] == "https://example.org/hub"
    assert found["TOKENIZERS_PARALLELISM"] == "false" and found["HF_HOME"] == "~/hub"
    assert not {"PATH", "AWS_SECRET"} & set(found)


def test_a_report_says_what_is_used_and_builds_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    found = collect_environment()
    assert found["versions"]["torch"] and found["versions"]["hf-paged"]
    assert found["torch"]["threads"] >= 1 and found["processor"]["usable_cores"] >= 1
    assert found["cache"] == {"folder": str(tmp_path / "cache"), "exists": False, "writable": True}
    assert not (tmp_path / "cache").exists()
    text = describe_environment(json.loads(json.dumps(found)))
    assert "torch: threads" in text and "native: levels" in text and "writable yes" in text


def test_a_part_that_cannot_be_found_does_not_spoil_the_rest(monkeypatch):
    def broken() -> None:
        raise OSError("no such\nthing")

    monkeypatch.setattr(environment, "_torch", broken)
    found = collect_environment()
    assert found["torch"] == "unknown (OSError: no such thing)"
    assert "torch: unknown" in describe_environment(found)
