"""A chat: questions in, answers out, commands that begin with a slash."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import EngineClosedError, HfPagedError, InvalidRequestError
from .answers import Answer, Answerer
from .conversation import PARAMETERS, Conversation
from .screen import Screen
from .texts import to_json


class Chat:
    """Talks until the input ends, or `/exit`.

    Args:
        answerer (`Answerer`):
            Who answers.
        conversation (`Conversation`):
            What was said before, and how answers are sampled.
        screen (`Screen`):
            Where questions come from and answers go to.
        as_json (`bool`, defaults to `False`):
            Write an object a line for each answer, in place of its text.
    """

    def __init__(self, answerer: Answerer, conversation: Conversation, screen: Screen, *, as_json: bool = False):
        self.conversation = conversation
        self._answerer = answerer
        self._screen = screen
        self._as_json = as_json
        self._last: Answer | None = None
        self._num_answers = 0
        self._num_tokens = 0
        self.failed = 0
        self._ended = False

    def run(self) -> None:
        """Answers until there is nothing more to answer.

        Raises:
            KeyboardInterrupt: On Ctrl-C where no answer is being made.
            EngineClosedError: If the engine has died.
        """
        while not self._ended:
            said = self._screen.read()
            if said is None:
                return
            if not said.strip():
                continue
            try:
                self._take(said)
            except EngineClosedError:
                raise
            except HfPagedError as error:
                self.failed += 1
                self._screen.complain(str(error))

    def _take(self, said: str) -> None:
        if said.startswith("//"):
            self._ask(said[1:])
        elif said.startswith("/"):
            self._command(said)
        else:
            self._ask(said)

    # ------------------------------------------------------------------ questions

    def _ask(self, question: str) -> None:
        before = list(self.conversation.messages)
        self.conversation.add("user", question)
        pieces: list[str] = []

        def write(text: str) -> None:
            pieces.append(text)
            if not self._as_json:
                self._screen.write(text)

        try:
            answer = self._answerer.chat(self.conversation.messages, self.conversation.sampling, write)
        except KeyboardInterrupt:
            self._stopped("".join(pieces), before)
            return
        except BaseException:
            self.conversation.messages = before  # a question without an answer is not a part of it
            raise
        self.conversation.add("assistant", answer.text)
        self._ended_well(answer)

    def _ended_well(self, answer: Answer) -> None:
        self._last, self._num_answers = answer, self._num_answers + 1
        self._num_tokens += answer.completion_tokens or 0
        if self._as_json:
            self._screen.write(to_json(answer.to_dict()) + "\n")
        elif not answer.text.endswith("\n"):
            self._screen.write("\n")
        self._screen.note(f"({answer.describe()})")

    def _stopped(self, text: str, before: list[dict[str, Any]]) -> None:
        """Ctrl-C: on a terminal what was said so far stays said; elsewhere it ends the program."""
        if not self._screen.interactive:
            self._screen.end_answer()
            raise KeyboardInterrupt
        if text:
            self.conversation.add("assistant", text)
            self._screen.note("(stopped; Ctrl-C once more ends the chat)")
        else:
            self.conversation.messages = before
            self._screen.note("(stopped, the question is taken back; Ctrl-C once more ends the chat)")

    # ------------------------------------------------------------------ commands

    def _command(self, said: str) -> None:
        name, _, rest = said.partition(" ")
        names = [known for known in COMMANDS if known == name] or [c for c in COMMANDS if c.startswith(name)]
        if len(names) != 1:
            close = names or difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else "/help lists the commands."
            raise InvalidRequestError(f"There is no command {name}; {hint} (A message with a slash begins with //.)")
        COMMANDS[names[0]][0](self, rest.strip())

    def _help(self, _: str) -> None:
        width = max(len(f"{name} {arguments}") for name, (_, arguments, _) in COMMANDS.items())
        lines = [f"{f'{name} {arguments}':{width}}  {text}" for name, (_, arguments, text) in COMMANDS.items()]
        lines.append('Lines between two """ belong together, and a line that ends with \\ goes on in the next.')
        lines.append("Ctrl-C stops an answer; at the prompt it ends the chat, as Ctrl-D does.")
        self._screen.tell("\n".join(lines))

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "none" else text
        system = self.conversation.system
        self._screen.tell(f"System prompt: {system}" if system else "There is no system prompt.")

    def _clear(self, _: str) -> None:
        self.conversation.clear()
        self._screen.tell("Forgotten, but for the system prompt and the parameters.")

    def _regenerate(self, _: str) -> None:
        before = list(self.conversation.messages)
        question = self.conversation.undo()
        try:
            self._ask(question)
        finally:
            if not self.conversation.messages or self.conversation.messages[-1]["role"] != "assistant":
                self.conversation.messages = before

    def _undo(self, _: str) -> None:
        question = self.conversation.undo()
        self._screen.tell(f"Taken back: {question}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name:
            self.conversation.set(name, value.strip())
        given = ", ".join(f"{key} {value}" for key, value in self.conversation.sampling.items())
        self._screen.tell(f"Parameters: {given or 'the defaults of the model'}. There are {', '.join(PARAMETERS)}.")

    def _save(self, name: str) -> None:
        if not name and self.conversation.file is None:
            raise InvalidRequestError("Name a file: /save FILE.")
        self.conversation.save(Path(name) if name else self.conversation.file or Path())
        self._screen.tell(f"Saved {len(self.conversation.messages)} messages to {self.conversation.file}.")

    def _load(self, name: str) -> None:
        if not name:
            raise InvalidRequestError("Name a file: /load FILE.")
        self.conversation = Conversation.load(Path(name))
        self._screen.tell(f"Loaded {len(self.conversation.messages)} messages.")

    def _history(self, _: str) -> None:
        lines = [f"{message['role']}: {message['content']}" for message in self.conversation.messages]
        self._screen.tell("\n".join(lines) or "Nothing has been said yet.")

    def _stats(self, _: str) -> None:
        limit = self._answerer.max_model_len
        lines = [f"Model {self._answerer.name}" + (f", context of {limit} tokens" if limit else "")]
        lines.append(f"{self._num_answers} answers, {self._num_tokens} tokens")
        if self._last is not None:
            lines.append(f"Last: {self._last.describe()}")
        self._screen.tell("\n".join(lines))

    def _exit(self, _: str) -> None:
        self._ended = True


# Name -> what it does, its arguments, its help.
COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str, str]] = {
    "/help": (Chat._help, "", "This list."),
    "/system": (Chat._system, "[TEXT]", "Show or set the system prompt; none removes it."),
    "/set": (Chat._set, "[NAME [VALUE]]", "Show or set a sampling parameter; without a value the default."),
    "/regenerate": (Chat._regenerate, "", "Answer the last question anew."),
    "/undo": (Chat._undo, "", "Take the last question and its answer back."),
    "/clear": (Chat._clear, "", "Forget what was said."),
    "/history": (Chat._history, "", "Show what was said."),
    "/save": (Chat._save, "[FILE]", "Write the conversation to a file."),
    "/load": (Chat._load, "FILE", "Go on with the conversation of a file."),
    "/stats": (Chat._stats, "", "Show model, tokens and speed."),
    "/exit": (Chat._exit, "", "End the chat; so do /quit and Ctrl-D."),
    "/quit": (Chat._exit, "", "End the chat."),
}
