"""Calls written as tags around each argument: Qwen3-Coder and Qwen 3.5."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..incremental_reader import SPACES, Markers, Reading
from .base import ToolParser

_NAME = re.compile(r"[\w.\-/:]*")
_KEY = re.compile(r"[^<>\n]*")
_END = Markers(["</parameter>"])
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's, which models mix in
_TYPES: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


class Qwen3CoderToolParser(ToolParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    Values are bare text, so what they are is read from the function's schema: the text of a string is given out as it
    comes, and all else when it is complete, as the JSON that it is or, if it is none, as a string. Without a schema
    whatever is JSON is taken as JSON.
    """

    opens = ("<tool_call>", "<function=")  # the first is at times forgotten
    closes = ("</tool_call>",)

    def _calls(self, marker: str) -> Reading[None]:
        reader = self._reader
        more = marker == "<function=" or (yield from reader.accept("<function="))
        while more and (yield from self._function()):
            reader.record()
            yield from reader.run(SPACES)
            more = yield from reader.accept("<function=")

    def _function(self) -> Reading[bool]:
        """Reads a function and its arguments; returns whether all of it was there."""
        reader, started = self._reader, False
        name = yield from reader.word(_NAME)
        if not name or not self._may_call(name, True) or not (yield from reader.accept(">")):
            return False
        yield from reader.run(SPACES)
        while (yield from reader.accept("<parameter=")):
            key = yield from reader.word(_KEY)
            if not key.strip() or not (yield from reader.accept(">")):
                return False
            if not started:
                self._start_call(name)
            self._emit_arguments(f"{', ' if started else '{'}{json.dumps(key.strip())}: ")
            started = True
            if not (yield from self._argument(name, key.strip())):
                return False
            reader.record()
            yield from reader.run(SPACES)
        if not (yield from reader.accept("</function>")):
            return False
        if not started:
            self._start_call(name)
        self._emit_arguments("}" if started else "{}")
        return True

    def _argument(self, name: str, key: str) -> Reading[bool]:
        """Reads a value up to its closing tag; one line break on either side belongs to the tags."""
        reader, types = self._reader, _types(self._schema(name, key))
        yield from reader.accept("\n")
        if types != {"string"}:
            parts: list[str] = []
            complete = bool((yield from reader.until(_END, parts.append)))
            text = "".join(parts)
            self._emit_arguments(_to_json(text.removesuffix("\n"), types) if complete else text)
            return complete
        line_break = ""  # held back, since the closing tag may follow

        def emit(text: str) -> None:
            nonlocal line_break
            text = line_break + text
            line_break = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
            if text:
                self._emit_arguments(_escaped(text))

        self._emit_arguments('"')
        complete = bool((yield from reader.until(_END, emit)))
        self._emit_arguments('"' if complete else _escaped(line_break))
        return complete

    def _schema(self, name: str, key: str) -> Any:
        parameters = (self._functions or {}).get(name)
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        return properties.get(key) if isinstance(properties, Mapping) else None


def _types(schema: Any) -> set[str]:
    """The types that a schema names, also in `anyOf`; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    choices = [schema, *_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    named = [name for choice in choices if isinstance(choice, Mapping) for name in _list(choice.get("type"))]
    return {name for name in named if isinstance(name, str)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _to_json(text: str, types: set[str]) -> str:
    """The text itself if it is JSON, and of a type that is allowed where strings are allowed too; else as a string."""
    source = _WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(source, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = "string" not in types or types & _TYPES[type(value)]
    return source if fits else json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
