"""Calls written as a Python list of calls: `[get_weather(city="Rome", days=2), now()]`. Nothing of it is run."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from ..incremental_reader import SPACES, Reading
from .base import ToolParser, is_valid_text

_DEEPEST = 64  # brackets within each other in one argument
_FUNCTION = re.compile(r"[\w.\-]*")
_WORD = re.compile(r"\w*")
_OUTSIDE = re.compile(r"[\s\w.:+\-]*")  # between the strings, brackets and commas of a value
_PLAIN = {'"': re.compile(r'[^"\\\n]*'), "'": re.compile(r"[^'\\\n]*")}
_ESCAPED = frozenset("\\'\"abfnrtvxuUN01234567\n")
_CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's, which models mix in
_NO_LITERAL = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


class PythonicToolParser(ToolParser):
    """A list of calls with literal keyword arguments at the answer's beginning: Llama 3.2, ToolACE.

    An argument is given out when it is complete. Line breaks inside quotes and backslashes that escape nothing, which
    are no Python but what models write, are taken as they are meant.
    """

    bare = True

    def _calls(self, marker: str) -> Reading[None]:
        reader = self._reader
        more = yield from reader.accept("[")
        while more:
            yield from reader.run(SPACES)
            if not (yield from self._call(bool(marker))):
                return
            reader.record()
            yield from reader.run(SPACES)
            more = yield from reader.accept(",")
            if more:
                yield from reader.run(SPACES)
            if (yield from reader.accept("]")):
                reader.recorded()
                return

    def _call(self, marked: bool) -> Reading[bool]:
        """Reads `name(key=value, ...)`; returns whether all of it was there."""
        reader, calls = self._reader, self.num_calls
        name = yield from reader.word(_FUNCTION)
        if not name or not self._may_call(name, marked) or not (yield from reader.accept("(")):
            return False
        yield from reader.run(SPACES)
        while not (yield from reader.accept(")")):
            argument = yield from self._argument()
            if argument is None:
                return False
            if self.num_calls == calls:
                self._start_call(name)
                self._emit_arguments("{" + argument)
            else:
                self._emit_arguments(", " + argument)
            reader.record()
            yield from reader.run(SPACES)
            if not (yield from reader.accept(",")) and (yield from reader.peek()) != ")":
                return False
            yield from reader.run(SPACES)
        if self.num_calls == calls:
            self._start_call(name)
            self._emit_arguments("{}")
        else:
            self._emit_arguments("}")
        return True

    def _argument(self) -> Reading[str | None]:
        """Reads `key=value` and returns it as JSON writes it; `None` if it is something else."""
        reader = self._reader
        key = yield from reader.word(_WORD)
        yield from reader.run(SPACES)
        if not key or not (yield from reader.accept("=")):
            return None
        value = yield from self._literal()
        return None if value is None else f"{json.dumps(key)}: {value}"

    def _literal(self) -> Reading[str | None]:
        """Reads a value up to the comma or bracket behind it and returns its JSON."""
        reader, parts, depth = self._reader, [""], 0
        while True:
            parts.append((yield from reader.word(_OUTSIDE)))
            character = yield from reader.peek()
            if character in ('"', "'"):
                yield from self._string(character, parts)
            elif not depth and character in (",", ")"):
                return _to_json("".join(parts))
            elif character and character in ",[]{}()" and depth <= _DEEPEST:
                depth += (character in "[{(") - (character in "]})")
                if depth < 0:
                    return None
                parts.append((yield from reader.take()))
            else:
                return None

    def _string(self, quote: str, parts: list[str]) -> Reading[None]:
        """Reads a string with its quotes, one or three on either side, and writes it as correct Python."""
        reader, raw = self._reader, parts[-1][-1:] in ("r", "R")
        plain = _PLAIN[quote]
        if (yield from reader.accept(quote * 3)):
            quote *= 3
        else:
            yield from reader.take()
        parts.append(quote)
        while True:
            yield from reader.run(plain, parts.append)
            if (yield from reader.accept(quote)):
                break
            character = yield from reader.take()
            if not character:
                return
            if character == "\\":
                following = yield from reader.take()
                character += following if raw or following in _ESCAPED else "\\" + following
            parts.append(r"\n" if character == "\n" and not raw else character)
        parts.append(quote)


class Llama4PythonicToolParser(PythonicToolParser):
    """The same with `<|python_start|>` and `<|python_end|>` around the list, or without: Llama 4."""

    opens = ("<|python_start|>",)
    closes = ("<|python_end|>",)


class Lfm2ToolParser(PythonicToolParser):
    """The same between `<|tool_call_start|>` and `<|tool_call_end|>`, anywhere in the answer: LFM2."""

    opens = ("<|tool_call_start|>",)
    closes = ("<|tool_call_end|>",)
    bare = False


def _to_json(source: str) -> str | None:
    """The JSON of a Python literal; `None` if it is none, or nothing that JSON can say."""
    try:
        value = _value(ast.parse(source.strip(), mode="eval").body)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if is_valid_text(text) else json.dumps(value)
    except _NO_LITERAL:
        return None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as value)):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
    raise ValueError("not a literal")
