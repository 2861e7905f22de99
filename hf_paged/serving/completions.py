"""`/v1/completions`: continues texts and token ids, one or many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..errors import InvalidTokenError
from ..generation.answer_stream import AnswerDelta, AnswerStream
from ..generation.outputs import Logprob
from ..generation.sampling.params import SamplingParams
from .context import request_context, service_of
from .errors import ApiError
from .events import Usage
from .logprobs import CompletionLogprobs, prompt_logprobs, token_texts
from .protocol.openai import CompletionRequest
from .rendering import tokenize_text
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
from .service import Prompt, RequestContext, Service
from .streaming import ChunkWriter, EventStream, JSONAnswer, answer_unless_gone, usage_json, wants_stream

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
MAX_ANSWERS_OF_ALL_PROMPTS = 4096  # prompts times `n`


@router.post("/v1/completions", response_model=None)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continues prompts.

    Args:
        body (`CompletionRequest`):
            What is asked for.
        request (`Request`):
            The HTTP request.
    """
    service = service_of(request)
    context = request_context(request, body, "cmpl-")
    if not wants_stream(request, body.stream, service.settings.stream_on_accept):
        return await answer_unless_gone(request, _whole_answer(service, body, context))
    completion = await start_completion(service, body, context)
    return EventStream(completion.chunks(), completion.abort, service.settings.sse_keep_alive_interval)


async def _whole_answer(service: Service, body: CompletionRequest, context: RequestContext) -> Response:
    completion = await start_completion(service, body, context, stream=False)
    return JSONAnswer(await completion.whole())


async def start_completion(
    service: Service, body: CompletionRequest, context: RequestContext, *, stream: bool = True
) -> Completion:
    """Tokenizes prompts and hands them to the engine: all of them, or none.

    Args:
        service (`Service`):
            Runs them.
        body (`CompletionRequest`):
            What was asked for.
        context (`RequestContext`):
            Who asks.
        stream (`bool`, defaults to `True`):
            Whether the answers are read as they come, or at the end only.

    Raises:
        ApiError: If something is wrong with the request, or the server has no room for it now.
    """
    model = service.check_model(body.model)
    service.check_admission()
    max_tokens = capped(service, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens) or 0
    form = form_of(body)
    params = _params(service, body, max_tokens, form)
    texts = body.prompts
    _check_count(service, len(texts), params.n)
    async with context.before_deadline():
        prompts = await _prompts(service, body, params, texts, max_tokens)
        if form is not None:
            await prepare_grammar(service, form)
    streams: list[AnswerStream] = []
    try:
        for prompt in prompts:
            streams.append(service.submit(prompt, params, context, stream=stream))
            await asyncio.sleep(0)  # so that a thousand prompts hold up nobody else
        return Completion(service, body, context, model, list(zip(prompts, streams, strict=True)), params)
    except BaseException:
        for started in streams:
            started.abort()
        raise


def _check_count(service: Service, count: int, n: int) -> None:
    if not count:
        raise ApiError(400, "`prompt` is empty; give a text, token ids, or a list of them.", param="prompt")
    if count * n > MAX_ANSWERS_OF_ALL_PROMPTS:
        message = (
            f"`prompt` has {count} prompts, which with `n` = {n} is more than {MAX_ANSWERS_OF_ALL_PROMPTS} answers."
        )
        raise ApiError(400, message, param="prompt")
    seats, limit = service.engine.engine.plan.max_num_seqs, service.settings.max_num_queued_reqs
    if limit is not None and count > seats + limit:  # which would be 503 however often it is tried
        raise ApiError(
            400,
            f"`prompt` has {count} prompts, and on this server {seats} requests may run (`--max-num-seqs`) and {limit} "
            "wait (`--max-num-queued-reqs`); send fewer at a time.",
            param="prompt",
        )


