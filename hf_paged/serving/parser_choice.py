"""Which parsers read answers: chosen for a server when it starts, and put together for each request."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from ..generation.structured.params import StructuredOutputsParams
from .answer_parser import AnswerParser, hidden_special_tokens
from .command_line import UsageError
from .reasoning_parsers import ReasoningParser, detect_reasoning_parser, get_reasoning_parser, reasoning_parsers
from .reasoning_parsers.constraint import after_reasoning
from .tool_choice import ToolPlan
from .tool_parsers import ToolParser, detect_tool_parser, get_tool_parser, new_call_id, tool_parsers

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RequestParsers:
    """How the answers to one request are read.

    Args:
        reasoning (`type[ReasoningParser]`, *optional*):
            The class of the reasoning parser.
        plan (`ToolPlan`):
            What its tools and `tool_choice` mean.
        prompt (`str`):
            The prompt's text, or its end.
        continued (`str`):
            The answers' beginning, if the prompt holds it already.
        skip_special_tokens (`bool`):
            How its answers must be decoded.
        hidden (`frozenset[str]`, *optional*, defaults to `frozenset()`):
            What parsers leave out.
    """

    reasoning: type[ReasoningParser] | None
    plan: ToolPlan
    prompt: str
    continued: str
    skip_special_tokens: bool
    hidden: frozenset[str] = frozenset()

    def new(self) -> AnswerParser:
        """Returns the parser for one answer."""
        return AnswerParser(
            self._reasoning_parser(),
            self.plan.make_parser(),
            hidden=self.hidden,
            max_calls=self.plan.max_calls,
        )

    def new_call_id(self) -> str:
        """Returns an id for a call, of the kind that the model's template takes."""
        return new_call_id(self.plan.id_style)

    def constrain(
        self, params: StructuredOutputsParams, tokenizer: Any, *, beside_calls: bool = False
    ) -> StructuredOutputsParams:
        """Returns a constraint as it holds for answers that may begin with reasoning.

        Args:
            params (`StructuredOutputsParams`):
                Asked for by `response_format` and the like, or `plan.structured_outputs`.
            tokenizer (`PreTrainedTokenizerBase`):
                The model's tokenizer.
            beside_calls (`bool`, *optional*, defaults to `False`):
                Whether the model may also call a tool, if the request lets it choose.

        Raises:
            InvalidRequestError: If this kind of constraint cannot follow reasoning, or stand beside calls.
        """
        calls = self.plan.parser if beside_calls else None
        return after_reasoning(params, self._reasoning_parser(), tokenizer, calls=calls)

    def _reasoning_parser(self) -> ReasoningParser | None:
        return None if self.reasoning is None else self.reasoning(self.prompt, self.continued)


@dataclasses.dataclass(frozen=True)
class ParserChoice:
    """The parsers of a server.

    Args:
        tool (`type[ToolParser]`, *optional*):
            How its model writes calls.
        reasoning (`type[ReasoningParser]`, *optional*):
            How it marks reasoning.
        hidden (`frozenset[str]`, *optional*):
            What to hide while only the reasoning parser is used, see `hidden_special_tokens`.
        hidden_with_tools (`frozenset[str]`, *optional*):
            What to hide while both are used.
    """

    tool: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    hidden: frozenset[str] | None = None
    hidden_with_tools: frozenset[str] | None = None

    def for_request(
        self, plan: ToolPlan, prompt: str, *, continued: str = "", skip_special_tokens: bool = True
    ) -> RequestParsers:
        """Returns how the answers to a request are read.

        Args:
            plan (`ToolPlan`):
                What its tools and `tool_choice` mean.
            prompt (`str`):
                The prompt's text, or its end: tells whether answers begin inside the reasoning.
            continued (`str`, *optional*, defaults to `""`):
                The answer's beginning, if the prompt holds it already (`continue_final_message`).
            skip_special_tokens (`bool`, *optional*, defaults to `True`):
                What the request says.
        """
        hidden = self.hidden_with_tools if plan.choice == "auto" else self.hidden
        if not skip_special_tokens or hidden is None:
            return RequestParsers(self.reasoning, plan, prompt, continued, skip_special_tokens)
        return RequestParsers(self.reasoning, plan, prompt, continued, False, hidden)


def choose_parsers(
    tokenizer: Any,
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ParserChoice:
    """Returns the parsers that a server was told to use.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.
        tool_call_parser (`str`, *optional*):
            Of `--tool-call-parser`; `"auto"` looks into the chat template.
        reasoning_parser (`str`, *optional*):
            Of `--reasoning-parser`; `"auto"` likewise.

    Raises:
        UnknownNameError: If there is no parser of that name.
        UsageError: If `"auto"` finds none.
    """
    template = _template(tokenizer)
    tool = reasoning = None
    if tool_call_parser == "auto":
        tool_call_parser = _found("--tool-call-parser", detect_tool_parser(template), tool_parsers)
    if tool_call_parser is not None:
        tool = get_tool_parser(tool_call_parser)
    if reasoning_parser == "auto":
        reasoning_parser = _found("--reasoning-parser", detect_reasoning_parser(template), reasoning_parsers)
    if reasoning_parser is not None:
        reasoning = get_reasoning_parser(reasoning_parser)
    return ParserChoice(
        tool,
        reasoning,
        hidden_special_tokens(tokenizer, reasoning),
        hidden_special_tokens(tokenizer, reasoning, tool),
    )


def _template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = "\n".join(template.values())
    return template or ""


def _found(option: str, name: str | None, known: Any) -> str:
    if name is None:
        raise UsageError(
            f"`{option}` is auto, but the model's chat template has none of the marks of a known format; choose one of "
            f"{', '.join(known)}, or leave the option out."
        )
    logger.info("%s auto: the chat template is that of %s", option, name)
    return name
