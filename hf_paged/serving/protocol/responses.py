"""The body of `/v1/responses`, and what it is as a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from .common import MAX_LOGPROBS, Integer, Part, SamplingFields, refuse, shortened
from .openai import MAX_MESSAGES, FunctionName

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
_STATELESS = "this server keeps no responses: send the whole conversation as `input`."
# Fields of the other routes that mean nothing here, or have another name.
_REFUSED = {
    "n": "is not a field of responses, which are single answers; send the request several times.",
    "best_of": "is not a field of responses, which are single answers.",
    "max_tokens": "is named `max_output_tokens` in responses.",
    "response_format": "is named `text.format` in responses.",
    "echo": "is not a field of responses.",
    "prompt_logprobs": "is not a field of responses; `/v1/completions` has it.",
    "return_token_ids": "is not a field of responses; `/v1/chat/completions` has it.",
}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class TextPart(BaseModel):
    """A part of a message or of a function's output: text."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check(self) -> TextPart:
        if self.type not in _TEXT_PARTS:
            raise ValueError(f"a part of type {shortened(self.type)} is not taken: this server takes text only.")
        if self.text is None and self.refusal is None:
            raise ValueError(f"this part of type {shortened(self.type)} has no `text`.")
        return self


def _text_or_list(value: Any) -> str:
    return "Text" if isinstance(value, str) else "List"


Parts = Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_MESSAGES)]
# Tagged, so that a mistake deep in a list is told as such and not as "not a string" first.
Content = Annotated[Annotated[str, Tag("Text")] | Annotated[Parts, Tag("List")], Discriminator(_text_or_list)]


class Message(BaseModel):
    """Something that was said, in either of OpenAI's two forms."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCall(BaseModel):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: Annotated[str, StringConstraints(min_length=1)]
    name: FunctionName
    arguments: str


class FunctionCallOutput(BaseModel):
    """What such a call gave."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, StringConstraints(min_length=1)]
    output: Content


class Reasoning(BaseModel):
    """What the model thought earlier. Templates that know of thinking get its text."""

    type: Literal["reasoning"]
    content: Parts | None = None


def _item_tag(value: Any) -> str | None:
    type_ = value.get("type") or "message" if isinstance(value, dict) else None
    return _ITEM_TAGS.get(type_) if isinstance(type_, str) else None


# Tags that no field is named like: they are left out where a mistake's place is told.
_ITEM_TAGS = {
    "message": "Message",
    "function_call": "Call",
    "function_call_output": "Output",
    "reasoning": "Reasoning",
}
Item = Annotated[
    Annotated[Message, Tag("Message")]
    | Annotated[FunctionCall, Tag("Call")]
    | Annotated[FunctionCallOutput, Tag("Output")]
    | Annotated[Reasoning, Tag("Reasoning")],
    Discriminator(
        _item_tag,
        custom_error_type="unknown_item",
        custom_error_message=f"must be an item of the type {', '.join(_ITEM_TAGS)}",
    ),
]
Items = Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class TextFormat(Part):
    """What form the text must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None  # answers follow the schema in any case

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise refuse("text.format.schema", "is missing, and `text.format.type` is 'json_schema'.")
        return self


class TextOptions(Part):
    """What the text must be like."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Part):
    """The function that has to be called, or one of those that may be."""

    type: Literal["function"]
    name: FunctionName


class AllowedTools(Part):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1)]


class ReasoningOptions(BaseModel):
    """How much to think."""

    model_config = ConfigDict(extra="allow")

    effort: Annotated[str, StringConstraints(max_length=32)] | None = None


MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class ResponsesRequest(SamplingFields):
    """The body of `/v1/responses`: OpenAI's fields, and vLLM's further ones as in chats."""

    input: Annotated[Annotated[str, Tag("Text")] | Annotated[Items, Tag("List")], Discriminator(_text_or_list)]
    instructions: str | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Field(max_length=32)] | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    # Understood, and without effect on an answer of this server.
    max_tool_calls: Integer | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None

    @model_validator(mode="after")
    def _check_response(self) -> ResponsesRequest:
        if self.background:
            raise refuse("background", "is not offered: answers are given while the client waits.")
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise refuse(name, f"is not offered: {_STATELESS}")
        if self.truncation == "auto":
            raise refuse(
                "truncation",
                "'auto' is not offered: items of the input are never dropped; send what fits, or 'disabled'.",
            )
        if self.prompt is not None:
            raise refuse("prompt", "(a stored template) is not offered; send its text as `instructions` or `input`.")
        for name, why in _REFUSED.items():
            if getattr(self, name) not in (None, False) and (name != "n" or self.n != 1):
                raise refuse(name, why)
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Returns whether the text comes with log-probabilities."""
        return LOGPROBS in (self.include or ())


_BETWEEN = "\n\n"  # between instructions and further system messages
_SAMPLING = SamplingFields.model_fields.keys() - {*_REFUSED, "model", "stream", "stream_options"}


def chat_fields(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the fields of the chat that a request for a response is.

    Args:
        request (`ResponsesRequest`):
            The body.

    Raises:
        ValueError: If an output of a function belongs to no call, or a tool is allowed that there is not.
    """
    fields: dict[str, Any] = request.model_dump(include=_SAMPLING, exclude_none=True, by_alias=True)
    fields |= {
        "model": request.model,
        "stream": request.stream,
        "messages": chat_messages(request),
        "max_completion_tokens": request.max_output_tokens,
        "response_format": _response_format(request),
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    if request.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.tools:
        fields["tools"] = [_chat_tool(tool) for tool in request.tools]
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        unknown = {tool.name for tool in choice.tools} - {tool.name for tool in request.tools or ()}
        if unknown:
            raise refuse("tool_choice.tools", f"has {shortened(min(unknown))}, which is not among the `tools`.")
        allowed = {"mode": choice.mode, "tools": [_chat_choice(tool) for tool in choice.tools]}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    else:
        fields["tool_choice"] = _chat_choice(choice) if isinstance(choice, FunctionChoice) else choice
    return fields


def _chat_choice(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def chat_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Returns the messages of a chat: the instructions, and what was said, called and given back.

    Instructions and system messages that follow them become one, as most templates take a single one, at the front.
    What the assistant thought, said and called in a row is one message of its.

    Args:
        request (`ResponsesRequest`):
            The body.

    Raises:
        ValueError: If an output of a function belongs to no call.
    """
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    calls: set[str] = set()
    for item in request.input:
        if isinstance(item, Message):
            _append_message(messages, item)
        elif isinstance(item, FunctionCall):
            calls.add(item.call_id)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        elif isinstance(item, FunctionCallOutput):
            if item.call_id not in calls:
                where = f"has an output for {shortened(item.call_id)}, but no such `function_call` came before it"
                raise refuse("input", f"{where}; {_STATELESS}")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _chat_content(item.output)})
        elif item.content:
            message = _assistant(messages)
            message["reasoning_content"] = message.get("reasoning_content", "") + _plain_text(item.content)
    return messages


def _append_message(messages: list[dict[str, Any]], item: Message) -> None:
    role = "system" if item.role == "developer" else item.role
    last = messages[-1] if messages else {}
    if role == "system" and len(messages) == 1 and last["role"] == "system":
        last["content"] += _BETWEEN + _plain_text(item.content)
    elif role == "system" and not messages:
        messages.append({"role": role, "content": _plain_text(item.content)})
    elif role == "assistant" and last.get("role") == role and "tool_calls" not in last:
        said = _parts(last["content"]) + _parts(_chat_content(item.content))
        last["content"] = _chat_content(item.content) if last["content"] is None else said
    else:
        messages.append({"role": role, "content": _chat_content(item.content)})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _plain_text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text or part.refusal or "" for part in content)


def _chat_content(content: str | list[TextPart]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text or part.refusal or ""} for part in content]


def _parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    wanted = request.text.format if request.text else None
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else {"type": wanted.type}
    return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema_}}


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": function}
