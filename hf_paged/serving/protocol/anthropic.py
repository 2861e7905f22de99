"""The body of Anthropic's `/v1/messages`, what it is as a chat, and the form of its errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, StringConstraints, Tag, model_validator

from ..errors import ApiError
from .common import MAX_STOP_STRINGS, Integer, Part, SamplingFields, StopString, refuse, shortened
from .openai import MAX_MESSAGES, FunctionName

MAX_BLOCKS = MAX_MESSAGES
# Fields of the other routes that mean nothing here, or have another name.
_REFUSED = {
    "n": "is not a field of messages, which are single answers; send the request several times.",
    "best_of": "is not a field of messages, which are single answers.",
    "stop": "is named `stop_sequences` in messages.",
    "response_format": "is named `output_config.format` in messages.",
    "echo": "is not a field of messages.",
    "prompt_logprobs": "is not a field of messages; `/v1/completions` has it.",
    "return_token_ids": "is not a field of messages; `/v1/chat/completions` has it.",
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Returns an error in Anthropic's form, which is also an event of its streams.

    Args:
        error (`ApiError`):
            What went wrong.
    """
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _text_or_list(value: Any) -> str:
    return "Text" if isinstance(value, str) else "List"


class TextBlock(BaseModel):
    """Text."""

    type: Literal["text"]
    text: str


Texts = Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_BLOCKS)]
# Tagged, so that a mistake deep in a list is told as such and not as "not a string" first.
TextContent = Annotated[Annotated[str, Tag("Text")] | Annotated[Texts, Tag("List")], Discriminator(_text_or_list)]


class ThinkingBlock(BaseModel):
    """What the model thought earlier. Templates that know of thinking get it."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BaseModel):
    """What another model thought earlier, encrypted: of no use here."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    """A call that the model made earlier."""

    type: Literal["tool_use"]
    id: Annotated[str, StringConstraints(min_length=1)]
    name: FunctionName
    input: dict[str, Any]


class ToolResultBlock(BaseModel):
    """What such a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, StringConstraints(min_length=1)]
    content: TextContent | None = None
    is_error: bool | None = None


# Tags that no field is named like: they are left out where a mistake's place is told.
_BLOCK_TAGS = {
    "text": "Text",
    "thinking": "Thinking",
    "redacted_thinking": "Redacted",
    "tool_use": "Use",
    "tool_result": "Result",
}


def _block_tag(value: Any) -> str | None:
    type_ = value.get("type") if isinstance(value, dict) else None
    return _BLOCK_TAGS.get(type_) if isinstance(type_, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[RedactedThinkingBlock, Tag("Redacted")]
    | Annotated[ToolUseBlock, Tag("Use")]
    | Annotated[ToolResultBlock, Tag("Result")],
    Discriminator(
        _block_tag,
        custom_error_type="unknown_block",
        custom_error_message=f"must be a block of the type {', '.join(_BLOCK_TAGS)}; this server takes text only",
    ),
]
Blocks = Annotated[list[Block], Field(fail_fast=True, max_length=MAX_BLOCKS)]


class InputMessage(BaseModel):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("Text")] | Annotated[Blocks, Tag("List")], Discriminator(_text_or_list)]


class Tool(Part):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Part):
    """Which tools the model may, or has to, call."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise refuse("tool_choice.name", "is missing, and `tool_choice.type` is 'tool'.")
        return self


class Thinking(Part):
    """Whether the model thinks before it answers. How long it does cannot be limited apart from the answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[Integer, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Part):
    """The schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """What the answer must be like."""

    effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(SamplingFields):
    """The body of `/v1/messages/count_tokens`: what the prompt is made of."""

    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: TextContent | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Understood, and without effect on an answer of this server.
    cache_control: Any = None
    context_management: Any = None
    metadata: Any = None
    service_tier: Any = None

    @model_validator(mode="after")
    def _check_message(self) -> CountTokensRequest:
        for name, why in _REFUSED.items():
            if getattr(self, name) not in (None, False) and (name != "n" or self.n != 1):
                raise refuse(name, why)
        return self


class MessagesRequest(CountTokensRequest):
    """The body of `/v1/messages`: Anthropic's fields, and vLLM's further ones as in chats."""

    max_tokens: Annotated[Integer, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None

    @property
    def shown_thinking(self) -> str:
        """Returns what the client gets of the model's thinking: `"shown"`, `"omitted"` or `"hidden"`."""
        if self.thinking is None or self.thinking.type == "disabled":
            return "hidden"
        return "omitted" if self.thinking.display == "omitted" else "shown"


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAMPLING = SamplingFields.model_fields.keys() - {*_REFUSED, "model", "stream", "stream_options", "max_tokens"}


