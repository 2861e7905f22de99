from __future__ import annotations

import re

import pytest

from hf_paged.serving.tool_parsers import detect_tool_parser, new_call_id


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("{{ '<|tool_call_start|>' }}", "lfm2"),
        ("{{ '<tool_call><function=' }}", "qwen3_coder"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_templates_tell_their_format(template, name):
    assert detect_tool_parser(template) == name


@pytest.mark.parametrize(("style", "form"), [("openai", "call_[0-9a-f]{32}"), ("mistral", "[a-zA-Z0-9]{9}")])
def test_ids_are_different_and_have_the_form_of_their_style(style, form):
    ids = {new_call_id(style) for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(form, call_id) for call_id in ids)
