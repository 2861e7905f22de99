"""`/v1/responses`: OpenAI's newer API for text, a chat underneath. Nothing is kept: a request has all that was said."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .chat import start_chat
from .chat_answer import ChatAnswer
from .context import request_context, service_of
from .events import ContentDelta
from .logprobs import chat_logprobs, token_texts
from .protocol.response_object import new_response
from .protocol.responses import ResponsesRequest, chat_fields
from .protocol.translation import as_chat, told_as
from .response_events import ResponseBuilder
from .service import RequestContext, Service
from .streaming import EventStream, JSONAnswer, answer_unless_gone, to_sse, wants_stream

router = APIRouter()
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


@router.post("/v1/responses", response_model=None)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answers a conversation, in OpenAI's newer form.

    Args:
        body (`ResponsesRequest`):
            What is asked for.
        request (`Request`):
            The HTTP request.
    """
    service = service_of(request)
    context = request_context(request, body, "resp_")
    if not wants_stream(request, body.stream, service.settings.stream_on_accept):
        return await answer_unless_gone(request, _whole_answer(service, body, context))
    answer, builder = await _start(service, body, context, stream=True)
    return EventStream(
        _chunks(answer, builder),
        answer.abort,
        service.settings.sse_keep_alive_interval,
        lambda error: to_sse(builder.fail(error)),
    )


async def _start(
    service: Service, body: ResponsesRequest, context: RequestContext, *, stream: bool
) -> tuple[ChatAnswer, ResponseBuilder]:
    response = new_response(body, context.request_id, service.check_model(body.model), int(time.time()))
    builder = ResponseBuilder(response, _logprobs_of(service, body))
    with told_as(_NAMES):
        return await start_chat(service, as_chat(body, chat_fields), context, stream=stream), builder


async def _whole_answer(service: Service, body: ResponsesRequest, context: RequestContext) -> Response:
    answer, builder = await _start(service, body, context, stream=False)
    async with answer:
        async for pieces in answer:
            for piece in pieces:
                builder.add(piece)
    builder.end(answer.usage)
    return JSONAnswer(builder.response)


async def _chunks(answer: ChatAnswer, builder: ResponseBuilder) -> AsyncIterator[bytes]:
    yield to_sse(builder.begin())
    async for pieces in answer:
        events = [event for piece in pieces for event in builder.add(piece)]
        if events:
            yield to_sse(events)
    yield to_sse(builder.end(answer.usage))


def _logprobs_of(service: Service, body: ResponsesRequest) -> Callable[[ContentDelta], list[dict[str, Any]]]:
    if not body.wants_logprobs:
        return lambda delta: []
    texts, num_top = token_texts(service.tokenizer), body.top_logprobs or 0
    as_ids = service.settings.return_tokens_as_token_ids
    return lambda delta: chat_logprobs(texts, delta.token_ids, delta.logprobs or [], num_top, as_ids)["content"]
