from __future__ import annotations

import pytest

from hf_paged.errors import InvalidRequestError
from hf_paged.generation.structured.params import StructuredOutputsParams
from hf_paged.serving.reasoning_parsers import get_reasoning_parser
from hf_paged.serving.reasoning_parsers.constraint import after_reasoning
from hf_paged.serving.tool_parsers import get_tool_parser

llguidance = pytest.importorskip("llguidance")

R1, THINK = get_reasoning_parser("deepseek_r1"), get_reasoning_parser("think")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = StructuredOutputsParams(json=SCHEMA)


class SpecialTagParser(R1):
    """Its closing tag is a special token of the tokenizer."""

    close = "<|im_end|>"


@pytest.fixture(scope="module")
def allows(real_tokenizer):
    """Whether a constraint allows exactly this answer."""
    from llguidance.hf import from_tokenizer

    tokenizer = from_tokenizer(real_tokenizer)

    def check(params: StructuredOutputsParams, text: str) -> bool:
        grammar = llguidance.LLMatcher.grammar_from_lark(params.grammar)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(real_tokenizer.encode(text)) and matcher.is_accepting()

    return check


@pytest.mark.parametrize(
    ("make", "params", "right", "wrong"),
    [
        (R1, JSON, ['hm\n</think>\n\n{"a":1}', '</think>{"a":1}', 'a < b </thin</think>{"a":-2}'], ['{"a":1}']),
        (R1, JSON, [], ["hm</think>so", 'hm</think>{"a": 1}', 'hm</think>{"b":1}', "hm</think>"]),
        (THINK, JSON, ['<think>hm</think>\n\n{"a":1}', '{"a":1}'], ['hm</think>{"a":1}', "<think>hm"]),
        (R1, StructuredOutputsParams(regex=r"a/b\d+"), ["hm</think>a/b12"], ["hm</think>a/c1"]),
        (R1, StructuredOutputsParams(choice=["yes", 'n/"o']), ['hm</think>\nn/"o'], ["hm</think>maybe"]),
        (SpecialTagParser, JSON, ['hm<|im_end|>\n{"a":1}'], ['{"a":1}']),
    ],
)
def test_the_form_holds_behind_the_reasoning(make, params, right, wrong, allows, real_tokenizer):
    constraint = after_reasoning(params, make(), real_tokenizer)
    assert [text for text in right if not allows(constraint, text)] == []
    assert [text for text in wrong if allows(constraint, text)] == []


class MarkedToolParser(get_tool_parser("hermes")):
    """Its marks are special tokens of the tokenizer."""

    opens, closes = ("<|im_start|>",), ("<repo_name>",)


@pytest.mark.parametrize(
    ("make", "calls", "right", "wrong"),
    [
        (None, "hermes", ['{"a":1}', '<tool_call>\n{"x"}\n</tool_call>\n<tool_call>'], ["So.", '<tool>{"a":1}', ""]),
        (R1, "hermes", ['hm</think>{"a":1}', "hm</think>\n\n<tool_call>f"], ["hm</think>so", '{"a":1}']),
        (None, MarkedToolParser, ['{"a":1}', "<|im_start|>f<repo_name><|im_start|>g<repo_name>"], ["f<|im_start|>"]),
    ],
)
def test_a_call_may_come_instead_of_the_form(make, calls, right, wrong, allows, real_tokenizer):
    calls = get_tool_parser(calls) if isinstance(calls, str) else calls
    constraint = after_reasoning(JSON, make and make(), real_tokenizer, calls=calls)
    assert [text for text in right if not allows(constraint, text)] == []
    assert [text for text in wrong if allows(constraint, text)] == []


@pytest.mark.parametrize("name", ["llama3_json", "pythonic", "llama4_pythonic"])
def test_calls_without_a_mark_do_not_stand_beside_a_form(name):
    with pytest.raises(InvalidRequestError, match="begin with nothing.*`tool_choice`"):
        after_reasoning(JSON, None, calls=get_tool_parser(name))


def test_without_reasoning_the_form_stays_as_it_is():
    assert after_reasoning(JSON, THINK("<think>\n\n</think>\n\n")) is JSON


def test_grammars_are_not_combined_with_reasoning():
    with pytest.raises(InvalidRequestError, match="grammar.*reasoning.*chat_template_kwargs"):
        after_reasoning(StructuredOutputsParams(grammar='start: "a"'), R1())
