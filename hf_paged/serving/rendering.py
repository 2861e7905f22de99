"""Prompts: texts and conversations become tokens, in worker threads.

A conversation goes through the model's chat template as Transformers does it, and its text is tokenized as one: special
tokens that a user writes into a message become special tokens, as with `apply_chat_template`. Nothing is ever fetched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .errors import ApiError
from .protocol.openai import ChatMessage, ContentPart, parsed_arguments
from .request_templates import TemplateProcess
from .service import Prompt, Service
from .time_limit import Interrupted, TimeLimit

logger = logging.getLogger(__name__)

TEMPLATE_SECONDS = 5.0

_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}
_MAX_REFUSAL = 500  # characters of a template's own message
# What templates get from elsewhere, or find in Jinja; arguments of requests must not stand in for them.
_NOT_FOR_REQUESTS = {"messages", "raise_exception", "strftime_now", "namespace", "range", "dict", "self", "loop"}
_MARGIN = 64  # tokens beyond those that a cut prompt keeps, so that the cut is far from them


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given.

    Args:
        messages (`Sequence[ChatMessage]`):
            The messages.
        tools (`Sequence[Mapping[str, Any]]`, defaults to `()`):
            What the model may call.
        documents (`Sequence[Mapping[str, Any]]`, *optional*):
            What the answer may draw on.
        template (`str`, *optional*):
            A template that came with the request.
        template_arguments (`Mapping[str, Any]`, *optional*):
            Further arguments of the template, from the request.
        continue_final_message (`bool`, defaults to `False`):
            Whether the last message is to be continued.
        add_generation_prompt (`bool`, *optional*):
            Whether the prompt ends where the assistant's turn begins; so it is unless the last message is continued.
        add_special_tokens (`bool`, defaults to `False`):
            Whether the tokenizer adds its special tokens to those of the template.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    template_arguments: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    add_special_tokens: bool = False


async def render_chat(
    service: Service, conversation: Conversation, *, keep_last: int | None = None, any_length: bool = False
) -> Prompt:
    """Returns a conversation as a prompt.

    Args:
        service (`Service`):
            Has the tokenizer and its template.
        conversation (`Conversation`):
            What to render.
        keep_last (`int`, *optional*):
            Cut the prompt to its last tokens.
        any_length (`bool`, defaults to `False`):
            Whether the prompt may be longer than the context, since it is only counted.

    Raises:
        ApiError: 400, if the messages are not what this model takes, or too long.
    """
    template = _template(service, conversation)
    if len(conversation.messages) > service.max_model_len and not any_length:
        raise too_long(service, "messages", f"at least {len(conversation.messages)}")
    arguments = _template_arguments(service, conversation, template)
    run = service.run_aside if any_length else service.run
    encode = functools.partial(_encode, service, "messages", conversation.add_special_tokens, keep_last, any_length)
    if conversation.template is not None:
        return await run(encode, await _render_elsewhere(service, conversation, template, arguments))
    limit = TimeLimit(asyncio.get_running_loop(), TEMPLATE_SECONDS)
    render = functools.partial(_render, service.tokenizer, conversation, template, arguments, limit)
    try:
        return await run(lambda: encode(render()))  # one way to the workers and back
    except Interrupted:
        raise _late("messages") from None
    finally:
        limit.cancel()


async def tokenize_text(
    service: Service,
    text: str,
    *,
    param: str = "prompt",
    add_special_tokens: bool = True,
    keep_last: int | None = None,
    any_length: bool = False,
) -> Prompt:
    """Returns a text as a prompt.

    Args:
        service (`Service`):
            Has the tokenizer.
        text (`str`):
            The text.
        param (`str`, defaults to `"prompt"`):
            The field that it came in, for errors.
        add_special_tokens (`bool`, defaults to `True`):
            Whether the tokenizer adds a beginning-of-sequence token and the like.
        keep_last (`int`, *optional*):
            Cut the prompt to its last tokens.
        any_length (`bool`, defaults to `False`):
            Whether the prompt may be longer than the context, since it is only counted.

    Raises:
        ApiError: 400, if it is no text, empty, or certainly too long.
    """
    run = service.run_aside if any_length else service.run
    return await run(_encode, service, param, add_special_tokens, keep_last, any_length, text)


def too_long(service: Service, param: str, num_tokens: int | str, max_tokens: int | None = None) -> ApiError:
    """Returns the error for a prompt that leaves too little room.

    Args:
        service (`Service`):
            Knows the limit.
        param (`str`):
            The field that the prompt came in.
        num_tokens (`int` or `str`):
            Of the prompt.
        max_tokens (`int`, *optional*):
            What was asked for as an answer.
    """
    limit = service.max_model_len
    tokens = "token" if num_tokens == 1 else "tokens"
    answer = f"an answer of up to {max_tokens}" if max_tokens is not None else "an answer of at least 1"
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens, but `{param}` has {num_tokens} {tokens} and {answer} "
        f"was asked for. Shorten it{', or lower `max_tokens`' if max_tokens is not None else ''}.",
        param=param,
        code="context_length_exceeded",
    )


# ------------------------------------------------------------------ what the template gets


def _template(service: Service, conversation: Conversation) -> str:
    if conversation.template is not None:
        if not service.settings.trust_request_chat_template:
            raise ApiError(
                400,
                "`chat_template` in a request is not accepted: a template is a program. The server's operator may "
                "allow it with `--trust-request-chat-template`.",
                param="chat_template",
            )
        return conversation.template
    try:
        template = service.tokenizer.get_chat_template(tools=list(conversation.tools) or None)
    except ValueError:
        raise ApiError(
            400,
            "This model has no chat template. Use `/v1/completions`, or start the server with `--chat-template FILE`.",
            param="messages",
            code="no_chat_template",
        ) from None
    if conversation.tools and "tools" not in template:
        _warn_of_unseen_tools()
    return template


@functools.cache
def _warn_of_unseen_tools() -> None:
    logger.warning(
        "A request has `tools`, which the chat template leaves out: the model is not told of them. Forced calls work; "
        "others will hardly be made."
    )


def _template_arguments(service: Service, conversation: Conversation, template: str) -> dict[str, Any]:
    """Returns what the template is given beside messages and tools: what it mentions, and nothing that we set."""
    arguments = dict(service.settings.default_chat_template_kwargs or {})
    given = dict(conversation.template_arguments or {})
    documents = given.pop("documents", None) if conversation.documents is None else list(conversation.documents)
    reserved = reserved_arguments() | service.tokenizer.special_tokens_map.keys()
    mentioned = _words(template) if given else frozenset()
    for name, value in given.items():
        if name in reserved or name.startswith("_"):
            raise ApiError(
                400,
                f"`chat_template_kwargs.{name[:64]}` cannot be set: it has its own field, or belongs to the server.",
                param="chat_template_kwargs",
            )
        if name in mentioned:
            arguments[name] = value
    if documents is not None:
        if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
            raise ApiError(400, "`documents` must be a list of objects.", param="documents")
        arguments["documents"] = documents
    continued = conversation.continue_final_message
    arguments["continue_final_message"] = continued
    arguments["add_generation_prompt"] = (
        not continued if conversation.add_generation_prompt is None else conversation.add_generation_prompt
    )
    if conversation.tools:
        arguments["tools"] = list(conversation.tools)
    return arguments


@functools.lru_cache(maxsize=4)
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"[^\W\d]\w*", template))


@functools.cache
def reserved_arguments() -> frozenset[str]:
    """Returns the arguments of templates that have fields of their own, or belong to the server."""
    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | _NOT_FOR_REQUESTS


def template_messages(messages: Sequence[ChatMessage], template: str) -> list[dict[str, Any]]:
    """Returns messages as templates expect them: texts as strings, the arguments of earlier calls as objects.

    Args:
        messages (`Sequence[ChatMessage]`):
            Of the request.
        template (`str`):
            Decides which roles there are beside the usual ones.

    Raises:
        ApiError: 400, if a message has something that is not text, or a role that the template does not know.
    """
    return [_template_message(message, f"messages[{i}]", template) for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str, template: str) -> dict[str, Any]:
    result = message.model_dump(exclude_none=True, exclude={"content", "tool_calls", "role", "reasoning"})
    result["role"] = _role(message.role, where, template)
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if isinstance(message.content, list):
        parts = [_text_of(part, f"{where}.content[{i}]") for i, part in enumerate(message.content)]
        result["content"] = "\n".join(parts)
    else:
        # A missing content is an empty text: many templates join texts without looking.
        result["content"] = message.content or message.refusal or ""
    if message.tool_calls:
        result["tool_calls"] = [
            {
                **call.model_dump(exclude_none=True, exclude={"function"}),
                "function": {"name": call.function.name, "arguments": parsed_arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return result


def _role(role: str, where: str, template: str) -> str:
    if role == "developer" and "developer" not in template:
        return "system"  # OpenAI's newer name for it
    if role == "function":
        return "tool"
    if role in _ROLES or f"'{role}'" in template or f'"{role}"' in template:
        return role
    raise ApiError(
        400,
        f"`{where}.role` must be one of {', '.join(sorted(_ROLES))}, or a role that the model's chat template names; "
        f"got {role!r}.",
        param=f"{where}.role",
    )


def _text_of(part: ContentPart, where: str) -> str:
    if part.type not in _TEXT_PARTS:
        raise ApiError(
            400,
            f"`{where}.type` is {part.type[:64]!r}, and this model takes text only: send parts of the type 'text'.",
            param=f"{where}.type",
            code="unsupported_content",
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise ApiError(400, f"`{where}.{'refusal' if part.type == 'refusal' else 'text'}` is missing.", param=where)
    return text


# ------------------------------------------------------------------ rendering


def _render(
    tokenizer: Any, conversation: Conversation, template: str, arguments: Mapping[str, Any], limit: TimeLimit
) -> str:
    messages = template_messages(conversation.messages, template)
    try:
        with limit:
            return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)
    except Exception as error:  # templates refuse in many ways
        raise _refused(error) from error


async def _render_elsewhere(
    service: Service, conversation: Conversation, template: str, arguments: Mapping[str, Any]
) -> str:
    messages = template_messages(conversation.messages, template)
    given = {**service.tokenizer.special_tokens_map, **arguments, "chat_template": template}
    try:
        return await _process_of(service).render({**given, "conversations": [messages]}, TEMPLATE_SECONDS)
    except TimeoutError:
        raise _late("chat_template") from None
    except ValueError as error:
        raise _refused(error) from error


def _refused(error: Exception) -> ApiError:
    reason = str(error)[:_MAX_REFUSAL] or type(error).__name__
    return ApiError(
        400, f"The chat template refused the messages: {reason}", param="messages", code="chat_template_error"
    )


def _late(param: str) -> ApiError:
    message = f"The chat template took longer than {TEMPLATE_SECONDS:g} s for these messages."
    return ApiError(400, message, param=param, code="chat_template_timeout")


_PROCESSES: weakref.WeakKeyDictionary[Service, TemplateProcess] = weakref.WeakKeyDictionary()


def _process_of(service: Service) -> TemplateProcess:
    process = _PROCESSES.get(service)
    if process is None:
        process = _PROCESSES[service] = TemplateProcess()
        weakref.finalize(service, process.end)
    return process


# ------------------------------------------------------------------ tokenizing


def _encode(
    service: Service, param: str, add_special_tokens: bool, keep_last: int | None, any_length: bool, text: str
) -> Prompt:
    """Makes tokens of a text; runs in a worker."""
    longest = _longest_token(service.tokenizer)
    if keep_last is not None:
        text = text[-(keep_last + _MARGIN) * longest :]
    elif not any_length and len(text) > service.max_model_len * longest:
        # Tokenizing it would take seconds, for nothing.
        raise too_long(service, param, f"at least {len(text) // longest}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"`{param}` holds half of a surrogate pair, which is no text.", param=param) from None
    tokens = service.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    if not tokens:
        raise ApiError(
            400,
            f"`{param}` is empty: it has no token, and this model's tokenizer adds none.",
            param=param,
            code="empty_prompt",
        )
    return Prompt(tokens if keep_last is None else tokens[-keep_last:], text)


def warm_up(tokenizer: Any) -> None:
    """Has a tokenizer do what it does only once, before several threads use it.

    The first call takes back settings that a checkpoint may carry (to cut or pad texts); others must not run beside it.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's.
    """
    tokenizer("x", add_special_tokens=False)
    _longest_token(tokenizer)


_LONGEST: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _longest_token(tokenizer: Any) -> int:
    """Returns how many characters of a text a token stands for at most."""
    if tokenizer not in _LONGEST:
        _LONGEST[tokenizer] = max(map(len, tokenizer.get_vocab()))
    return _LONGEST[tokenizer]
