"""The bodies of `/v1/chat/completions` and `/v1/completions`: OpenAI's fields and vLLM's further ones."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from .common import MAX_LOGPROBS, Integer, SamplingFields, TokenId, refuse

MAX_PROMPTS = 1024
MAX_MESSAGES = 16_384

FunctionName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_REASONING_EFFORT = Annotated[str, StringConstraints(max_length=32)]


class ContentPart(BaseModel):
    """A part of a message. Only texts are taken; others are known by their `type` and refused by it."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(BaseModel):
    """The function of a call that an assistant made earlier."""

    name: FunctionName
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(BaseModel):
    """A call that an assistant made earlier."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message of a conversation. Fields of its own that a template knows reach the template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class ChatCompletionRequest(SamplingFields):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None  # these two are checked by `tool_choice.py`
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: _REASONING_EFFORT | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    # Understood, and without effect on an answer of this server.
    metadata: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.max_tokens == 0:
            raise refuse("max_tokens", "must be at least 1 in a chat, got 0.")
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", f"is {self.top_logprobs}, which needs `logprobs` to be true.")
        if self.audio is not None or (self.modalities or ["text"]) != ["text"]:
            raise refuse(
                "modalities" if self.audio is None else "audio", "is not offered: this server answers in text."
            )
        if self.functions or self.function_call not in (None, "none", "auto"):
            raise refuse("functions", "is OpenAI's older form of `tools`, which this server takes instead.")
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse("add_generation_prompt", "and `continue_final_message` exclude each other; set one of them.")
        return self

    @property
    def answer_limit(self) -> int | None:
        """Returns how many tokens an answer may have, if the request says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(SamplingFields):
    """The body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | Annotated[
            list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True, max_length=MAX_PROMPTS)
        ]
        | None
    ) = None
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: str | None = None
    prompt_embeds: Any = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _as_in_chats(cls, value: Any) -> Any:
        return {True: 1, False: None}[value] if isinstance(value, bool) else value

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _of_one_kind(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError:
            if isinstance(value, list) and len({str, int, list} & set(map(type, value))) > 1:
                message = (
                    "is a text, token ids, a list of texts or a list of lists of token ids; one list holds one kind."
                )
                raise refuse("prompt", message) from None
            raise

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.suffix:
            raise refuse("suffix", "is not offered: this server continues prompts and fills no gaps.")
        if self.prompt_embeds is not None:
            raise refuse("prompt_embeds", "is not taken by this server; send texts or token ids as `prompt`.")
        if self.prompt is None:
            raise refuse("prompt", "is missing.")
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens", "may be 0 only with `echo`; otherwise there is nothing to answer.")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, one or many, as a list of texts or of token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt or ())


def parsed_arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Returns the arguments of an earlier call as templates want them: an object, or the text if it is none.

    Args:
        arguments (`str` or `dict`, *optional*):
            OpenAI's clients send a text of JSON.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):  # a model may have written anything
        return arguments
