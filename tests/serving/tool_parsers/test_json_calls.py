from __future__ import annotations

import json

import pytest

from hf_paged.serving.tool_parsers import (
    NamedToolParser,
    ParsedArguments,
    ParsedCallStart,
    ParsedText,
    RequiredToolParser,
    get_tool_parser,
)

from ..parsing import assert_cuts_do_not_matter, calls_of, text_of

HERMES, LLAMA, MISTRAL = (get_tool_parser(name) for name in ("hermes", "llama3_json", "mistral"))


def _read(make, text):
    return assert_cuts_do_not_matter(make, text, [3, 7])


def _call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def test_text_and_two_calls():
    text = 'I look.\n<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>\n' + _call(
        '{"arguments": {}, "name": "g"}'
    )
    assert _read(HERMES, text) == [
        ParsedText("I look.\n"),
        ParsedCallStart(0, "f"),
        ParsedArguments(0, '{"a":  1}'),
        ParsedCallStart(1, "g"),
        ParsedArguments(1, "{}"),
    ]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": [1, {"b": "}"}]}}', '{"a": [1, {"b": "}"}]}'),
        ('{"thought": {"x": [1]}, "name": "f", "arguments": {"a": 1}, "id": 3}', '{"a": 1}'),
        ('{"id": "7", "arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
    ],
)
def test_ways_to_write_arguments(body, arguments):
    assert _read(HERMES, _call(body)) == [ParsedCallStart(0, "f"), ParsedArguments(0, arguments)]


@pytest.mark.parametrize(
    ("written", "meant"),
    [("a\nb\tc", "a\nb\tc"), (r"\d+\.", r"\d+\."), (r"C:\users\x", r"C:\users\x"), (r"é\n\"", 'é\n"')],
)
def test_slips_inside_strings_are_mended(written, meant):
    events = _read(HERMES, _call(f'{{"name": "f", "arguments": {{"a": "{written}"}}}}'))
    assert json.loads(calls_of(events)[0][1]) == {"a": meant}


@pytest.mark.parametrize(
    "text",
    [
        _call("call f, please"),
        _call('{"name": 3, "arguments": {}}'),
        _call('{"name": "", "arguments": {}}'),
        _call('{"name": "\\ud800", "arguments": {}}'),
        _call('{"arguments": {}}'),
        _call('{"name"; "f"}'),
        _call("[1, 2]"),
        "<tool_call",
        '<tool_call>{"name": "f", "argu',
        "</tool_call> alone",
        '{"name": "f", "arguments": {}}',
    ],
)
def test_what_is_no_call_is_text(text):
    assert _read(HERMES, text) == [ParsedText(text)]


def test_arguments_that_break_off_keep_what_came_and_the_rest_is_text():
    events = _read(HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>oh')
    assert events == [ParsedCallStart(0, "f"), ParsedArguments(0, '{"a": 1'), ParsedText("oh")]


def test_text_behind_a_call_is_kept():
    events = _read(HERMES, _call('{"name": "f", "arguments": {}} junk') + "\nDone.")
    assert text_of(events) == " junk</tool_call>\nDone."


def test_a_malformed_call_does_not_hide_the_next():
    events = _read(HERMES, _call("oops") + _call('{"name": "f", "arguments": {}}'))
    assert text_of(events) == _call("oops")
    assert calls_of(events) == [("f", "{}")]


@pytest.mark.parametrize("separator", ["; ", ";", "\n", ", ", "; <|python_tag|>"])
def test_llama_calls_follow_each_other(separator):
    calls = ['{"name": "f", "parameters": {"a": 1}}', '{"type": "function", "name": "g", "parameters": {}}']
    assert calls_of(_read(LLAMA, separator.join(calls))) == [("f", '{"a": 1}'), ("g", "{}")]


def test_a_separator_at_the_end_is_no_text():
    assert text_of(_read(LLAMA, '{"name": "f", "parameters": {}}; ')) == ""


def test_a_llama_call_behind_text_needs_the_tag():
    call = '{"name": "f", "parameters": {}}'
    assert calls_of(_read(LLAMA, f"Well: {call}")) == []
    assert calls_of(_read(LLAMA, f"Well: <|python_tag|>{call}")) == [("f", "{}")]


@pytest.mark.parametrize(
    "text", ['{"name": "Bob", "age": 3}', '{"answer": 42}', '{"name": "f"}', "<|python_tag|>print(1)", "{", "{}"]
)
def test_other_json_of_a_llama_is_text(text):
    assert _read(LLAMA, text) == [ParsedText(text)]


def test_json_that_is_an_answer_is_not_held_back():
    parser = LLAMA()
    assert text_of(parser.feed('{"answer": ')) == '{"answer": '


def test_without_a_marker_only_declared_functions_are_called():
    text = '{"name": "g", "parameters": {}}'
    assert calls_of(_read(lambda: LLAMA({"f": None}), text)) == []
    assert calls_of(_read(lambda: LLAMA({"f": None}), "<|python_tag|>" + text)) == [("g", "{}")]
    assert calls_of(_read(lambda: LLAMA({"f": None, "g": None}), text)) == [("g", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f", "id": "abcdefghi"},\n{"name": "g", "arguments": {}}]\n',
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS] g {}',
        '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}[TOOL_CALLS][{"name": "g", "arguments": {}}]',
    ],
)
def test_ways_in_which_mistral_models_write_calls(text):
    events = _read(MISTRAL, text)
    assert calls_of(events) == [("f", '{"a": 1}'), ("g", "{}")]
    assert text_of(events) == ""


@pytest.mark.parametrize("text", ["[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS] []", "[TOOL"])
def test_mistral_calls_that_break_off_are_text(text):
    assert _read(MISTRAL, text) == [ParsedText(text)]


def test_forced_calls():
    events = _read(RequiredToolParser, '[{"name":"f","parameters":{"a":1}},{"name":"f","parameters":{"a":2}}]')
    assert calls_of(events) == [("f", '{"a":1}'), ("f", '{"a":2}')]
    assert text_of(events) == ""


def test_a_forced_function_gets_its_arguments_alone():
    assert _read(lambda: NamedToolParser("f"), ' {"a": "b}"}\n') == [
        ParsedCallStart(0, "f"),
        ParsedArguments(0, '{"a": "b}"}'),
    ]


def test_text_in_place_of_a_forced_call_is_text():
    for make in (RequiredToolParser, lambda: NamedToolParser("f")):
        assert _read(make, "I would rather not.") == [ParsedText("I would rather not.")]
