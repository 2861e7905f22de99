"""Calls written as JSON objects with a name and arguments: Hermes, Qwen, Llama 3, Mistral, and forced calls."""

from __future__ import annotations

import json
import re
from string import hexdigits
from typing import Any

from ..incremental_reader import SPACES, Reading, Sink
from .base import ToolParser, is_valid_text

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_LONGEST_WORD = 256  # characters of a key or name, in quotes
_BETWEEN = re.compile(r"[\s\w+\-.:,]*")  # between the strings and brackets of a JSON value
_SCALAR = re.compile(r"[\w+\-.]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NAME = re.compile(r"[\w.\-/:]*")
_IS_NAME = re.compile(r"[\w.\-/:]+")
_SEPARATORS = re.compile(r"[\s;,]*")
_ESCAPED = frozenset('"\\/bfnrtu')


class JsonToolParser(ToolParser):
    """Reads JSON values piece by piece and gives them out as the model wrote them.

    Two slips of models inside strings are mended, since they would spoil the whole: control characters (line breaks of
    code, above all) are escaped, and so is a backslash that escapes nothing.
    """

    def _value(self, sink: Sink) -> Reading[bool]:
        """Reads one JSON value; returns whether it is complete. Stops before a character that no JSON has there."""
        reader, depth = self._reader, 0
        character = yield from reader.peek()
        if character not in ('"', "{", "["):
            return bool((yield from self._scalar(sink)))
        while True:
            if character == '"':
                if not (yield from self._string(sink)):
                    return False
            elif character and character in "{}[]":
                sink((yield from reader.take()))
                depth += 1 if character in "{[" else -1
            else:
                return False
            if not depth:
                return True
            yield from reader.run(_BETWEEN, sink)
            character = yield from reader.peek()

    def _scalar(self, sink: Sink) -> Reading[str]:
        text = yield from self._reader.word(_SCALAR)
        sink(text)
        return text

    def _string(self, sink: Sink) -> Reading[bool]:
        """Reads a string with its quotes; returns whether it is complete."""
        reader = self._reader
        sink((yield from reader.take()))
        while True:
            yield from reader.run(_PLAIN, sink)
            character = yield from reader.peek()
            if character == "\\":
                sink((yield from self._escape()))
            elif character == '"':
                sink((yield from reader.take()))
                return True
            elif character:
                sink(json.dumps((yield from reader.take()))[1:-1])
            else:
                return False

    def _escape(self) -> Reading[str]:
        """Reads what a backslash escapes and returns it; if that is nothing that JSON knows, with two backslashes."""
        reader = self._reader
        backslash = yield from reader.take()
        character = yield from reader.peek()
        if not character or character not in _ESCAPED:
            return backslash * 2 if character else backslash
        escaped = yield from reader.take()
        if escaped == "u":
            for _ in range(4):
                character = yield from reader.peek()
                if character and character not in hexdigits:
                    return backslash * 2 + escaped
                escaped += yield from reader.take()
        return backslash + escaped

    def _word(self) -> Reading[str]:
        """Reads a short string, such as a key or a name, and returns what it says; nothing if it is none."""
        reader, parts = self._reader, []
        if (yield from reader.peek()) != '"':
            return ""
        parts.append((yield from reader.take()))
        while len(parts) < _LONGEST_WORD:
            character = yield from reader.take()
            parts.append(character + ((yield from reader.take()) if character == "\\" else ""))
            if character in ('"', ""):
                break
        return _loads_string("".join(parts))

    def _call_object(self, marked: bool) -> Reading[bool]:
        """Reads `{"name": ..., "arguments": {...}}`, in any order; returns whether a call was started."""
        started = self.num_calls
        call = _CallObject()
        more = yield from self._reader.accept("{")
        while more:
            yield from self._reader.run(SPACES)
            more = (yield from self._member(call, marked)) and (yield from self._next_member(call, marked))
        return self.num_calls > started

    def _member(self, call: _CallObject, marked: bool) -> Reading[bool]:
        """Reads one key and its value; returns whether this may still be, or is, a call."""
        reader = self._reader
        key = yield from self._word()
        yield from reader.run(SPACES)
        if not (marked or key in _KEYS) or not (yield from reader.accept(":")):
            return False
        yield from reader.run(SPACES)
        if key == "name" and call.name is None:
            call.name = yield from self._word()
            if not _IS_NAME.fullmatch(call.name) or not self._may_call(call.name, marked):
                return False
            if call.arguments is not None:
                self._start_call(call.name)
                self._emit_arguments(call.arguments)
            return True
        if key in _ARGUMENTS and call.arguments is None:
            return (yield from self._arguments(call))
        return (yield from self._value(_ignore))

    def _arguments(self, call: _CallObject) -> Reading[bool]:
        """Reads the arguments: as they come if they are an object and the name is known, as a whole otherwise."""
        if call.name is not None and (yield from self._reader.peek()) == "{":
            call.arguments = ""
            self._start_call(call.name)
            return (yield from self._value(self._emit_arguments))
        parts: list[str] = []
        complete = yield from self._value(parts.append)
        if complete:
            call.arguments = _as_object("".join(parts))
            if call.name is not None:
                self._start_call(call.name)
                self._emit_arguments(call.arguments)
        return complete

    def _next_member(self, call: _CallObject, marked: bool) -> Reading[bool]:
        """Reads the comma before another member, or the object's end."""
        yield from self._reader.run(SPACES)
        if (yield from self._reader.accept(",")):
            return True
        if (yield from self._reader.accept("}")) and marked and call.name is not None and call.arguments is None:
            self._start_call(call.name)
            self._emit_arguments("{}")
        return False

    def _call_array(self, marked: bool) -> Reading[None]:
        """Reads `[{...}, {...}]`."""
        reader = self._reader
        more = yield from reader.accept("[")
        while more:
            yield from reader.run(SPACES)
            if not (yield from self._call_object(marked)):
                return
            reader.record()
            yield from reader.run(SPACES)
            more = yield from reader.accept(",")
            if not more and (yield from reader.accept("]")):
                reader.recorded()


class _CallObject:
    """What is known of the call that is being read."""

    name: str | None = None
    arguments: str | None = None


class HermesToolParser(JsonToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call: Hermes, Qwen 2.5, Qwen 3."""

    opens = ("<tool_call>",)
    closes = ("</tool_call>",)

    def _calls(self, marker: str) -> Reading[None]:
        while (yield from self._call_object(bool(marker))):
            self._reader.record()
            yield from self._reader.run(SPACES)


class Llama3JsonToolParser(JsonToolParser):
    """`{"name": ..., "parameters": {...}}` at the answer's beginning or after `<|python_tag|>`, several after `;`."""

    opens = ("<|python_tag|>",)
    bare = True

    def _calls(self, marker: str) -> Reading[None]:
        reader, marked = self._reader, bool(marker)
        while (yield from self._call_object(marked)):
            reader.record()
            yield from reader.run(_SEPARATORS)
            marked = (yield from reader.accept(self.opens[0])) or marked
            yield from reader.run(SPACES)
            if not (yield from reader.peek()):
                reader.recorded()  # a separator at the end separates nothing


class MistralToolParser(JsonToolParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or since tokenizer 11 `[TOOL_CALLS]name[ARGS]{...}`."""

    opens = ("[TOOL_CALLS]",)
    id_style = "mistral"

    @classmethod
    def markers(cls) -> frozenset[str]:
        return super().markers() | {"[ARGS]", "[CALL_ID]"}

    def _calls(self, marker: str) -> Reading[None]:
        character = yield from self._reader.peek()
        if character == "[":
            yield from self._call_array(bool(marker))
        elif character == "{":
            yield from self._call_object(bool(marker))
        else:
            yield from self._named_call()

    def _named_call(self) -> Reading[None]:
        reader = self._reader
        name = yield from reader.word(_NAME)
        if (yield from reader.accept("[CALL_ID]")):
            yield from reader.run(_NAME)
        yield from reader.accept("[ARGS]")
        yield from reader.run(SPACES)
        if name and self._may_call(name, True) and (yield from reader.peek()) == "{":
            self._start_call(name)
            yield from self._value(self._emit_arguments)


class RequiredToolParser(JsonToolParser):
    """`[{"name": ..., "parameters": {...}}, ...]` and nothing else: what `tool_choice="required"` forces."""

    bare = True

    def _calls(self, marker: str) -> Reading[None]:
        yield from self._call_array(bool(marker))


class NamedToolParser(JsonToolParser):
    """The arguments alone: what a `tool_choice` that names a function forces.

    Args:
        name (`str`):
            The function.
    """

    bare = True

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def _calls(self, marker: str) -> Reading[None]:
        if (yield from self._reader.peek()) == "{":
            self._start_call(self._name)
            yield from self._value(self._emit_arguments)


def _ignore(text: str) -> None:
    """A sink for what nobody needs."""


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _loads_string(text: str) -> str:
    value = _loads(text)
    return value if isinstance(value, str) and is_valid_text(value) else ""


def _as_object(text: str) -> str:
    """Arguments that may be wrapped in a string once more, or be null, as the text of an object where possible."""
    if text == "null":
        return "{}"
    inner = _loads_string(text)
    return inner if isinstance(_loads(inner), dict) else text
