"""Prompts, one a line, as text or as JSON; what is wrong with a line is told in its place.

The capital of France is
{"prompt": "The capital of France is", "max_tokens": 5}
{"id": "a", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from ...errors import InvalidRequestError
from ...generation.sampling.params import DEFAULTS

Format = Literal["text", "jsonl"]

_CONTENTS = ("prompt", "messages")
_NAMES = ("id", "custom_id")
# Not of a line: several answers, or what has no place in the output.
_UNFIT = ("n", "logprobs", "prompt_logprobs", "detokenize", "spaces_between_special_tokens")
SAMPLING_FIELDS = tuple(name for name in DEFAULTS if name not in _UNFIT)
_BLANK = b" \t\r\n\xef\xbb\xbf"  # the last three are a BOM
_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class PromptLine:
    """A line of the input.

    Args:
        id (`Any`):
            Its own, or the number of the line, from 1.
        prompt (`str` or `list[int]`, *optional*):
            A text, or token ids.
        messages (`list[dict[str, Any]]`, *optional*):
            A conversation, in place of a prompt.
        sampling (`Mapping[str, Any]`, defaults to `{}`):
            Fields of `SamplingParams` of its own.
        error (`str`, *optional*):
            Why it cannot be answered.
    """

    id: Any
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None


def parse_lines(lines: Iterable[bytes], form: Format | None) -> Iterator[PromptLine]:
    """Returns lines as they are read; blank ones are left out.

    Args:
        lines (`Iterable[bytes]`):
            Of a file.
        form (`str`, *optional*):
            `"text"` or `"jsonl"`; by default JSON if the first line is an object with a prompt or messages.
    """
    for number, line in enumerate(lines, 1):
        found = parse_line(number, line, form)
        if found is not None:
            form, parsed = found
            yield parsed


def parse_line(number: int, line: bytes, form: Format | None) -> tuple[Format, PromptLine] | None:
    """Returns what a line is, or `None` for a blank one.

    Args:
        number (`int`):
            Of the line, from 1.
        line (`bytes`):
            The line.
        form (`str`, *optional*):
            `"text"` or `"jsonl"`; by default JSON if it is an object with a prompt or messages.
    """
    if not line.strip(_BLANK):
        return None
    line = line.removeprefix(_BOM)
    if form is None:
        form = "jsonl" if _looks_like_a_request(line) else "text"
    try:
        return form, _from_json(number, line) if form == "jsonl" else PromptLine(number, _decoded(line).rstrip("\r\n"))
    except InvalidRequestError as error:
        return form, PromptLine(number, error=f"Line {number}: {error}")


def _looks_like_a_request(line: bytes) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and any(name in found for name in _CONTENTS)


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"it is no text in UTF-8 ({error.reason} at byte {error.start}).") from None


def _from_json(number: int, line: bytes) -> PromptLine:
    text = _decoded(line)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"it is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"a request is a JSON object, not {type(fields).__name__}.")
    name = next((fields[key] for key in _NAMES if fields.get(key) is not None), number)
    try:
        return _checked(name, fields)
    except InvalidRequestError as error:
        return PromptLine(name, error=f"Line {number}: {error}")


def _checked(name: Any, fields: dict[str, Any]) -> PromptLine:
    known = (*_NAMES, *_CONTENTS, *SAMPLING_FIELDS)
    for field in fields:
        if field not in known:
            close = difflib.get_close_matches(field, known, n=1, cutoff=0.7)
            hint = f"; did you mean `{close[0]}`?" if close else f"; there are {', '.join(known)}."
            raise InvalidRequestError(f"unknown field `{field}`{hint}")
    given = [field for field in _CONTENTS if fields.get(field) is not None]
    if len(given) != 1:
        raise InvalidRequestError("give either `prompt` (a text or token ids) or `messages`.")
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if prompt is not None and not (isinstance(prompt, str) or _are_tokens(prompt)):
        raise InvalidRequestError("`prompt` must be a text or a list of token ids.")
    if messages is not None and not (messages and isinstance(messages, list) and all(map(_is_message, messages))):
        raise InvalidRequestError("`messages` must be a list of objects with `role` and `content`, both texts.")
    _check_characters(fields)
    return PromptLine(name, prompt, messages, {field: fields[field] for field in SAMPLING_FIELDS if field in fields})


def _are_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _check_characters(fields: dict[str, Any]) -> None:
    """JSON can write halves of characters, which no file can hold."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("it holds half of a character (a lone surrogate).") from None
