from __future__ import annotations

import pytest

from hf_paged.errors import ConfigurationError, UnknownNameError
from hf_paged.serving.answer_parser import ParsedReasoning
from hf_paged.serving.parser_choice import choose_parsers
from hf_paged.serving.reasoning_parsers import get_reasoning_parser
from hf_paged.serving.tool_choice import ToolPlan, plan_tools
from hf_paged.serving.tool_parsers import ParsedCallStart, ParsedText, get_tool_parser

from .test_answer_parser import _Token

TOOLS = [{"type": "function", "function": {"name": "f"}}]


class _Tokenizer:
    chat_template = "<think> [TOOL_CALLS]"
    all_special_tokens = ["<s>"]
    added_tokens_decoder = {0: _Token("<s>", True), 1: _Token("[TOOL_CALLS]", True)}


def _choose(**how):
    return choose_parsers(_Tokenizer(), **how)


def test_names_are_looked_up():
    choice = _choose(tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    assert choice.tool is get_tool_parser("hermes")
    assert choice.reasoning is get_reasoning_parser("deepseek_r1")
    assert _choose().tool is None
    with pytest.raises(UnknownNameError, match="tool-call parser 'nope'; available: hermes"):
        _choose(tool_call_parser="nope")
    with pytest.raises(UnknownNameError, match="reasoning parser 'nope'; available: "):
        _choose(reasoning_parser="nope")


def test_auto_looks_into_the_template(caplog, monkeypatch):
    with caplog.at_level("INFO"):
        choice = _choose(tool_call_parser="auto", reasoning_parser="auto")
    assert choice.tool is get_tool_parser("mistral")
    assert choice.reasoning is get_reasoning_parser("think")
    assert "--tool-call-parser auto: the chat template is that of mistral" in caplog.text
    monkeypatch.setattr(_Tokenizer, "chat_template", "plain")
    with pytest.raises(ConfigurationError, match="--tool-call-parser` is auto.*hermes"):
        _choose(tool_call_parser="auto")


def test_special_tokens_are_decoded_only_where_a_parser_reads_them():
    choice = _choose(tool_call_parser="mistral", reasoning_parser="think")
    auto = plan_tools(TOOLS, parser=choice.tool)
    assert choice.for_request(ToolPlan(), "").skip_special_tokens
    assert choice.for_request(plan_tools(TOOLS, "required"), "").skip_special_tokens
    parsers = choice.for_request(auto, "")
    assert not parsers.skip_special_tokens
    assert parsers.hidden == {"<s>", "[TOOL_CALLS]"}
    shown = choice.for_request(auto, "", skip_special_tokens=False)
    assert not shown.skip_special_tokens
    assert not shown.hidden


def test_each_answer_has_a_parser_of_its_own():
    choice = _choose(tool_call_parser="mistral", reasoning_parser="think")
    parsers = choice.for_request(plan_tools(TOOLS, parser=choice.tool), "<think>\n")
    first, second = parsers.new(), parsers.new()
    assert first.feed("hm</think>[TOOL_CALLS]f{") == [ParsedReasoning("hm"), ParsedCallStart(0, "f"), (0, "{")]
    assert second.feed("hm") == [ParsedReasoning("hm")]
    assert len(parsers.new_call_id()) == 9


def test_an_answer_that_is_continued_behind_its_reasoning_has_none():
    choice = _choose(reasoning_parser="deepseek_r1")
    parsers = choice.for_request(ToolPlan(), "a: hm</think>So", continued="hm</think>So")
    assert parsers.new().feed(" it is.") == [ParsedText(" it is.")]
    assert parsers.new_call_id().startswith("call_")
