"""From a request's fields to `SamplingParams`: what was given is passed on, the rest is the model's own default."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

from ..errors import InvalidRequestError, NotSupportedError, QueueFullError
from ..generation.model_state import sampling_defaults
from ..generation.sampling.params import SamplingParams
from ..generation.structured.params import StructuredOutputsParams
from .errors import ApiError, to_api_error
from .parser_choice import RequestParsers
from .protocol.common import SamplingFields
from .rendering import too_long
from .service import Service

MAX_PROMPT_LOGPROBS = 1_000_000  # entries in an answer: some 60 MB of JSON
_KIND = re.compile(r"`structured_outputs\.\w+`")
# Fields that mean the same, under the same name.
_PASSED = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
)


def sampling_params(service: Service, request: SamplingFields, **further: Any) -> SamplingParams:
    """Returns how to sample, before the prompt is known.

    Args:
        service (`Service`):
            Knows the limits.
        request (`SamplingFields`):
            What was asked for.
        further (`Any`):
            Fields of `SamplingParams` that are called otherwise in the request: `max_tokens`, `logprobs`, ...

    Raises:
        ApiError: 400, naming the field, its value and the limit.
    """
    _check_limits(service, request, further.get("logprobs"), further.get("prompt_logprobs"))
    given = {name: value for name in _PASSED if (value := getattr(request, name)) is not None}
    try:
        return SamplingParams(**{**given, **further})
    except (InvalidRequestError, NotSupportedError) as error:
        told = to_api_error(error)
        told.param = next((name for name in {**given, **further} if told.message.startswith(f"`{name}")), told.param)
        raise told from error


def _check_limits(service: Service, request: SamplingFields, logprobs: int | None, prompt_logprobs: int | None) -> None:
    max_num_seqs = service.engine.engine.plan.max_num_seqs
    if request.n is not None and request.n > max_num_seqs:
        raise ApiError(
            400, f"`n` must be at most {max_num_seqs} (`--max-num-seqs` of this server), got {request.n}.", param="n"
        )
    limit = service.settings.max_logprobs
    best = "top_logprobs" if "top_logprobs" in type(request).model_fields else "logprobs"
    for name, value in ((best, logprobs), ("prompt_logprobs", prompt_logprobs)):
        if value is not None and value > limit:
            raise ApiError(400, f"`{name}` must be at most {limit} on this server, got {value}.", param=name)
    if request.truncate_prompt_tokens is not None and request.truncate_prompt_tokens > service.max_model_len:
        raise ApiError(
            400,
            f"`truncate_prompt_tokens` must be at most {service.max_model_len}, the model's context length, got "
            f"{request.truncate_prompt_tokens}.",
            param="truncate_prompt_tokens",
        )
    if request.allowed_token_ids is not None:
        count, vocab_size = len(request.allowed_token_ids), service.engine.engine.limits.vocab_size
        if count > vocab_size:
            message = f"`allowed_token_ids` has {count} entries, and the vocabulary {vocab_size}."
            raise ApiError(400, message, param="allowed_token_ids")


@dataclasses.dataclass(frozen=True)
class Form:
    """What form an answer must have, and who says so.

    Args:
        field (`str`):
            The request's field, for errors.
        params (`StructuredOutputsParams`):
            The form.
        beside_calls (`bool`, *optional*, defaults to `False`):
            Whether it is that of answers only, so that a model which may call tools can do so.
    """

    field: str
    params: StructuredOutputsParams
    beside_calls: bool = False


def form_of(request: SamplingFields) -> Form | None:
    """Returns what form the answer must have.

    Args:
        request (`SamplingFields`):
            With OpenAI's `response_format`, or vLLM's `structured_outputs` or older `guided_...` fields.

    Raises:
        ApiError: 400, if there are several, or one is malformed.
    """
    forms = _forms(request)
    if len(forms) > 1:
        names = " and ".join(f"`{name}`" for name in forms)
        raise ApiError(400, f"Only one of {names} can be given.", param=[*forms][1])
    for field, values in forms.items():
        try:
            # OpenAI's form is that of answers; the others, which are vLLM's, are that of the whole text.
            return Form(field, StructuredOutputsParams.of(values), field.startswith("response_format"))
        except InvalidRequestError as error:
            raise _malformed(field, error) from error
    return None


def _malformed(field: str, error: InvalidRequestError) -> ApiError:
    message = str(error) if field == "structured_outputs" else _KIND.sub(f"`{field}`", str(error))
    return ApiError(400, message, param=field, code="invalid_grammar")


def _forms(request: SamplingFields) -> dict[str, dict[str, Any]]:
    """The fields of the request that force a form, with what they say in vLLM's terms."""
    forms: dict[str, dict[str, Any]] = {}
    if request.structured_outputs is not None:
        forms["structured_outputs"] = request.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            forms[f"guided_{kind}"] = {kind: value, "whitespace_pattern": request.guided_whitespace_pattern}
    wanted = request.response_format
    if wanted is not None and wanted.json_schema is not None and wanted.type == "json_schema":
        forms["response_format.json_schema.schema"] = {"json": wanted.json_schema.schema_}
    elif wanted is not None and wanted.type == "json_object":
        forms["response_format"] = {"json": wanted.schema_} if wanted.schema_ is not None else {"json_object": True}
    return forms


