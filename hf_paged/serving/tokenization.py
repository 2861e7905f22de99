"""`/tokenize`, `/detokenize` and `/tokenizer_info`, with vLLM's forms."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .context import service_of
from .errors import ApiError
from .protocol.tokenization import DetokenizeRequest, TokenizeRequest
from .rendering import Conversation, render_chat, tokenize_text
from .service import Prompt, Service
from .streaming import JSONAnswer

router = APIRouter()


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Returns the tokens of a text or a conversation.

    Args:
        body (`TokenizeRequest`):
            The text or the conversation.
        request (`Request`):
            The HTTP request.
    """
    service = service_of(request)
    service.check_model(body.model)
    tokens = (await _prompt(service, body)).token_ids
    texts = None
    if body.return_token_strs:  # of as many tokens as a body may have
        texts = await service.run_aside(service.tokenizer.convert_ids_to_tokens, tokens)
    return JSONAnswer(
        {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens, "token_strs": texts}
    )


async def _prompt(service: Service, body: TokenizeRequest) -> Prompt:
    if body.messages is None:
        text = body.prompt or ""
        if not text and (body.add_special_tokens is False or not service.tokenizer("")["input_ids"]):
            return Prompt([])
        return await tokenize_text(
            service, text, add_special_tokens=body.add_special_tokens is not False, any_length=True
        )
    conversation = Conversation(
        messages=body.messages,
        tools=body.tools or (),
        documents=body.documents,
        template=body.chat_template,
        template_arguments=body.chat_template_kwargs,
        continue_final_message=bool(body.continue_final_message),
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=bool(body.add_special_tokens),
    )
    return await render_chat(service, conversation, any_length=True)


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Returns the text of tokens.

    Args:
        body (`DetokenizeRequest`):
            The tokens.
        request (`Request`):
            The HTTP request.
    """
    service = service_of(request)
    service.check_model(body.model)
    size = max(len(service.tokenizer), service.engine.engine.limits.vocab_size)
    wrong = next((token for token in body.tokens if token >= size), None)
    if wrong is not None:
        raise ApiError(400, f"`tokens` has {wrong}, outside the vocabulary of {size} tokens.", param="tokens")
    return JSONAnswer({"prompt": await service.run(service.tokenizer.decode, body.tokens)})


@router.get("/tokenizer_info", response_model=None)
async def tokenizer_info(request: Request) -> Response:
    """Returns what clients need to build prompts themselves.

    Args:
        request (`Request`):
            The HTTP request.
    """
    service = service_of(request)
    tokenizer = service.tokenizer
    info: dict[str, Any] = {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "model_max_length": min(tokenizer.model_max_length, 2**63 - 1),
        "max_model_len": service.max_model_len,
        "chat_template": tokenizer.chat_template,
        "add_bos_token": bool(getattr(tokenizer, "add_bos_token", False)),
        "clean_up_tokenization_spaces": bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)),
        "additional_special_tokens": [str(token) for token in getattr(tokenizer, "extra_special_tokens", None) or ()],
    }
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = getattr(tokenizer, name)
        info[name] = None if token is None else str(token)
        info[f"{name}_id"] = getattr(tokenizer, f"{name}_id")
    return JSONAnswer(info)
