"""Warnings of a server whose chat template, parsers and model do not go together."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hf_paged.serving.command_line import UsageError
from hf_paged.serving.parser_choice import choose_parsers
from hf_paged.serving.settings import ServerSettings
from hf_paged.serving.template_checks import check_templates, warn_of_misfits


class _Templated:
    """Renders as Transformers does."""

    all_special_tokens: list[str] = []
    added_tokens_decoder: dict[int, object] = {}

    def __init__(self, template, vocabulary=()):
        self.chat_template = template
        self._vocabulary = dict.fromkeys(vocabulary, 0)

    def get_vocab(self):
        return self._vocabulary

    def apply_chat_template(self, messages, tools=None, tokenize=False, **arguments):
        return render_jinja_template([messages], tools, chat_template=self.chat_template, **arguments)[0][0]


def _warnings(caplog, tokenizer, **how):
    caplog.clear()
    settings = ServerSettings(**how)
    check_templates(tokenizer, settings)
    choice = choose_parsers(
        tokenizer, tool_call_parser=settings.tool_call_parser, reasoning_parser=settings.reasoning_parser
    )
    warn_of_misfits(tokenizer, choice, settings)
    return caplog.text


def test_a_template_that_leaves_tools_out_is_told_where_calls_are_read(caplog):
    plain = _Templated("{{ messages[0].content }}")
    assert "The chat template leaves `tools` out" in _warnings(caplog, plain, tool_call_parser="hermes")
    assert not _warnings(caplog, plain)
    shown = _Templated("{% if tools %}{{ tools | tojson }}{% endif %}")
    assert not _warnings(caplog, shown, tool_call_parser="hermes")
    only_named = _Templated("{# tools #}{{ messages[0].content }}")
    assert "leaves `tools` out" in _warnings(caplog, only_named, tool_call_parser="hermes")
    only_if = _Templated("{% if with_tools %}{{ tools }}{% endif %}")
    assert "leaves `tools` out" in _warnings(caplog, only_if, tool_call_parser="hermes")
    arguments = {"with_tools": True}
    assert not _warnings(caplog, only_if, tool_call_parser="hermes", default_chat_template_kwargs=arguments)
    refuses = _Templated("{{ raise_exception('a system message is needed') }}{{ tools }}")
    assert not _warnings(caplog, refuses, tool_call_parser="hermes"), "it is not known"


def test_a_reasoning_parser_whose_tags_nobody_knows_is_told(caplog):
    plain = _Templated("{{ messages[0].content }}")
    text = _warnings(caplog, plain, reasoning_parser="deepseek_r1")
    assert "--reasoning-parser deepseek_r1: neither the chat template nor the tokenizer knows </think>" in text
    assert "Whole answers count as reasoning" in text
    assert "Whole answers" not in _warnings(caplog, plain, reasoning_parser="qwen3")
    assert not _warnings(caplog, _Templated("x", ["</think>"]), reasoning_parser="deepseek_r1")
    assert not _warnings(caplog, _Templated("{{ '</think>' }}"), reasoning_parser="deepseek_r1")


def test_a_models_own_broken_template_is_told_at_start(caplog):
    broken = {"default": "{{ messages[0].content }}", "tool_use": "a\n{% for %}"}
    text = _warnings(caplog, _Templated(broken))
    assert "The model's chat template 'tool_use' is broken (line 2: " in text
    with pytest.raises(UsageError, match="`--chat-template` is no template that Jinja takes: line 1: "):
        _warnings(caplog, _Templated("{% for %}"), chat_template="{% for %}")
    for fine in ("{% generation %}a{% endgeneration %}", "{{ messages[0].content }}", "{{ raise_exception('no') }}"):
        assert not _warnings(caplog, _Templated(fine), chat_template=fine)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "strftime_now"])
def test_defaults_of_templates_cannot_stand_in_for_what_requests_say(name):
    settings = ServerSettings(default_chat_template_kwargs={"enable_thinking": False, name: 1})
    with pytest.raises(UsageError, match=f"--default-chat-template-kwargs` cannot set '{name}'"):
        check_templates(_Templated("{{ messages }}"), settings)
    check_templates(
        _Templated("{{ messages }}"), ServerSettings(default_chat_template_kwargs={"enable_thinking": False})
    )
