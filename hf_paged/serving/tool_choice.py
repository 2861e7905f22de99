"""What `tools`, `tool_choice` and `parallel_tool_calls` of a request mean: what is forced, and who reads the answer.

    tool_choice        the prompt shows   the answer is forced to be               read by
    none, or no tools  the tools          nothing                                  nobody: markup of calls is text
    auto               the tools          nothing                                  the model's parser
    allowed_tools      those allowed      as for its mode, auto or required        and so it is read
    required           the tools          [{"name": ..., "parameters": ...}, ...]  `RequiredToolParser`
    a function         the tools          the JSON object of its arguments         `NamedToolParser`

The forced forms need no marker of any model, so they work with every model, also where no parser is chosen. The prompt
shows the tools with `none` too, as vLLM does: earlier calls in the conversation keep their meaning, and the prompt's
beginning stays in the prefix cache. Tools that are not allowed are hidden from the model, and a call of one is text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..generation.structured.params import StructuredOutputsParams
from .errors import ApiError
from .tool_parsers import NamedToolParser, RequiredToolParser, ToolParser

MAX_TOOLS = 128
MAX_DEPTH = 128  # of a function's parameters; no body is nested deeper
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # OpenAI allows 64; agents send what MCP and Anthropic allow
_DATA = ("const", "default", "enum", "examples")  # in these nothing is a schema
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # in these all are
# Where a schema has one of these, its `properties` are not all that an object of it may have.
_SAYS_MORE = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "if", "$ref")
)
_Functions = dict[str, Mapping[str, Any] | None]  # names and schemas of parameters
_FORMS = '\'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": ...}}'

_NO_PARSER = (
    '`tool_choice` is "auto" (the default with `tools`), for which this server was not told how its model writes '
    'calls: start it with --enable-auto-tool-choice --tool-call-parser NAME, or set `tool_choice` to "required", a '
    'named function or "none".'
)


@dataclasses.dataclass(frozen=True)
class ToolPlan:
    """How a request's tools are handled.

    Args:
        choice (`str`):
            `"none"`, `"auto"`, `"required"` or `"named"`.
        functions (`dict[str, Mapping[str, Any] | None]`):
            The functions that may be called, with the schemas of their parameters.
        forbidden (`frozenset[str]`, *optional*):
            Those that the request declares and does not allow.
        function (`str`, *optional*):
            The one that has to be called.
        parser (`type[ToolParser]`, *optional*):
            What reads the answer if nothing is forced.
        structured_outputs (`StructuredOutputsParams`, *optional*):
            The form to force upon the answer, behind the reasoning if there is any.
        max_calls (`int`, *optional*):
            How many calls an answer may have.
        id_style (`str`, *optional*, defaults to `"openai"`):
            What ids of calls look like, see `new_call_id`.
    """

    choice: Literal["none", "auto", "required", "named"] = "none"
    functions: _Functions = dataclasses.field(default_factory=dict)
    forbidden: frozenset[str] = frozenset()
    function: str | None = None
    parser: type[ToolParser] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    max_calls: int | None = None
    id_style: str = "openai"

    def make_parser(self) -> ToolParser | None:
        """Returns a new parser for one answer; `None` if its text is read as it is."""
        if self.choice == "named":
            return NamedToolParser(self.function or "")
        if self.choice == "required":
            return RequiredToolParser(self.functions)
        return self.parser(self.functions, self.forbidden) if self.parser is not None else None


def plan_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    *,
    parallel_tool_calls: bool | None = None,
    parser: type[ToolParser] | None = None,
) -> ToolPlan:
    """Checks a request's tools and decides how they are handled.

    Args:
        tools (`Sequence[Mapping[str, Any]]`, *optional*):
            In OpenAI's form, `{"type": "function", "function": {"name": ..., "parameters": {...}}}`.
        tool_choice (`str` or `Mapping[str, Any]`, *optional*):
            In OpenAI's form. By default `"auto"` if there are tools.
        parallel_tool_calls (`bool`, *optional*):
            `False` allows one call per answer.
        parser (`type[ToolParser]`, *optional*):
            How the model writes calls, as the server was told.

    Returns:
        `ToolPlan`: The plan.

    Raises:
        ApiError: If something is malformed, or is asked for that this server cannot do.
    """
    declared = _functions(tools or ())
    choice, functions = _choice(tool_choice, declared)
    if choice == "none":
        return ToolPlan(functions=functions)
    plan = ToolPlan(
        "auto",
        functions,
        frozenset(declared.keys() - functions.keys()),
        max_calls=1 if parallel_tool_calls is False else None,
        id_style="openai" if parser is None else parser.id_style,
    )
    if choice == "auto":
        if parser is None:
            raise ApiError(400, _NO_PARSER, param="tool_choice")
        return dataclasses.replace(plan, parser=parser)
    if choice == "required":
        forced = StructuredOutputsParams(json=_calls_schema(functions, plan.max_calls))
        return dataclasses.replace(plan, choice="required", structured_outputs=forced)
    forced = StructuredOutputsParams(json=_arguments_schema(functions[choice[1]]))
    return dataclasses.replace(plan, choice="named", function=choice[1], structured_outputs=forced)


def _functions(tools: Sequence[Mapping[str, Any]]) -> _Functions:
    """Names and parameters of the functions."""
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"`tools` has {len(tools)} entries; at most {MAX_TOOLS} are allowed.", param="tools")
    functions: _Functions = {}
    for place, tool in enumerate(tools):
        name, parameters = _function(tool, f"tools[{place}]")
        if name in functions:
            raise ApiError(
                400,
                f"`tools[{place}].function.name` is {name!r}, like that of an earlier tool; names must be different.",
                param=f"tools[{place}].function.name",
            )
        functions[name] = parameters
    return functions


def _function(tool: Any, where: str) -> tuple[str, Mapping[str, Any] | None]:
    if not isinstance(tool, Mapping):
        raise _malformed(where, tool, "must be an object")
    kind = tool.get("type", "function")
    function = tool.get("function")
    if kind != "function" or not isinstance(function, Mapping):
        raise _malformed(f"{where}.type", kind, 'must be "function", with a `function` beside it')
    name = _checked_name(function.get("name"), f"{where}.function.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _malformed(f"{where}.function.parameters", parameters, "must be a JSON schema of an object")
    if parameters and parameters.get("type", "object") != "object":
        raise _malformed(f"{where}.function.parameters.type", parameters["type"], 'must be "object"')
    return name, parameters


def _checked_name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _malformed(where, name, "must be 1 to 128 letters, digits, underscores and dashes")
    return name


_Choice = Literal["none", "auto", "required"] | tuple[Literal["named"], str]


def _choice(tool_choice: Any, functions: _Functions) -> tuple[_Choice, _Functions]:
    """What is chosen, and among which functions."""
    if tool_choice is None:
        return ("auto" if functions else "none"), functions
    if tool_choice in ("none", "auto") or (tool_choice == "required" and functions):
        return ("none" if not functions else tool_choice), functions
    if not functions:
        raise ApiError(
            400,
            "`tool_choice` asks for a call, but there are no `tools` to choose from.",
            param="tool_choice",
        )
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type", "function") not in ("function", "allowed_tools"):
        raise _malformed("tool_choice", tool_choice, f"must be {_FORMS}")
    if tool_choice.get("type") == "allowed_tools":
        return _allowed(tool_choice.get("allowed_tools"), functions)
    return ("named", _named(tool_choice, functions, "tool_choice")), functions


def _named(choice: Any, functions: _Functions, where: str) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    name = _checked_name(name, f"{where}.function.name")
    if name not in functions:
        raise ApiError(
            400,
            f"`{where}.function.name` is {name!r}, which is not among the `tools`: {', '.join(functions)}.",
            param=f"{where}.function.name",
        )
    return name


def _allowed(allowed: Any, functions: _Functions) -> tuple[_Choice, _Functions]:
    """`{"mode": "auto" | "required", "tools": [...]}`: a choice among some of the tools."""
    where = "tool_choice.allowed_tools"
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required"):
        raise _malformed(f"{where}.mode", mode, 'must be "auto" or "required"')
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise _malformed(f"{where}.tools", tools, "must be a list of functions among the `tools`")
    names = [_named(tool, functions, f"{where}.tools[{place}]") for place, tool in enumerate(tools)]
    return mode, {name: functions[name] for name in names}


def _malformed(where: str, value: Any, rule: str) -> ApiError:
    return ApiError(400, f"`{where}` {rule}, got {value!r:.100}.", param=where)


def _arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema of a call's arguments: what the function declares, and nothing that a model makes up beside it.

    A function that declares no parameters takes an empty object.
    """
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "properties" in parameters and not _SAYS_MORE.intersection(parameters):
        return {**parameters, "type": "object", "additionalProperties": False}
    return {**parameters, "type": "object"}


def _calls_schema(functions: _Functions, max_calls: int | None) -> dict[str, Any]:
    """The schema of a list of calls.

    Each function's parameters lie in `$defs` under its name, and what refers to their root refers to that place.
    """
    calls, parameters = [], {}
    for name, schema in functions.items():
        place = f"#/$defs/{name}"
        parameters[name] = _moved(_arguments_schema(schema), place)
        properties = {"name": {"const": name}, "parameters": {"$ref": place}}
        required = ["name", "parameters"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    limit = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, "$defs": parameters}


def _moved(schema: Any, place: str, depth: int = 0) -> Any:
    """The schema with its references to its own root, `#` and `#/...`, turned to the place where the root now lies."""
    if depth > MAX_DEPTH:
        message = f"The parameters of {place.rpartition('/')[2]!r} are nested deeper than {MAX_DEPTH} levels."
        raise ApiError(400, message, param="tools")
    if isinstance(schema, (list, tuple)):
        return [_moved(item, place, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved_member(key, value, place, depth + 1) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


def _moved_member(key: str, value: Any, place: str, depth: int) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, Mapping):  # here `default` is the name of an argument
        return {name: _moved(item, place, depth + 1) for name, item in value.items()}
    return _moved(value, place, depth)
