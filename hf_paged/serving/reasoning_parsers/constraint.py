"""A form forced upon an answer of a model that thinks first, or may call a tool instead: it holds for the rest."""

from __future__ import annotations

import json
from typing import Any

from ...errors import InvalidRequestError
from ...generation.structured.params import StructuredOutputsParams
from ..tool_parsers import ToolParser
from . import ReasoningParser

_BREAKS = r"/\n{0,3}/"  # between the reasoning and the answer


def after_reasoning(
    params: StructuredOutputsParams,
    parser: ReasoningParser | None,
    tokenizer: Any = None,
    *,
    calls: type[ToolParser] | None = None,
) -> StructuredOutputsParams:
    """Returns a constraint with free reasoning in front of it, if the answer begins with reasoning or may do so.

    Args:
        params (`StructuredOutputsParams`):
            What the answer itself must be.
        parser (`ReasoningParser`, *optional*):
            The answer's parser, which has seen the prompt.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Says whether the tags are special tokens.
        calls (`type[ToolParser]`, *optional*):
            How the model marks calls, if it may call tools instead of giving an answer of this form.

    Raises:
        InvalidRequestError: If the constraint is a grammar or a structural tag, which are not combined with anything,
            or calls have no mark by which to tell them from an answer.
    """
    if parser is None or parser.begins == "outside":
        if calls is None:
            return params
        return _grammar(["start: answer", *_answer(params, calls, tokenizer)])
    opening, closing = (_special(tokenizer, tag) for tag in (parser.open, parser.close))
    rules = [
        "start: thought answer" if parser.begins == "inside" else "start: (opening thought)? answer",
        f"opening: {opening or json.dumps(parser.open)}",
        f"thought: text {closing} BREAKS" if closing else "thought: text BREAKS",
        "text: TEXT" if closing else f"text[suffix={json.dumps(parser.close)}]: TEXT",
        f"BREAKS: {_BREAKS}",
        "TEXT: /(?s:.*)/",
        *_answer(params, calls, tokenizer),
    ]
    if parser.begins == "inside":
        del rules[1]
    return _grammar(rules)


def _grammar(rules: list[str]) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar="\n".join(rules) + "\n")


def _answer(params: StructuredOutputsParams, calls: type[ToolParser] | None, tokenizer: Any) -> list[str]:
    """The rules of the answer behind the reasoning: the form, or calls, which begin with a mark and go on freely."""
    if calls is None:
        return [f"answer: {_rule(params)}"]
    if calls.bare or not calls.opens:
        raise InvalidRequestError(
            f"`structured_outputs.{params.source.kind}` cannot be combined with `tools` that this model may call or "
            "not: its calls begin with nothing that tells them from an answer. Set `tool_choice` to 'none' or "
            "'required', or leave one of the two out."
        )
    special = {marker: _special(tokenizer, marker) for marker in sorted(calls.markers())}
    opens = " | ".join([special[marker] or json.dumps(marker) for marker in calls.opens])
    further = " | ".join([name for name in special.values() if name])
    return [
        "answer: form | calls",
        f"form: {_rule(params)}",
        f"calls: ({opens}) CALL? {f'(({further}) CALL?)*' if further else ''}",
        "CALL: /(?s:.+)/",
    ]


def _special(tokenizer: Any, tag: str) -> str | None:
    """How a grammar names a special token; `None` if the tag is ordinary text."""
    if tokenizer is None:
        return None
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = [token_id for token_id, token in added.items() if token.special and token.content == tag]
    return f"<[{ids[0]}]>" if ids else None


def _rule(params: StructuredOutputsParams) -> str:
    source = params.source
    if source.kind == "json":
        return f"%json {json.dumps({**json.loads(source.text), 'x-guidance': dict(source.options)})}"
    if source.kind == "choice":
        return " | ".join(json.dumps(choice) for choice in json.loads(source.text))
    if source.kind == "regex":
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(source.text, 'dw')}/"
    raise InvalidRequestError(
        f"`structured_outputs.{source.kind}` cannot be combined with reasoning; use a JSON schema, choices or a "
        "regular expression, or switch thinking off through `chat_template_kwargs`."
    )
