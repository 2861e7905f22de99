from __future__ import annotations

import json
import warnings

import pytest

from hf_paged.serving.tool_parsers import ParsedArguments, ParsedCallStart, ParsedText, get_tool_parser

from ..parsing import assert_cuts_do_not_matter, calls_of, text_of

PYTHONIC = get_tool_parser("pythonic")


def _read(text, make=PYTHONIC):
    return assert_cuts_do_not_matter(make, text, [3, 7])


def test_two_calls():
    assert _read("[f(a=1, b='x'), mod.g()]") == [
        ParsedCallStart(0, "f"),
        ParsedArguments(0, '{"a": 1, "b": "x"}'),
        ParsedCallStart(1, "mod.g"),
        ParsedArguments(1, "{}"),
    ]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("-1.5", -1.5),
        ("+2", 2),
        ("1_000", 1000),
        ("0x1F", 31),
        ("True", True),
        ("true", True),
        ("null", None),
        ("(1, (2,))", [1, [2]]),
        ("[1, 2,]", [1, 2]),
        ("{'k': {1: None}, }", {"k": {"1": None}}),
        ("'it\\'s'", "it's"),
        ("\"a\" 'b'", "ab"),
        ("'''a\n\"b\" ''c'''", "a\n\"b\" ''c"),
        ('""', ""),
        ("''''''", ""),
        (r"'\d\n'", "\\d\n"),
        (r"r'\d'", r"\d"),
        ("'line\nbreak'", "line\nbreak"),
        (r"'\u00e9\x41'", "éA"),
        (r"'\ud83d'", "\ud83d"),
        ("'),]}'", "),]}"),
    ],
)
def test_values(source, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        events = _read(f"[f(a={source}, b = 0)]")
    (_, arguments) = calls_of(events)[0]
    assert json.loads(arguments) == {"a": value, "b": 0}
    arguments.encode()
    assert text_of(events) == ""


def test_words_of_python_may_be_names_of_arguments():
    assert calls_of(_read("[f(from=1, class='x', lambda=2)]")) == [("f", '{"from": 1, "class": "x", "lambda": 2}')]


@pytest.mark.parametrize(
    "text",
    [
        "[see](https://example.org)",
        "[1, 2]",
        "[]",
        "[f(1)]",
        "[f(a)]",
        "[f(a=b)]",
        "[f(a=g())]",
        "[f(a=1 if 2 else 3)]",
        "[f(a=__import__('os').system('true'))]",
        "[f(a=f'{1}')]",
        "[f(a=b'x')]",
        "[f(a={1, 2})]",
        "[f(a={**x})]",
        "[f(a=1e999)]",
        "[f(a=1j)]",
        "[f(a=" + "[" * 100 + "]" * 100 + ")]",
        "[f(a=" + "9" * 5000 + ")]",
        "[f(**x)]",
        "[f(a='unfinished",
        "[f",
        "f(a=1)",
        "Text. [f(a=1)]",
    ],
)
def test_what_is_no_call_is_text(text):
    assert _read(text) == [ParsedText(text)]


def test_an_argument_that_is_malformed_ends_the_call_and_is_text():
    assert _read("[f(a=1, b=c, d=2)] so") == [
        ParsedCallStart(0, "f"),
        ParsedArguments(0, '{"a": 1'),
        ParsedText(", b=c, d=2)] so"),
    ]


def test_only_declared_functions_are_called():
    assert calls_of(_read("[note(a=1)]", lambda: PYTHONIC({"f": None}))) == []
    assert calls_of(_read("[f(a=1)]", lambda: PYTHONIC({"f": None}))) == [("f", '{"a": 1}')]


def test_text_behind_the_list_is_kept():
    assert text_of(_read("[f()]\nDone.")) == "\nDone."


def test_lists_between_markers():
    make = get_tool_parser("lfm2")
    events = _read("So: <|tool_call_start|>[f(a=1), g()]<|tool_call_end|>\nDone.", make)
    assert calls_of(events) == [("f", '{"a": 1}'), ("g", "{}")]
    assert text_of(events) == "So: \nDone."
    assert calls_of(_read("[f(a=1)]", make)) == []
