"""What holds for every tool parser, whatever a model writes."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_paged.serving.tool_parsers import (
    NamedToolParser,
    ParsedText,
    RequiredToolParser,
    get_tool_parser,
    tool_parsers,
)
from hf_paged.serving.tool_parsers.pythonic import PythonicToolParser

from ..parsing import CALLS, PLACES, TEXTS, assert_cuts_do_not_matter, calls_of, parse, text_of

_PARSERS = list(tool_parsers.items())
MAKERS = {name: parser for i, (name, parser) in enumerate(_PARSERS) if parser not in dict(_PARSERS[:i]).values()}
MAKERS |= {"required": RequiredToolParser, "named": lambda: NamedToolParser("f")}
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_start|>"),
    *("<function=f>", "</function>", "<parameter=a>", "</parameter>"),
    *("<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>", '{"name": "f", "arguments": {', '"parameters": '),
    *('{"a": 1}', '"name": "g"', '"type": "function"', "f(", "a=", "'x'", '"""', "r'", "(", ")", "[", "]", "{", "}"),
    *("true", "None", "-1.5e3", ",", ":", ";", '"', "'", "\\", "\\u00e", "\n", " ", "\x00", "é", "\U0001f600", "text"),
]
ANYTHING = st.lists(st.sampled_from(FRAGMENTS) | TEXTS, max_size=20).map("".join)


def _dumps(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls, key) -> list[str]:
    return [_dumps({"name": name, key: arguments}) for name, arguments in calls]


def _pythonic(calls) -> str:
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls)
    return f"[{', '.join(written)}]"


