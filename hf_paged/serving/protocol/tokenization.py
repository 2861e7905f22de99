"""The bodies of `/tokenize` and `/detokenize`, with vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from .common import Body, TokenId, refuse
from .openai import MAX_MESSAGES, ChatMessage


class TokenizeRequest(Body):
    """A text, or a conversation, to be turned into tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("prompt", "or `messages` must be given, and not both.")
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse("add_generation_prompt", "and `continue_final_message` exclude each other; set one of them.")
        return self


class DetokenizeRequest(Body):
    """Tokens to be turned into text."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