async def prepare_grammar(
    service: Service, form: Form, parsers: RequestParsers | None = None
) -> StructuredOutputsParams:
    """Has a grammar compiled, so that its mistakes are told before the request is queued.

    Args:
        service (`Service`):
            Has the engine.
        form (`Form`):
            What the answer must look like.
        parsers (`RequestParsers`, *optional*):
            Know whether reasoning comes before it.

    Returns:
        `StructuredOutputsParams`: The form as it holds from the answer's beginning on, reasoning included.

    Raises:
        ApiError: 400, if it does not compile, or cannot follow reasoning.
        QueueFullError: If too many wait to be compiled.
    """
    try:
        constraint = form.params
        if parsers is not None:
            constraint = parsers.constrain(form.params, service.tokenizer, beside_calls=form.beside_calls)
        try:
            await _compiled(service, constraint)
        except InvalidRequestError:
            if constraint == form.params:
                raise
            # What the request says is wrong by itself, most likely, and can be told in its own terms.
            await _compiled(service, form.params)
            raise
    except QueueFullError:
        service.metrics.rejected("grammars")
        raise
    except InvalidRequestError as error:
        raise _malformed(form.field, error) from error
    return constraint


async def _compiled(service: Service, params: StructuredOutputsParams) -> None:
    compiling = service.engine.engine.grammars.submit(params, service.tokenizer)
    await asyncio.shield(asyncio.wrap_future(compiling))  # others may wait for the same grammar


def capped(service: Service, max_tokens: int | None) -> int | None:
    """Returns how many tokens an answer may have: as the request says, but not more than the model's configuration.

    Args:
        service (`Service`):
            Has the model, whose generation configuration may set `max_new_tokens`: a cap for all requests, as in vLLM.
        max_tokens (`int`, *optional*):
            What the request says.
    """
    limits = (max_tokens, sampling_defaults(service.engine.model)["max_tokens"])
    return min([limit for limit in limits if limit is not None], default=None)


def kept_prompt_tokens(service: Service, request: SamplingFields, max_tokens: int | None) -> int | None:
    """Returns to how many of its last tokens a prompt is to be cut, or `None` to leave it as it is.

    Args:
        service (`Service`):
            Knows the limit.
        request (`SamplingFields`):
            What was asked for; -1 is as many as leave room for the answer.
        max_tokens (`int`, *optional*):
            Of the answer.
    """
    kept = request.truncate_prompt_tokens
    if kept is None or kept > 0:
        return kept
    return max(1, service.max_model_len - max(1, max_tokens or 1))


def check_prompt_logprobs(params: SamplingParams, num_tokens: int, num_copies: int = 1) -> None:
    """Refuses a small request whose answer would be huge: every token of a prompt with its log-probabilities.

    Args:
        params (`SamplingParams`):
            How to sample.
        num_tokens (`int`):
            Of all prompts of the request.
        num_copies (`int`, defaults to 1):
            How often the answer has each prompt.

    Raises:
        ApiError: 400, with the limit and the way out.
    """
    if params.prompt_logprobs is None:
        return
    count = num_copies * num_tokens * (params.prompt_logprobs + 1)
    if count > MAX_PROMPT_LOGPROBS:
        copies = f" x {num_copies} answers (`n`)" if num_copies > 1 else ""
        raise ApiError(
            400,
            f"`prompt_logprobs` (or `echo` with `logprobs`) would give {count} log-probabilities of the prompt: "
            f"{num_tokens} tokens x {params.prompt_logprobs + 1}{copies}; at most {MAX_PROMPT_LOGPROBS} are given in "
            "an answer. Ask for fewer of each token, for fewer answers, or about fewer prompts at a time.",
            param="prompt_logprobs",
        )


def check_room(
    service: Service, params: SamplingParams, num_tokens: int, param: str, *, max_tokens: int | None
) -> None:
    """Refuses a prompt that does not fit together with the answer that was asked for.

    Args:
        service (`Service`):
            Knows the limit.
        params (`SamplingParams`):
            How to sample.
        num_tokens (`int`):
            Of the prompt.
        param (`str`):
            The field that the prompt came in.
        max_tokens (`int`, *optional*):
            What was asked for.

    Raises:
        ApiError: 400, with limit, prompt and answer in numbers.
    """
    room = service.max_model_len - num_tokens
    if room < max(1, max_tokens or 0):
        raise too_long(service, param, num_tokens, max_tokens)
    if params.min_tokens > room:
        raise ApiError(
            400,
            f"`min_tokens` is {params.min_tokens}, and the prompt of {num_tokens} tokens leaves room for {room} "
            f"(the model's context length is {service.max_model_len}).",
            param="min_tokens",
        )
