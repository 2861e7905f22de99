"""The chat without a model: what is remembered, what commands do, what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_paged.errors import ConfigurationError, EngineClosedError, InvalidRequestError
from hf_paged.tools.terminal.answers import Answer
from hf_paged.tools.terminal.chat import COMMANDS, Chat
from hf_paged.tools.terminal.conversation import Conversation


class Echo:
    """Answers with what it was asked, and how often it has answered."""

    name, max_model_len = "echo", 100

    def __init__(self):
        self.asked: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    def chat(self, messages, sampling, write) -> Answer:
        self.asked.append(([dict(message) for message in messages], dict(sampling)))
        question = messages[-1]["content"]
        if question == "refuse":
            raise InvalidRequestError("too long")
        if question == "die":
            raise EngineClosedError("dead")
        write(f"{question} ")
        if question == "stop":
            raise KeyboardInterrupt
        write(str(len(self.asked)))
        return Answer(f"{question} {len(self.asked)}", "stop", 5, 3, 2, 0.5, 1.5)


class Script:
    """A screen that a test types on."""

    def __init__(self, *lines: str, interactive: bool = True):
        self.interactive = interactive
        self._lines = list(lines)
        self.out = ""
        self.notes: list[str] = []
        self.told: list[str] = []
        self.complaints: list[str] = []

    def read(self) -> str | None:
        return self._lines.pop(0) if self._lines else None

    def write(self, text: str) -> None:
        self.out += text

    def end_answer(self) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    def tell(self, text: str) -> None:
        self.told.append(text)

    def complain(self, text: str) -> None:
        self.complaints.append(text)


def run(*lines: str, interactive: bool = True, conversation: Conversation | None = None, as_json: bool = False):
    screen, echo = Script(*lines, interactive=interactive), Echo()
    chat = Chat(echo, conversation or Conversation(), screen, as_json=as_json)
    chat.run()
    return chat, screen, echo


def said(chat: Chat) -> list[str]:
    return [message["content"] for message in chat.conversation.messages]


def test_a_conversation_has_a_memory():
    chat, screen, echo = run("one", "", "two")
    assert said(chat) == ["one", "one 1", "two", "two 2"]
    assert [message["role"] for message in echo.asked[1][0]] == ["user", "assistant", "user"]
    assert screen.out == "one 1\ntwo 2\n"
    assert screen.notes[0] == "(3 tokens, 2.0 tokens/s, first after 0.50 s, prompt of 5, 2 cached)"


def test_the_system_prompt_is_the_first_message_and_may_go():
    chat, _, echo = run("/system Be brief.", "one", "/system none", "two")
    assert echo.asked[0][0][0] == {"role": "system", "content": "Be brief."}
    assert echo.asked[1][0][0]["role"] == "user"
    assert chat.conversation.system is None


def test_undo_and_clear_forget():
    chat, screen, _ = run("/system S", "one", "two", "/undo")
    assert said(chat) == ["S", "one", "one 1"] and "two" in screen.told[-1]
    chat, *_ = run("/system S", "one", "/clear", "two")
    assert said(chat) == ["S", "two", "two 2"]


def test_regenerate_answers_the_last_question_anew():
    chat, *_ = run("one", "/regenerate")
    assert said(chat) == ["one", "one 2"]
    chat, screen, _ = run("/regenerate")
    assert screen.complaints == ["Nothing has been asked yet."]


def test_a_refused_question_is_no_part_of_the_conversation():
    chat, screen, _ = run("one", "refuse", "two")
    assert said(chat) == ["one", "one 1", "two", "two 3"]
    assert screen.complaints == ["too long"] and chat.failed == 1


def test_a_stopped_answer_stays_on_a_terminal_and_ends_a_pipe():
    chat, screen, _ = run("stop", "two")
    assert said(chat) == ["stop", "stop ", "two", "two 2"]
    assert "stopped" in screen.notes[0]
    with pytest.raises(KeyboardInterrupt):
        run("stop", interactive=False)


def test_an_engine_that_is_dead_ends_the_chat():
    with pytest.raises(EngineClosedError):
        run("die", "one")


def test_parameters_are_set_checked_and_given_back():
    chat, screen, echo = run(
        "/set temperature 0.5", "/set stop END", '/set stop ["a", "b"]', "/set temperature -1", "one",
        "/set temperature", "/set temprature 1", "two",
    )  # fmt: skip
    assert echo.asked[0][1] == {"temperature": 0.5, "stop": ["a", "b"]}
    assert echo.asked[1][1] == {"stop": ["a", "b"]}
    assert "temperature" in screen.complaints[0] and screen.complaints[1].endswith("did you mean temperature?")
    assert chat.failed == 2


def test_an_unknown_command_suggests_the_nearest_and_beginnings_are_enough():
    chat, screen, _ = run("/hlep", "/sys hello", "/s", "//slash")
    assert "did you mean /help?" in screen.complaints[0]
    assert "/system or /set" in screen.complaints[1]
    assert chat.conversation.system == "hello" and said(chat)[1] == "/slash"


def test_help_lists_every_command_and_exit_ends():
    _, screen, echo = run("/help", "/stats", "/history", "/exit", "one")
    assert all(name in screen.told[0] for name in COMMANDS)
    assert "echo" in screen.told[1] and not echo.asked


def test_a_conversation_is_saved_and_loaded(tmp_path: Path):
    file = tmp_path / "talk.json"
    run("/system S", "/set temperature 0.5", "one", f"/save {file}", "two", "/save")
    chat, *_ = run(f"/load {file}", "three")
    assert said(chat) == ["S", "one", "one 1", "two", "two 2", "three", "three 1"]
    assert chat.conversation.sampling == {"temperature": 0.5}
    _, screen, _ = run("one", f"/save {file}", f"/save {tmp_path}/no/where", "/save", "/load", "/load nowhere")
    assert "there already" in screen.complaints[0] and "cannot be written" in screen.complaints[1]
    assert "/save FILE" in screen.complaints[2] and "/load FILE" in screen.complaints[3]
    assert "cannot be read" in screen.complaints[4]
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{oops", "not JSON"),
        ("3", "no conversation"),
        ('[{"role": "user"}]', "no conversation"),
        ('[{"role": "nobody", "content": "x"}]', "no conversation"),
        ('{"messages": [], "sampling": {"colour": 1}}', "`sampling` may have"),
        ('[{"role": "user", "content": "a\\ud800"}]', "no conversation.*whole characters"),
        ('[{"role": ["user"], "content": "a"}]', "no conversation"),
        ("[" * 200_000, "too deep"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        Conversation.load(tmp_path / "file")


@pytest.mark.parametrize("name", ["x" * 300, "~nobodyx/file", "a\0b", "x" * 300 + "/file"])
def test_a_name_that_no_file_can_have_does_not_end_the_chat(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat, screen, _ = run("one", f"/save {name}", f"/load {name}", "two")
    assert said(chat) == ["one", "one 1", "two", "two 2"] and chat.failed == 2
    assert "cannot be written: " in screen.complaints[0] and "cannot be read: " in screen.complaints[1]
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_text_does_not_end_the_chat(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"\xff\xfe")
    chat, screen, _ = run("one", f"/load {tmp_path / 'file'}")
    assert said(chat) == ["one", "one 1"] and "is not JSON" in screen.complaints[0]


def test_answers_as_json_are_an_object_a_line():
    _, screen, _ = run("one", "two", interactive=False, as_json=True)
    answers = [json.loads(line) for line in screen.out.splitlines()]
    assert [answer["text"] for answer in answers] == ["one 1", "two 2"]
    assert answers[0]["completion_tokens"] == 3 and answers[0]["tokens_per_s"] == 2.0
