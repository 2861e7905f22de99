from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_paged.serving.answer_parser import AnswerParser, ParsedReasoning, hidden_special_tokens
from hf_paged.serving.reasoning_parsers import get_reasoning_parser
from hf_paged.serving.tool_parsers import (
    NamedToolParser,
    ParsedArguments,
    ParsedCallStart,
    ParsedText,
    get_tool_parser,
)

from .parsing import PLACES, assert_cuts_do_not_matter, text_of

THINK, HERMES, LLAMA, MISTRAL = (
    get_reasoning_parser("think"),
    *(get_tool_parser(name) for name in ("hermes", "llama3_json", "mistral")),
)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def _read(make, text):
    return assert_cuts_do_not_matter(make, text, [5, 11])


def test_reasoning_content_and_calls():
    text = f"<think>\nI call {CALL}\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
    assert _read(lambda: AnswerParser(THINK(), HERMES()), text) == [
        ParsedReasoning(f"I call {CALL}"),
        ParsedText("Let me see.\n"),
        ParsedCallStart(0, "f"),
        ParsedArguments(0, '{"a": 1}'),
        ParsedCallStart(1, "f"),
        ParsedArguments(1, '{"a": 1}'),
    ]


def test_without_parsers_all_is_content():
    text = f"<think>hm</think>{CALL}"
    assert _read(AnswerParser, text) == [ParsedText(text)]


def test_a_forced_call_behind_reasoning():
    events = _read(lambda: AnswerParser(THINK("<think>"), NamedToolParser("f")), 'hm</think>\n{"a":1}')
    assert events == [ParsedReasoning("hm"), ParsedCallStart(0, "f"), ParsedArguments(0, '{"a":1}')]


def test_only_so_many_calls():
    parser = AnswerParser(None, HERMES(), max_calls=1)
    events = parser.feed(CALL + CALL + "Done.") + parser.finish()
    assert events == [ParsedCallStart(0, "f"), ParsedArguments(0, '{"a": 1}'), ParsedText("Done.")]
    assert parser.num_calls == 1


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        (CALL, "stop", "tool_calls"),
        (CALL, "length", "length"),
        (CALL[:40], "length", "length"),
        (CALL[:14], "stop", "stop"),
        ("No.", "stop", "stop"),
        ("", "stop", "stop"),
        ("No.", None, None),
    ],
)
def test_finish_reason(text, reason, expected):
    parser = AnswerParser(None, HERMES())
    assert [*parser.feed(text), *parser.finish()] or not text
    assert parser.finish_reason(reason) == expected


def test_special_tokens_that_no_parser_reads_are_left_out():
    hidden = ["<|eot|>", "<s>", "<|python_tag|>"]
    call = '<s><|python_tag|>{"name": "f", "parameters": {"a": "<|eot|>"}}<|eot|>'
    assert _read(lambda: AnswerParser(None, LLAMA(), hidden=hidden), call) == [
        ParsedCallStart(0, "f"),
        ParsedArguments(0, '{"a": ""}'),
    ]
    events = _read(lambda: AnswerParser(None, LLAMA(), hidden=hidden), "<|python_tag|>print(1)<|eot|>")
    assert events == [ParsedText("print(1)")]


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", CALL, "<|x|>", "<|", "x|>", "a", "\n", "<tool"]), max_size=10
    ),
    places=PLACES,
)
def test_how_the_text_is_cut_does_not_matter(pieces, places):
    events = assert_cuts_do_not_matter(
        lambda: AnswerParser(THINK(), HERMES(), hidden=["<|x|>"]), "".join(pieces), places
    )
    assert "<|x|>" not in text_of(events)


class _Token:
    def __init__(self, content, special):
        self.content, self.special = content, special


class _Tokenizer:
    all_special_tokens = ["<s>"]
    added_tokens_decoder = {0: _Token("<s>", True), 1: _Token("[TOOL_CALLS]", True), 2: _Token("<tool_call>", False)}


def test_special_tokens_are_hidden_only_if_a_marker_is_one():
    assert hidden_special_tokens(_Tokenizer(), None, MISTRAL) == {"<s>", "[TOOL_CALLS]"}
    assert hidden_special_tokens(_Tokenizer(), THINK, HERMES) is None
    assert hidden_special_tokens(_Tokenizer()) is None
