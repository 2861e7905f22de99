"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: chats underneath."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .chat import conversation_of, plan_of, start_chat
from .chat_answer import ChatAnswer
from .context import request_context, service_of
from .errors import ApiError
from .events import SseEvent, Usage
from .message_events import MessageBuilder
from .protocol.anthropic import CountTokensRequest, MessagesRequest, anthropic_error, chat_fields
from .protocol.translation import as_chat, told_as
from .rendering import render_chat
from .sampling import capped
from .service import RequestContext, Service
from .streaming import EventStream, JSONAnswer, answer_unless_gone, to_sse, wants_stream

router = APIRouter()
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", "parameters": "input_schema"}


@router.post("/v1/messages", response_model=None)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answers a conversation, as Anthropic does.

    Args:
        body (`MessagesRequest`):
            What is asked for.
        request (`Request`):
            The HTTP request.
    """
    service = service_of(request)
    context = request_context(request, body, "msg_")
    if not wants_stream(request, body.stream, service.settings.stream_on_accept):
        return await answer_unless_gone(request, _whole_answer(service, body, context))
    answer, builder = await _start(service, body, context, stream=True)
    return EventStream(
        _chunks(service, answer, builder, body.max_tokens),
        answer.abort,
        service.settings.sse_keep_alive_interval,
        lambda error: to_sse([anthropic_error(error)]),
    )


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Counts the tokens of a conversation without answering it.

    Args:
        body (`CountTokensRequest`):
            The conversation.
        request (`Request`):
            The HTTP request.
    """
    service = service_of(request)
    service.check_model(body.model)
    with told_as(_NAMES):
        chat = as_chat(body, chat_fields)
        prompt = await render_chat(service, conversation_of(chat, plan_of(service, chat)), any_length=True)
    return JSONAnswer({"input_tokens": len(prompt.token_ids)})


async def _start(
    service: Service, body: MessagesRequest, context: RequestContext, *, stream: bool
) -> tuple[ChatAnswer, MessageBuilder]:
    builder = MessageBuilder(context.request_id, service.check_model(body.model), body.shown_thinking)
    with told_as(_NAMES):
        # `max_tokens` has to be given, and many clients ask for more than a small model's context has room for: they
        # get what there is, and are told in the end, as with Anthropic's own models.
        if body.max_tokens < service.max_model_len:
            try:
                return await start_chat(service, as_chat(body, chat_fields), context, stream=stream), builder
            except ApiError as error:
                if error.code != "context_length_exceeded":
                    raise
        chat = as_chat(body, chat_fields, max_completion_tokens=None)
        return await start_chat(service, chat, context, stream=stream), builder


async def _whole_answer(service: Service, body: MessagesRequest, context: RequestContext) -> Response:
    answer, builder = await _start(service, body, context, stream=False)
    async with answer:
        async for pieces in answer:
            for piece in pieces:
                builder.add(piece)
    builder.end(answer.usage, _length_reason(service, answer, body.max_tokens))
    return JSONAnswer(builder.message)


async def _chunks(
    service: Service, answer: ChatAnswer, builder: MessageBuilder, max_tokens: int
) -> AsyncIterator[bytes]:
    begun = False
    async for pieces in answer:
        events: list[SseEvent] = []
        if not begun:  # only now it is known how much of the prompt was cached
            events += [*builder.begin(_of_prompt(answer.usage)), {"type": "ping"}]
            begun = True
        for piece in pieces:
            events += builder.add(piece)
        if events:
            yield to_sse(events)
    yield to_sse(builder.end(answer.usage, _length_reason(service, answer, max_tokens)))


def _of_prompt(usage: Usage) -> Usage:
    return Usage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)


def _length_reason(service: Service, answer: ChatAnswer, max_tokens: int) -> str:
    """Why an answer that was cut was cut."""
    limit = capped(service, max_tokens) or max_tokens
    return "max_tokens" if answer.usage.completion_tokens >= limit else "model_context_window_exceeded"
