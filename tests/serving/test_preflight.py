"""What is refused before a model is loaded; test_api_server.py has what the command line makes of it."""

from __future__ import annotations

import contextlib
import re
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled, RemoteEntryNotFoundError, RepositoryNotFoundError

from hf_paged.errors import ConfigurationError
from hf_paged.serving.preflight import check_model, load_chat_template


def test_models_that_are_not_there_are_told_at_once(tmp_path):
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "a.gguf").touch()
    (tmp_path / "file.txt").touch()
    for name, message in {
        "/no/such/path": "There is no folder '/no/such/path', and it is no name on the Hub either",
        "./nosuch": "There is no folder './nosuch', and it is no name on the Hub either (ORGANISATION/NAME)",
        str(tmp_path / "file.txt"): "is a file; MODEL is a folder",
        str(
            tmp_path / "gguf"
        ): f"holds no config.json, so it is no model. Name the file to serve: {tmp_path}/gguf/a.gguf.",
    }.items():
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            check_model(name)
    check_model(str(tmp_path / "gguf" / "a.gguf"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE is set"),
        (OSError("Name or service not known"), "the Hub cannot be reached: Name or service not known."),
        (RepositoryNotFoundError("no", response=Mock()), "no such model on the Hub (or it is private"),
        (RemoteEntryNotFoundError("no config.json", response=Mock()), None),
    ],
)
def test_the_hub_is_asked_once_for_a_name(error, message, monkeypatch):
    check_model.cache_clear()
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", Mock(side_effect=error))
    expected = pytest.raises(ConfigurationError, match=re.escape(message)) if message else contextlib.nullcontext()
    with expected:
        check_model("no-such-organisation/model")
    check_model.cache_clear()


def test_a_template_is_a_file_or_a_text(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}", encoding="utf-8")
    assert load_chat_template(str(file)) == load_chat_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigurationError, match="--chat-template"):
        load_chat_template(str(tmp_path / "missing.jinja"))
