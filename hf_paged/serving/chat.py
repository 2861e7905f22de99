"""`/v1/chat/completions`, and `start_chat` for the other APIs, which are chats underneath."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .chat_answer import AnswerReader, ChatAnswer, Choice, ReasoningCounter
from .context import request_context, service_of
from .events import ChatEvent, ChoiceEnd, ContentDelta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from .logprobs import chat_logprobs, prompt_logprobs, token_texts
from .parser_choice import RequestParsers
from .protocol.openai import ChatCompletionRequest
from .rendering import Conversation, render_chat
from .sampling import (
    Form,
    capped,
    check_prompt_logprobs,
    check_room,
    form_of,
    kept_prompt_tokens,
    prepare_grammar,
    sampling_params,
)
from .service import RequestContext, Service
from .streaming import ChunkWriter, EventStream, JSONAnswer, answer_unless_gone, usage_json, wants_stream
from .tool_choice import ToolPlan, plan_tools

router = APIRouter()

_TAIL = 300  # characters of a prompt in which it shows whether its answer begins with reasoning


# ------------------------------------------------------------------ for every API


async def start_chat(
    service: Service, body: ChatCompletionRequest, context: RequestContext, *, stream: bool = True
) -> ChatAnswer:
    """Renders a conversation and hands it to the engine.

    Args:
        service (`Service`):
            Runs it.
        body (`ChatCompletionRequest`):
            What was asked for.
        context (`RequestContext`):
            Who asks.
        stream (`bool`, defaults to `True`):
            Whether the answer is read as it comes, or by `collect` only.

    Returns:
        `ChatAnswer`: To be read to its end, or left through `async with` or `abort`.

    Raises:
        ApiError: If something is wrong with the request, or the server has no room for it now.
    """
    service.check_model(body.model)
    service.check_admission()
    plan = plan_of(service, body)
    # The rest of the context, unless the request or the model's generation configuration says less.
    max_tokens = capped(service, body.answer_limit)
    wanted = None if body.answer_limit is None else max_tokens
    params = sampling_params(
        service,
        body,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    form = form_of(body)
    async with context.before_deadline():
        kept = kept_prompt_tokens(service, body, wanted)
        prompt = await render_chat(service, conversation_of(body, plan), keep_last=kept)
        check_room(service, params, len(prompt.token_ids), "messages", max_tokens=wanted)
        check_prompt_logprobs(params, len(prompt.token_ids))
        parsers = service.parsers.for_request(
            plan,
            (prompt.text or "")[-_TAIL:],
            continued=_continued(body),
            skip_special_tokens=body.skip_special_tokens is not False,
        )
        if not parsers.skip_special_tokens:
            params = params.replace(skip_special_tokens=False)
        if plan.structured_outputs is not None:
            if form is not None:  # it has no effect on calls, but what is wrong with it is told
                await prepare_grammar(service, form)
            form = Form("tools", plan.structured_outputs)
        if form is not None:
            params = params.replace(structured_outputs=await prepare_grammar(service, form, parsers))
    readers = [_reader(service, body, parsers) for _ in range(params.n)]
    answers = service.submit(prompt, params, context, stream=stream)
    return ChatAnswer(answers, readers, wants_tokens=bool(body.logprobs or body.return_token_ids))


def plan_of(service: Service, body: ChatCompletionRequest) -> ToolPlan:
    """Returns how the tools of a request are handled.

    Args:
        service (`Service`):
            Knows how its model writes calls.
        body (`ChatCompletionRequest`):
            What was asked for.

    Raises:
        ApiError: 400, if something is wrong with them.
    """
    return plan_tools(
        body.tools,
        body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        parser=service.parsers.tool if service.settings.enable_auto_tool_choice else None,
    )


def _continued(body: ChatCompletionRequest) -> str:
    """What the answer begins with, where it goes on with the conversation's last message."""
    return _last_text(body) if body.continue_final_message else ""


def _last_text(body: ChatCompletionRequest) -> str:
    content = body.messages[-1].content
    if isinstance(content, list):
        return "\n".join([part.text or "" for part in content])
    return content or ""


def conversation_of(body: ChatCompletionRequest, plan: ToolPlan) -> Conversation:
    """Returns what of a request is for the chat template.

    Args:
        body (`ChatCompletionRequest`):
            What was asked for.
        plan (`ToolPlan`):
            Says which of its tools the model may not see.
    """
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            arguments.setdefault("enable_thinking", False)
    return Conversation(
        messages=body.messages,
        tools=[tool for tool in body.tools or () if tool["function"]["name"] not in plan.forbidden],
        documents=body.documents,
        template=body.chat_template,
        template_arguments=arguments,
        continue_final_message=bool(body.continue_final_message),
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=bool(body.add_special_tokens),
    )


def _reader(service: Service, body: ChatCompletionRequest, parsers: RequestParsers) -> AnswerReader:
    if parsers.reasoning is None and parsers.plan.choice == "none":
        return AnswerReader()
    reasoning = parsers.reasoning
    return AnswerReader(
        parsers.new(),
        new_call_id=parsers.new_call_id,
        reasoning=None if reasoning is None else ReasoningCounter(service.tokenizer, reasoning.close),
        show_reasoning=body.include_reasoning is not False,
    )