def _params(service: Service, body: CompletionRequest, max_tokens: int, form: Form | None) -> SamplingParams:
    further: dict[str, Any] = {
        # An answer of no tokens is one token that is left out.
        "max_tokens": max(1, max_tokens),
        "logprobs": body.logprobs,
        "prompt_logprobs": body.prompt_logprobs,
    }
    if body.echo and body.logprobs is not None:
        further["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if form is not None:
        further["structured_outputs"] = form.params
    return sampling_params(service, body, **further)


async def _prompts(
    service: Service, body: CompletionRequest, params: SamplingParams, texts: list[str | list[int]], max_tokens: int
) -> list[Prompt]:
    prompts: list[Prompt] = []
    for text in texts:
        prompts.append(await _prompt(service, body, text, max_tokens))
        check_room(service, params, len(prompts[-1].token_ids), "prompt", max_tokens=max_tokens)
    check_prompt_logprobs(params, sum(len(prompt.token_ids) for prompt in prompts), params.n)
    if body.echo or any(prompt.text is None for prompt in prompts):
        return await service.run(_look_at_tokens, service, body, prompts, params)
    return prompts


async def _prompt(service: Service, body: CompletionRequest, prompt: str | list[int], max_tokens: int) -> Prompt:
    kept = kept_prompt_tokens(service, body, max_tokens)
    if isinstance(prompt, str):
        return await tokenize_text(
            service, prompt, add_special_tokens=body.add_special_tokens is not False, keep_last=kept
        )
    if not prompt:
        raise ApiError(400, "`prompt` holds an empty list of token ids.", param="prompt", code="empty_prompt")
    return Prompt(prompt if kept is None else prompt[-kept:])


def _look_at_tokens(
    service: Service, body: CompletionRequest, prompts: list[Prompt], params: SamplingParams
) -> list[Prompt]:
    """Checks the token ids that clients sent, before the first prompt is started, and reads what is to be echoed."""
    given = [prompt.token_ids for prompt in prompts if prompt.text is None]
    try:
        service.engine.engine.check_all(given, [params] * len(given))
    except InvalidTokenError as error:
        message = str(error).replace("`prompt_token_ids[", "`prompt[")
        raise ApiError(400, message, param="prompt", code="invalid_token") from error
    if not body.echo:
        return prompts
    skip, is_cut = body.skip_special_tokens is not False, body.truncate_prompt_tokens is not None
    return [
        # Of a prompt that was cut, what the model has seen of it.
        dataclasses.replace(prompt, text=service.tokenizer.decode(prompt.token_ids, skip_special_tokens=skip))
        if prompt.text is None or is_cut
        else prompt
        for prompt in prompts
    ]


class Completion:
    """The answers to some prompts, in OpenAI's form.

    Args:
        service (`Service`):
            Has the tokenizer and the settings.
        body (`CompletionRequest`):
            What was asked for.
        context (`RequestContext`):
            Has the id.
        model (`str`):
            The name under which the model answers.
        started (`Sequence[tuple[Prompt, AnswerStream]]`):
            The prompts and their streams.
        params (`SamplingParams`):
            How they are sampled.
    """

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        context: RequestContext,
        model: str,
        started: Sequence[tuple[Prompt, AnswerStream]],
        params: SamplingParams,
    ):
        self._service = service
        self._body = body
        self._started = started
        self._num_answers = params.n
        self._num_generated = 0
        self._head = {
            "id": context.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._choices = [
            _Choice(service, body, prompt, stream, place * params.n + branch)
            for place, (prompt, stream) in enumerate(started)
            for branch in range(params.n)
        ]

    def abort(self) -> None:
        """Ends the requests that have not ended."""
        for _, stream in self._started:
            stream.abort()

    @property
    def usage(self) -> Usage:
        """Returns the tokens so far."""
        return Usage(
            prompt_tokens=sum(len(stream.prompt_token_ids) for _, stream in self._started),
            completion_tokens=self._num_generated,
            cached_tokens=sum(stream.num_cached_tokens for _, stream in self._started),
        )

    async def _piece(self, place: int, delta: AnswerDelta) -> dict[str, Any] | None:
        """The choice of one prompt's delta, or `None` if it says nothing new."""
        if self._body.max_tokens == 0:
            delta = AnswerDelta(delta.index, "", [], [], delta.finish_reason and "length")
        self._num_generated += len(delta.token_ids)
        choice = self._choices[place * self._num_answers + delta.index]
        if choice.tells_prompt:  # thousands of tokens, and twenty log-probabilities for each
            return await self._service.run(choice.piece, delta)
        return choice.piece(delta)

    async def whole(self) -> dict[str, Any]:
        """Waits for all answers.

        Returns:
            `dict[str, Any]`: The body of the answer.

        Raises:
            EngineError: If a request failed or was aborted.
        """
        choices: dict[int, dict[str, Any]] = {}
        async with contextlib.AsyncExitStack() as stack:
            for _, stream in self._started:
                await stack.enter_async_context(stream)
            # As they come, so that the first failure ends all of them.
            arrivals = await stack.enter_async_context(contextlib.aclosing(_merged([s for _, s in self._started])))
            async for place, deltas in arrivals:
                for delta in deltas:
                    piece = await self._piece(place, delta)
                    if piece is not None:
                        _join(choices, piece)
        return {**self._head, "choices": [choices[i] for i in sorted(choices)], "usage": usage_json(self.usage)}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the answers as a stream of chunks; all that come at a time together."""
        writer = ChunkWriter(
            self._head,
            lambda: usage_json(self.usage),
            include_usage=self._body.wants_usage or self._service.settings.enable_force_include_usage,
            continuous_usage=self._body.wants_usage_always,
        )
        async with contextlib.aclosing(_merged([stream for _, stream in self._started])) as arrivals:
            async for place, deltas in arrivals:
                pieces = [await self._piece(place, delta) for delta in deltas]
                if data := b"".join([writer.chunk(piece) for piece in pieces if piece is not None]):
                    yield data
        yield writer.end()


class _Choice:
    """Writes one answer, piece by piece."""

    def __init__(self, service: Service, body: CompletionRequest, prompt: Prompt, stream: AnswerStream, index: int):
        self._body = body
        self._stream = stream
        self._index = index
        self._tokenizer = service.tokenizer
        self._begun = False
        skip = body.skip_special_tokens is not False
        given = body.return_tokens_as_token_ids
        as_ids = service.settings.return_tokens_as_token_ids if given is None else given
        self._logprobs = None
        if body.logprobs is not None:
            self._logprobs = CompletionLogprobs(token_texts(service.tokenizer), body.logprobs, as_ids, skip)
        self._echoed = (prompt.text or "") if body.echo else ""

    @property
    def tells_prompt(self) -> bool:
        """Whether the next piece has log-probabilities of the prompt."""
        body = self._body
        echoes = body.echo and body.logprobs is not None
        return not self._begun and bool(echoes or body.prompt_logprobs is not None)

    def piece(self, delta: AnswerDelta) -> dict[str, Any] | None:
        body, stream = self._body, self._stream
        token_ids, entries = delta.token_ids, list[dict[int, Logprob] | None](delta.logprobs or ())
        text, further = delta.text, {}
        if not self._begun:
            text = self._echoed + text
            if body.echo and self._logprobs is not None:
                token_ids = [*stream.prompt_token_ids, *token_ids]
                entries = [*(stream.prompt_logprobs or ()), *entries]
            if body.prompt_logprobs is not None:
                entries_of_prompt = stream.prompt_logprobs or ()
                further["prompt_logprobs"] = prompt_logprobs(token_texts(self._tokenizer), entries_of_prompt)
            if body.return_token_ids:
                further["prompt_token_ids"] = list(stream.prompt_token_ids)
        if body.return_token_ids:
            further["token_ids"] = delta.token_ids
        if not (text or further or delta.finish_reason or self._logprobs):
            return None
        self._begun = True
        return {
            "index": self._index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.of(token_ids, entries, self._echoed),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **further,
        }


def _join(choices: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    """Adds a piece to the choice that it continues."""
    whole = choices.setdefault(piece["index"], piece)
    if whole is piece:
        return
    whole["text"] += piece["text"]
    whole["finish_reason"], whole["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
    for name, values in (piece["logprobs"] or {}).items():
        whole["logprobs"][name] += values
    if "token_ids" in piece:
        whole["token_ids"] = [*whole["token_ids"], *piece["token_ids"]]


async def _merged(streams: Sequence[AnswerStream]) -> AsyncGenerator[tuple[int, list[AnswerDelta]], None]:
    """Yields what comes from several streams, with the place of each; no more is taken than is read."""
    if len(streams) == 1:
        async for deltas in streams[0]:
            yield 0, deltas
        return
    ready: asyncio.Queue[tuple[int, list[AnswerDelta]] | BaseException | None] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_pump(place, stream, ready)) for place, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            item = await ready.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(place: int, stream: AnswerStream, ready: asyncio.Queue[Any]) -> None:
    try:
        async for deltas in stream:
            await ready.put((place, deltas))
        await ready.put(None)
    except Exception as error:  # its reader raises it
        await ready.put(error)