# How a model writes calls, and whether text may stand in front of them.
WRITERS = {
    "hermes": (lambda calls: "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in _objects(calls, "arguments")), True),
    "llama3_json": (lambda calls: "; ".join(_objects(calls, "parameters")), False),
    "mistral": (lambda calls: f"[TOOL_CALLS] [{', '.join(_objects(calls, 'arguments'))}]", True),
    "mistral 11": (lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{_dumps(a)}" for n, a in calls), True),
    "pythonic": (_pythonic, False),
    "llama4_pythonic": (lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>", True),
    "lfm2": (lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>", True),
    "required": (lambda calls: f"[{','.join(_objects(calls, 'parameters'))}]", False),
}


def _maker(name):
    return MAKERS[name.split()[0]]


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(text=ANYTHING, places=PLACES)
def test_how_the_text_is_cut_does_not_matter(name, text, places):
    events = assert_cuts_do_not_matter(MAKERS[name], text, places)
    calls = calls_of(events)
    assert all(called and arguments.startswith("{") for called, arguments in calls)
    if not calls:
        assert text_of(events) == text


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(calls=CALLS, content=st.sampled_from(["", "Let me see.\n", "a < b, [1], {2}: "]), places=PLACES)
def test_calls_that_are_well_formed_come_out_as_they_were_written(name, calls, content, places):
    write, after_text = WRITERS[name]
    content = content if after_text else ""
    events = assert_cuts_do_not_matter(_maker(name), content + write(calls), places)
    assert text_of(events) == content
    assert [called for called, _ in calls_of(events)] == [called for called, _ in calls]
    for (_, parsed), (_, arguments) in zip(calls_of(events), calls, strict=True):
        assert json.loads(parsed) == arguments
        if "pythonic" not in name and name != "lfm2":
            assert parsed == _dumps(arguments)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(calls=CALLS, end=st.integers(0, 10_000))
def test_an_answer_that_is_cut_off_keeps_the_calls_that_had_begun(name, calls, end):
    text = WRITERS[name][0](calls)
    whole = calls_of(parse(_maker(name)(), [text]))
    events = parse(_maker(name)(), [text[: end % len(text)]])
    kept = calls_of(events)
    assert [called for called, _ in kept] == [called for called, _ in whole[: len(kept)]]
    assert kept[:-1] == whole[: len(kept)][:-1]
    assert not kept or whole[len(kept) - 1][1].startswith(kept[-1][1])


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text("abc<[{|T/( \n", min_size=1, max_size=60))
def test_text_is_held_back_only_while_it_may_become_a_call(name, text):
    parser = MAKERS[name]()
    text, given_out = "Yes: " + text, ""
    for place, character in enumerate(text, 1):
        given_out += text_of(parser.feed(character))
        held = text[len(given_out) : place]
        assert not held or any(marker.startswith(held) for marker in parser.markers())
    assert given_out + text_of(parser.finish()) == text


@pytest.mark.parametrize("name", WRITERS)
def test_a_name_comes_before_the_arguments_are_complete(name):
    text = WRITERS[name][0]([("f", {"a": 1, "b": "x" * 50})])
    parser = _maker(name)()
    early = [event for character in text[:-30] for event in parser.feed(character)]
    assert [called for called, _ in calls_of(early)] == ["f"]


# A beginning, and what follows it 100,000 characters long.
HOSTILE = [
    *(("", text) for text in ("<", "[", " ", "<tool_call>", "[TOOL_CALLS]", '{"name":"f","parameters":{}};')),
    *(('{"name": "f", "arguments": {"a": "', text) for text in ("\\", "\n", '"')),
    ('{"name": "f", "arguments": ', "["),
    ('{"arguments": {"a": "', "x"),
    ("f[ARGS]", '{"a":'),
    *(("[f(a=", text) for text in ("'", "[1,", "-", "a.", "'\\")),
    ("[f(", "a=1,"),
    ("[", "f(),"),
    *(("<function=f><parameter=a>", text) for text in ("\n", "x</parameter><parameter=b>")),
]


@pytest.mark.parametrize("name", MAKERS)
def test_hostile_answers_take_linear_time(name):
    slowest = 0.0
    is_pythonic = isinstance(MAKERS[name](), PythonicToolParser)
    for opening, text in HOSTILE:
        if opening and is_pythonic != opening.startswith("["):
            continue
        text = "".join(MAKERS[name]().opens[:1]) + opening + text * (100_000 // len(text))
        slowest = max(slowest, _fastest(name, text))
    assert slowest < 1  # something quadratic takes minutes


def _fastest(name: str, text: str) -> float:
    """Other processes slow down even CPU time, up to twofold where two share a core: whoever is in time once, is."""
    fastest = math.inf
    for _ in range(10):
        fastest = min(fastest, _seconds(name, text))
        if fastest < 1:
            break
    return fastest


def _seconds(name: str, text: str) -> float:
    parser, started = MAKERS[name](), time.process_time()
    parser.feed(text)
    parser.finish()
    return time.process_time() - started


@pytest.mark.parametrize(
    ("name", "opening", "text"),
    [
        ("hermes", "", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\n"),
        ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
        ("hermes", "", " "),
        ("llama3_json", "", '{"name":"f","parameters":{}};'),
        ("mistral", "", "[TOOL_CALLS]f"),
        ("pythonic", "[", "f(a=1),"),
        ("pythonic", "[f(a=", "'x'"),
    ],
)
def test_hostile_answers_take_linear_time_when_they_come_by_the_character(name, opening, text):
    parser = MAKERS[name]()
    started = time.process_time()
    for character in opening + text * (100_000 // len(text)):
        parser.feed(character)
    parser.finish()
    assert time.process_time() - started < 4  # seconds


def test_names_that_are_no_parsers_are_refused_with_those_that_are():
    with pytest.raises(LookupError, match="hermes.*llama3_json.*mistral.*pythonic"):
        get_tool_parser("Hermes")


def test_whitespace_alone_is_text():
    assert parse(get_tool_parser("hermes")(), [" ", "\n"]) == [ParsedText(" \n")]


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "required"])
def test_a_call_of_a_function_that_is_forbidden_is_text(name):
    write, _ = WRITERS[name]
    make = get_tool_parser(name.split()[0])
    allowed, forbidden = write([("f", {"a": 1})]), write([("g", {"a": 1})])
    assert calls_of(parse(make({"f": None}, {"g"}), [allowed])) == [("f", '{"a": 1}')]
    events = parse(make({"f": None}, {"g"}), [forbidden])
    assert calls_of(events) == [] and text_of(events) == forbidden


def test_a_call_in_xml_of_a_function_that_is_forbidden_is_text():
    text = "<tool_call>\n<function=g>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    make = get_tool_parser("qwen3_coder")
    assert calls_of(parse(make({"g": None}), [text])) and not calls_of(parse(make({"f": None}, {"g"}), [text]))
