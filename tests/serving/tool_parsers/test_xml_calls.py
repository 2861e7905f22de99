from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings

from hf_paged.serving.tool_parsers import ParsedArguments, ParsedCallStart, ParsedText, get_tool_parser

from ..parsing import ARGUMENTS, PLACES, assert_cuts_do_not_matter, calls_of, text_of

QWEN = get_tool_parser("qwen3_coder")


def _written(arguments) -> str:
    def value(argument) -> str:
        return argument if isinstance(argument, str) else json.dumps(argument)

    parameters = (f"<parameter={key}>\n{value(argument)}\n</parameter>\n" for key, argument in arguments.items())
    return f"<tool_call>\n<function=f>\n{''.join(parameters)}</function>\n</tool_call>"


def _read(text, properties=None, places=(3, 7)):
    functions = {"f": {"type": "object", "properties": properties or {}}}
    return assert_cuts_do_not_matter(lambda: QWEN(functions), text, places)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(arguments=ARGUMENTS, places=PLACES)
def test_arguments_come_out_as_they_were_written(arguments, places):
    properties = {key: {"type": "string"} for key, value in arguments.items() if isinstance(value, str)}
    events = _read("So:" + _written(arguments) + "\n" + _written({}), properties, places)
    assert text_of(events) == "So:"
    (name, parsed), last = calls_of(events)
    assert (name, json.loads(parsed)) == ("f", arguments)
    assert last == ("f", "{}")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, 'a\n"b"\\\n', 'a\n"b"\\\n'),
        ({"type": "integer"}, " 12 ", 12),
        ({"type": "integer"}, "many", "many"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "[1]", "[1]"),
        ({"type": "array"}, '[1, {"a": "b"}]', [1, {"a": "b"}]),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "NaN", "NaN"),
        ({}, "", ""),
        ({"type": 5, "anyOf": 6}, "7", 7),
        (None, "x", "x"),
    ],
)
def test_the_schema_tells_what_a_value_is(schema, text, value):
    events = _read(f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>", {"a": schema})
    assert json.loads(calls_of(events)[0][1]) == {"a": value}


def test_the_first_tag_may_be_missing():
    text = "So:\n<function=f><parameter=a>1</parameter></function></tool_call>"
    assert _read(text) == [ParsedText("So:\n"), ParsedCallStart(0, "f"), ParsedArguments(0, '{"a": 1}')]


def test_text_of_a_string_is_given_out_as_it_comes():
    parser = QWEN({"f": {"properties": {"a": {"type": "string"}}}})
    events = parser.feed("<tool_call><function=f><parameter=a>\nThis is a lo")
    assert calls_of(events) == [("f", '{"a": "This is a lo')]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>f</tool_call>",
        "<tool_call><function=>",
        "<tool_call><function=f",
        "<tool_call><function=f><parameter=a",
        "<function=f>",
        "</tool_call>",
        "<parameter=a>1</parameter>",
    ],
)
def test_what_is_no_call_is_text(text):
    assert _read(text) == [ParsedText(text)]


def test_a_call_that_is_cut_off_keeps_what_came():
    events = _read("<tool_call><function=f><parameter=a>x\n", {"a": {"type": "string"}})
    assert calls_of(events) == [("f", '{"a": "x\\n')]
    events = _read("<tool_call><function=f><parameter=a>1</parameter> oh")
    assert (calls_of(events), text_of(events)) == ([("f", '{"a": 1')], " oh")
    assert calls_of(_read("<tool_call><function=f><parameter=a>[1, 2")) == [("f", '{"a": [1, 2')]
