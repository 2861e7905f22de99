"""Parsers of tool calls, by the names that `--tool-call-parser` takes."""

from __future__ import annotations

from ...registry import Registry
from ..ids import new_id, new_short_id
from .base import ParsedArguments, ParsedCallStart, ParsedEvent, ParsedText, ToolParser
from .json_calls import (
    HermesToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
    NamedToolParser,
    RequiredToolParser,
)
from .pythonic import Lfm2ToolParser, Llama4PythonicToolParser, PythonicToolParser
from .xml_calls import Qwen3CoderToolParser

__all__ = [
    "NamedToolParser",
    "ParsedArguments",
    "ParsedCallStart",
    "ParsedEvent",
    "ParsedText",
    "RequiredToolParser",
    "ToolParser",
    "detect_tool_parser",
    "get_tool_parser",
    "new_call_id",
    "tool_parsers",
]

tool_parsers: Registry[type[ToolParser]] = Registry("tool-call parser")
for _names, _parser in {
    ("hermes", "qwen", "qwen25", "qwen3_json"): HermesToolParser,
    ("llama3_json", "llama4_json"): Llama3JsonToolParser,
    ("mistral",): MistralToolParser,
    ("pythonic",): PythonicToolParser,
    ("llama4_pythonic",): Llama4PythonicToolParser,
    ("lfm2",): Lfm2ToolParser,
    ("qwen3_coder", "qwen3_xml"): Qwen3CoderToolParser,
}.items():
    for _name in _names:
        tool_parsers.register(_name)(_parser)

# What a chat template contains if its model was taught the format; the first that fits counts.
_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<function=", "qwen3_coder"),  # inside of Hermes' tags
    ("<tool_call>", "hermes"),
)


def get_tool_parser(name: str) -> type[ToolParser]:
    """Returns the class of parsers of that name; each answer needs a parser of its own.

    Args:
        name (`str`):
            As `--tool-call-parser` takes it.

    Raises:
        UnknownNameError: If there is none; lists those that there are.
    """
    return tool_parsers.get(name)


def detect_tool_parser(chat_template: str | None) -> str | None:
    """Returns the name of the parser for what a chat template teaches its model to write; `None` if it is not clear.

    Args:
        chat_template (`str`, *optional*):
            The template's text.
    """
    return next((name for sign, name in _SIGNS if sign in (chat_template or "")), None)


def new_call_id(style: str = "openai") -> str:
    """Returns an id for a call that is unlike any other.

    Args:
        style (`str`, defaults to `"openai"`):
            A parser's `id_style`: `"openai"`, or `"mistral"`, whose templates take nine letters and digits only.
    """
    if style == "mistral":
        return new_short_id(9)
    return f"call_{new_id()}"
