from __future__ import annotations

import pytest

from hf_paged.errors import InvalidRequestError
from hf_paged.generation.structured.params import StructuredOutputsParams
from hf_paged.serving.reasoning_parsers import get_reasoning_parser
from hf_paged.serving.reasoning_parsers.constraint import after_reasoning

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


def test_without_reasoning_the_form_stays_as_it_is():
    assert after_reasoning(JSON, THINK("<think>\n\n</think>\n\n")) is JSON


def test_grammars_are_not_combined_with_reasoning():
    with pytest.raises(InvalidRequestError, match="grammar.*reasoning.*chat_template_kwargs"):
        after_reasoning(StructuredOutputsParams(grammar='start: "a"'), R1())