# ------------------------------------------------------------------ OpenAI's form


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a conversation.

    Args:
        body (`ChatCompletionRequest`):
            What is asked for.
        request (`Request`):
            The HTTP request.
    """
    service = service_of(request)
    context = request_context(request, body, "chatcmpl-")
    if not wants_stream(request, body.stream, service.settings.stream_on_accept):
        return await answer_unless_gone(request, _whole_answer(service, body, context))
    answer = await start_chat(service, body, context)
    return EventStream(
        ChatChunks(service, body, context, answer).chunks(), answer.abort, service.settings.sse_keep_alive_interval
    )


async def _whole_answer(service: Service, body: ChatCompletionRequest, context: RequestContext) -> Response:
    answer = await start_chat(service, body, context, stream=False)
    choices = await answer.collect()
    parts = _Parts(service, body)
    result = {
        **_head(service, body, context, "chat.completion"),
        "choices": [parts.whole_choice(choice) for choice in choices],
        "usage": usage_json(answer.usage, reasoning=answer.has_reasoning),
        **await parts.of_prompt(answer),
    }
    return JSONAnswer(result)


def _head(service: Service, body: ChatCompletionRequest, context: RequestContext, kind: str) -> dict[str, Any]:
    return {
        "id": context.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": service.check_model(body.model),
    }


class _Parts:
    """Writes the parts that whole answers and chunks are made of."""

    def __init__(self, service: Service, body: ChatCompletionRequest):
        self.role = service.settings.response_role
        self.echoed = _echoed(body, self.role)
        self._service = service
        self._tokenizer = service.tokenizer
        self._num_top = body.top_logprobs or 0
        self._as_ids = _names_ids(service, body)
        self._wants_logprobs = bool(body.logprobs)
        self._wants_ids = bool(body.return_token_ids)

    async def of_prompt(self, answer: ChatAnswer) -> dict[str, Any]:
        """What was asked for of the prompt."""
        result: dict[str, Any] = {}
        entries = answer.stream.prompt_logprobs
        if entries is not None:  # thousands of tokens, and twenty for each
            result["prompt_logprobs"] = await self._service.run(prompt_logprobs, token_texts(self._tokenizer), entries)
        if self._wants_ids:
            result["prompt_token_ids"] = list(answer.prompt_token_ids)
        return result

    def of_tokens(self, piece: Choice | TextDelta) -> dict[str, Any]:
        """What was asked for of an answer's tokens."""
        logprobs = None
        if self._wants_logprobs and piece.token_ids:
            texts = token_texts(self._tokenizer)
            logprobs = chat_logprobs(texts, piece.token_ids, piece.logprobs or (), self._num_top, self._as_ids)
        elif self._wants_logprobs and isinstance(piece, Choice):
            logprobs = {"content": [], "refusal": None}
        return {"logprobs": logprobs, **({"token_ids": piece.token_ids} if self._wants_ids else {})}

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        content = self.echoed + choice.content
        message: dict[str, Any] = {"role": self.role, "content": content, "refusal": None}
        if choice.tool_calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.tool_calls
            ]
        if choice.reasoning:
            message["reasoning"] = message["reasoning_content"] = choice.reasoning
        return {
            "index": choice.index,
            "message": message,
            **self.of_tokens(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


def _names_ids(service: Service, body: ChatCompletionRequest) -> bool:
    given = body.return_tokens_as_token_ids
    return service.settings.return_tokens_as_token_ids if given is None else given


def _echoed(body: ChatCompletionRequest, role: str) -> str:
    """The last message, if it is of the answer's role and is to be repeated before it."""
    return _last_text(body) if body.echo and body.messages[-1].role == role else ""


class ChatChunks:
    """Writes a chat as a stream of chunks.

    Args:
        service (`Service`):
            Has the tokenizer and the settings.
        body (`ChatCompletionRequest`):
            What was asked for.
        context (`RequestContext`):
            Has the id.
        answer (`ChatAnswer`):
            The answer.
    """

    def __init__(self, service: Service, body: ChatCompletionRequest, context: RequestContext, answer: ChatAnswer):
        self._answer = answer
        self._parts = _Parts(service, body)
        self._num_choices = body.n or 1
        self._begun = False
        self._writer = ChunkWriter(
            _head(service, body, context, "chat.completion.chunk"),
            lambda: usage_json(answer.usage, reasoning=answer.has_reasoning),
            include_usage=body.wants_usage or service.settings.enable_force_include_usage,
            continuous_usage=body.wants_usage_always,
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the stream; all chunks that come at a time together."""
        async for events in self._answer:
            yield await self._begin() + b"".join([self._chunk(event) for event in events])
        yield await self._begin() + self._writer.end()

    async def _begin(self) -> bytes:
        """The role of each answer. It comes with the first text, so that clients who measure that see its time."""
        if self._begun:
            return b""
        self._begun = True
        delta = {"role": self._parts.role, "content": self._parts.echoed}
        first = {"delta": delta, "logprobs": None, "finish_reason": None}
        roles = [{"index": index, **first} for index in range(self._num_choices)]
        of_prompt = await self._parts.of_prompt(self._answer)
        return self._writer.chunk(roles[0], **of_prompt) + b"".join([self._writer.chunk(role) for role in roles[1:]])

    def _chunk(self, event: ChatEvent) -> bytes:
        delta: dict[str, Any] = {}
        further: dict[str, Any] = {"logprobs": None}
        finish_reason = None
        if isinstance(event, ContentDelta):
            delta, further = {"content": event.text}, self._parts.of_tokens(event)
        elif isinstance(event, ReasoningDelta):
            delta = {"reasoning": event.text, "reasoning_content": event.text}
            further = self._parts.of_tokens(event)
        elif isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            delta = {"tool_calls": [{"index": event.call, "id": event.id, "type": "function", "function": function}]}
        elif isinstance(event, ToolCallArguments):
            delta = {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}
        else:
            assert isinstance(event, ChoiceEnd), "all other events are texts and calls"
            finish_reason = event.finish_reason
            further["stop_reason"] = event.stop_reason
        return self._writer.chunk({"index": event.index, "delta": delta, **further, "finish_reason": finish_reason})
