"""Whether a server's chat template and parsers fit, looked at once when it starts and not when a client asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from .command_line import UsageError
from .parser_choice import ParserChoice
from .rendering import reserved_arguments
from .settings import ServerSettings

logger = logging.getLogger(__name__)

_MESSAGES = [{"role": "user", "content": "Hello!"}]
_TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}},
}


def check_templates(tokenizer: Any, settings: ServerSettings) -> None:
    """Compiles the chat template: a broken one is the operator's mistake, and would be told to clients.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            With the template that will be used.
        settings (`ServerSettings`):
            Say where it comes from.

    Raises:
        UsageError: If the one of `--chat-template` is broken (for the model's own there is a warning), or if
            `--default-chat-template-kwargs` sets what every request has a field for.
    """
    for name in (settings.default_chat_template_kwargs or {}).keys() & reserved_arguments():
        raise UsageError(f"`--default-chat-template-kwargs` cannot set {name!r}: it belongs to requests or the server.")
    templates = _templates(tokenizer)
    for name, template in templates.items():
        fault = _fault(template)
        if fault is None:
            continue
        given = settings.chat_template
        if given is not None:
            which = f" {given!r}" if template != given and Path(given).exists() else ""
            raise UsageError(f"`--chat-template`{which} is no template that Jinja takes: {fault}.")
        logger.warning(
            "The model's chat template%s is broken (%s): chats that need it get 400. --chat-template FILE replaces it.",
            f" {name!r}" if len(templates) > 1 else "",
            fault,
        )


def warn_of_misfits(tokenizer: Any, parsers: ParserChoice, settings: ServerSettings) -> None:
    """Warns if tools are not shown to the model, or if it does not know the tags of reasoning.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            With the template that will be used.
        parsers (`ParserChoice`):
            What will read answers.
        settings (`ServerSettings`):
            What was asked for.
    """
    text = "\n".join(_templates(tokenizer).values())
    if text and parsers.tool is not None and not shows_tools(tokenizer, settings.default_chat_template_kwargs or {}):
        logger.warning(
            "The chat template leaves `tools` out, so the model is not told of them: it will hardly make a call where "
            'it may choose (`tool_choice` "auto"). Forced calls work. --chat-template FILE brings another template.'
        )
    reasoning = parsers.reasoning
    if reasoning is not None and reasoning.close not in text and reasoning.close not in tokenizer.get_vocab():
        effect = " Whole answers count as reasoning, and forced forms never begin." if reasoning.begins_inside else ""
        logger.warning(
            "--reasoning-parser %s: neither the chat template nor the tokenizer knows %s.%s Leave it out if the model "
            "does not think.",
            settings.reasoning_parser,
            reasoning.close,
            effect,
        )


def shows_tools(tokenizer: Any, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a prompt differs if there is a tool; where a template renders neither, whether it names tools.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            With its chat template.
        arguments (`Mapping[str, Any]`):
            Further arguments of the template.
    """
    try:
        plain, shown = (
            tokenizer.apply_chat_template(
                _MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True, **arguments
            )
            for tools in (None, [_TOOL])
        )
    except Exception:  # templates refuse in many ways
        return any("tools" in template for template in _templates(tokenizer).values())
    return plain != shown


def _templates(tokenizer: Any) -> dict[str, str]:
    found = getattr(tokenizer, "chat_template", None) or {}
    return found if isinstance(found, dict) else {"default": found}


def _fault(template: str) -> str | None:
    try:
        render_jinja_template(conversations=[[]], chat_template=template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except Exception:  # what it does without a message does not matter
        logger.debug("a chat template refuses an empty conversation", exc_info=True)
    return None