def chat_fields(request: CountTokensRequest) -> dict[str, Any]:
    """Returns the fields of the chat that a request for a message is.

    Args:
        request (`CountTokensRequest`):
            The body.

    Raises:
        ValueError: If results of tools and calls do not belong together.
    """
    fields: dict[str, Any] = request.model_dump(include=_SAMPLING, exclude_none=True, by_alias=True)
    fields |= {"model": request.model, "stream": request.stream, "messages": chat_messages(request)}
    if isinstance(request, MessagesRequest):
        fields |= {"max_completion_tokens": request.max_tokens, "stop": request.stop_sequences}
    if fields["messages"][-1]["role"] == "assistant":  # the beginning of the answer, to be continued
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        fields["tools"] = [_chat_tool(tool) for tool in request.tools]
    choice, output = request.tool_choice, request.output_config
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = _CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if output is not None:
        fields["reasoning_effort"] = output.effort
        if output.format is not None:
            schema = {"name": "output", "schema": output.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    # Models of which this is not asked do not think, with Anthropic; templates that cannot tell theirs ignore it.
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    fields["chat_template_kwargs"] = {"enable_thinking": thinks} | (request.chat_template_kwargs or {})
    return fields


def chat_messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    """Returns the messages of a chat. Turns of one role in a row are one, as with Anthropic.

    Args:
        request (`CountTokensRequest`):
            The body.

    Raises:
        ValueError: If results of tools and calls do not belong together.
    """
    messages: list[dict[str, Any]] = []
    if request.system:
        system = [request.system] if isinstance(request.system, str) else [block.text for block in request.system]
        messages.append({"role": "system", "content": [{"type": "text", "text": text} for text in system]})
    calls: set[str] = set()
    for index, turn in enumerate(request.messages):
        for block in [TextBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content:
            if isinstance(block, TextBlock):
                _turn(messages, turn.role)["content"].append({"type": "text", "text": block.text})
            elif isinstance(block, ToolResultBlock):
                _append_result(messages, block, calls, f"messages[{index}]")
            elif turn.role == "assistant":
                _append_block(_turn(messages, "assistant"), block, calls)
            else:
                raise refuse(f"messages[{index}]", f"has a {block.type} block, which only the assistant's turns have.")
    if not messages or messages[-1]["role"] == "system":
        raise refuse("messages", "has nothing to answer: its turns are empty.")
    if messages[-1].get("tool_calls"):
        raise refuse("messages", "ends with a `tool_use` block; the result of that call is needed to go on.")
    return [{**message, "content": _simplest(message["content"])} for message in messages]


def _turn(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The message at the end, if it is of this role and can go on."""
    if not messages or messages[-1]["role"] != role or not isinstance(messages[-1]["content"], list):
        messages.append({"role": role, "content": []})
    return messages[-1]


def _simplest(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]] | None:
    """Most messages are one text, which is what templates know best."""
    if isinstance(content, str) or len(content) > 1:
        return content
    return content[0]["text"] if content else None


def _append_result(messages: list[dict[str, Any]], block: ToolResultBlock, calls: set[str], where: str) -> None:
    if block.tool_use_id not in calls:
        raise refuse(where, f"has a result for {shortened(block.tool_use_id)}, but no such `tool_use` came before it.")
    content = _chat_content(block.content or "")
    messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})


def _append_block(message: dict[str, Any], block: Block, calls: set[str]) -> None:
    if isinstance(block, ToolUseBlock):
        calls.add(block.id)
        call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        message.setdefault("tool_calls", []).append(call)
    elif isinstance(block, ThinkingBlock):
        message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking


def _chat_content(content: str | list[TextBlock]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [{"type": "text", "text": block.text} for block in content]


def _chat_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
