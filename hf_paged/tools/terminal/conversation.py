"""A conversation: what was said, how answers are sampled, and the file that both are kept in."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError, InvalidRequestError
from ...generation.sampling.params import SamplingParams
from .texts import has_surrogates, to_json

PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"),
)
_ROLES = ("system", "user", "assistant", "tool")
# Of a name that is too long, holds a NUL or begins with the ~ of nobody.
_NO_SUCH_FILE = (OSError, ValueError, RuntimeError)


@dataclasses.dataclass
class Conversation:
    """Messages, and the sampling parameters that were given.

    Args:
        messages (`list[dict[str, Any]]`, defaults to `[]`):
            With `role` and `content`; a system message is the first.
        sampling (`dict[str, Any]`, defaults to `{}`):
            Fields of `SamplingParams`.
        file (`Path`, *optional*):
            Where it was read from or written to last.
    """

    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    file: Path | None = None

    @property
    def system(self) -> str | None:
        """Returns the system prompt, if there is one."""
        if self.messages and self.messages[0]["role"] == "system":
            return self.messages[0]["content"]
        return None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def add(self, role: str, content: str) -> None:
        """Adds a message.

        Args:
            role (`str`):
                Who speaks.
            content (`str`):
                What.
        """
        self.messages.append({"role": role, "content": content})

    def clear(self) -> None:
        """Forgets all but the system prompt and the parameters."""
        self.messages = self.messages[:1] if self.system is not None else []

    def undo(self) -> str:
        """Takes the last question back, and whatever came after it. Returns the question.

        Raises:
            InvalidRequestError: If there is none.
        """
        for place in range(len(self.messages) - 1, -1, -1):
            if self.messages[place]["role"] == "user":
                question = self.messages[place]["content"]
                del self.messages[place:]
                return question
        raise InvalidRequestError("Nothing has been asked yet.")

    def set(self, name: str, text: str) -> None:
        """Sets a sampling parameter, or gives it back to the model's default.

        Args:
            name (`str`):
                Which.
            text (`str`):
                Its value, as JSON or a text; empty or `default` for the default.

        Raises:
            InvalidRequestError: If there is no such parameter, or its value is impossible.
        """
        name = name.replace("-", "_")
        if name not in PARAMETERS:
            close = difflib.get_close_matches(name, PARAMETERS, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PARAMETERS)}."
            raise InvalidRequestError(f"There is no parameter {name!r}; {hint}")
        if text in ("", "default"):
            self.sampling.pop(name, None)
            return
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        changed = self.sampling | {name: value if name != "stop" else _texts(value, text)}
        SamplingParams(**changed)
        self.sampling = changed

    def save(self, path: Path) -> None:
        """Writes the conversation, whole or not at all. A file of something else is not replaced.

        Args:
            path (`Path`):
                The file.

        Raises:
            ConfigurationError: If it cannot be written, or is there already.
        """
        text = to_json({"messages": self.messages, "sampling": self.sampling}, indent=2)
        try:
            path = path.expanduser()
            if path.exists() and (self.file is None or not path.samefile(self.file)):
                raise ConfigurationError(f"{str(path)!r} is there already; name another file.")
            handle, unfinished = tempfile.mkstemp(prefix=".hf_paged-", dir=path.absolute().parent)
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(text + "\n")
                os.replace(unfinished, path)
            except BaseException:
                os.unlink(unfinished)
                raise
        except ConfigurationError:  # which is a ValueError, too
            raise
        except _NO_SUCH_FILE as error:
            raise ConfigurationError(f"{str(path)!r} cannot be written: {_reason(error)}.") from None
        self.file = path

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Reads what `save` wrote, or a list of messages.

        Args:
            path (`Path`):
                The file.

        Raises:
            ConfigurationError: If it cannot be read, or is no conversation.
        """
        try:
            path = path.expanduser()
            content = path.read_bytes()
        except _NO_SUCH_FILE as error:
            raise ConfigurationError(f"{str(path)!r} cannot be read: {_reason(error)}.") from None
        try:
            found = json.loads(content.decode("utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{str(path)!r} is not JSON: {error}.") from None
        except RecursionError:
            raise ConfigurationError(f"{str(path)!r} is no conversation: its lists are too deep.") from None
        found = found if isinstance(found, dict) else {"messages": found}
        messages, sampling = found.get("messages"), found.get("sampling") or {}
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise ConfigurationError(
                f"{str(path)!r} holds no conversation: a list of messages with `role` ({', '.join(_ROLES)}) and "
                "`content`, a text of whole characters."
            )
        if not isinstance(sampling, dict) or set(sampling) - set(PARAMETERS):
            raise ConfigurationError(f"{str(path)!r}: `sampling` may have {', '.join(PARAMETERS)}.")
        SamplingParams(**sampling)
        return cls(messages, sampling, path)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return False
    content = message.get("content")
    return isinstance(content, str) and not has_surrogates(content)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _texts(value: Any, text: str) -> list[str]:
    """Stop strings: a list of them, or the words as they are."""
    return value if isinstance(value, list) else [value if isinstance(value, str) else text]
