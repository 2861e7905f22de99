"""A form forced upon an answer, for models that think first: the form holds from the end of the reasoning on."""

from __future__ import annotations

import json
from typing import Any

from ...errors import InvalidRequestError
from ...generation.structured.params import StructuredOutputsParams
from . import ReasoningParser

_BREAKS = r"/\n{0,3}/"  # between the reasoning and the answer


def after_reasoning(
    params: StructuredOutputsParams, parser: ReasoningParser, tokenizer: Any = None
) -> StructuredOutputsParams:
    """Returns the constraint with free reasoning in front of it, if the answer begins with reasoning or may do so.

    Args:
        params (`StructuredOutputsParams`):
            What the answer itself must be.
        parser (`ReasoningParser`):
            The answer's parser, which has seen the prompt.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Says whether the tags are special tokens.

    Raises:
        InvalidRequestError: If the constraint is a grammar or a structural tag, which are not combined with reasoning.
    """
    if parser.begins == "outside":
        return params
    opening, closing = (_special(tokenizer, tag) for tag in (parser.open, parser.close))
    rules = [
        "start: thought answer" if parser.begins == "inside" else "start: (opening thought)? answer",
        f"opening: {opening or json.dumps(parser.open)}",
        f"thought: text {closing} BREAKS" if closing else "thought: text BREAKS",
        "text: TEXT" if closing else f"text[suffix={json.dumps(parser.close)}]: TEXT",
        f"BREAKS: {_BREAKS}",
        "TEXT: /(?s:.*)/",
        f"answer: {_rule(params)}",
    ]
    if parser.begins == "inside":
        del rules[1]
    return StructuredOutputsParams(grammar="\n".join(rules) + "\n")


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
