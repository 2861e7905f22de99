"""From settings to an `LLM`: the one place where the server and the commands of this machine load a model.

Nothing here needs the packages of a server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoConfig

from ..errors import ConfigurationError, UnknownNameError
from ..kernels.selection import BACKENDS
from ..llm import LLM, load_tokenizer
from ..modeling.layer_groups import context_limit
from ..quantization.loading import named_scheme
from .command_line import UsageError
from .preflight import SAMPLING_DEFAULTS, check_flags, check_model, load_chat_template
from .settings import ServerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DTYPES = {"half": "float16", "float": "float32"}


def load_llm(settings: ServerSettings, prepare: Callable[[Any], None] | None = None) -> LLM:
    """Loads a model and its tokenizer, with an engine that has not begun.

    Args:
        settings (`ServerSettings`):
            What was asked for; with a `model`.
        prepare (`Callable[[Any], None]`, *optional*):
            Gets the tokenizer, if possible before the model is loaded, to refuse what does not go with it; by default
            it is given the chat template that `settings` name.

    Raises:
        UsageError: If flags ask for what cannot be, alone or of this model; if possible before it is loaded.
        HfPagedError: If the engine cannot run the model, or something asked for is not built.
        OSError: If the model cannot be read.
    """
    name = settings.model
    assert name is not None, "whoever loads a model names it"
    check_flags(settings)
    _check_backend(settings.attn_backend)
    check_model(name, settings.revision)
    where = Path(name)
    is_gguf = where.suffix == ".gguf" and where.is_file()
    path = str(where.parent) if is_gguf else name
    load: dict[str, Any] = {
        "trust_remote_code": settings.trust_remote_code,
        "revision": settings.revision,
        **({"gguf_file": where.name} if is_gguf else {}),
    }
    if settings.quantization is not None:
        _check_quantization(path, settings.quantization, load)
    if settings.max_model_len is not None and not is_gguf:
        _check_context(settings, _early(AutoConfig.from_pretrained, path, **load))
    prepare = prepare or (lambda tokenizer: set_chat_template(tokenizer, settings))
    tokenizer = _early(load_tokenizer, settings.tokenizer or path, load)
    if tokenizer is not None:
        prepare(tokenizer)
    llm = LLM(
        path,
        tokenizer or settings.tokenizer,
        dtype=_DTYPES.get(settings.dtype, settings.dtype),
        paged_config=settings.paged_config(),
        device=settings.device,
        quantization=settings.quantization,
        **load,
    )
    _check_context(settings, llm.model.config)
    if tokenizer is None:
        prepare(llm.tokenizer)
    _set_sampling_defaults(llm.model.generation_config, settings)
    return llm


def set_chat_template(tokenizer: Any, settings: ServerSettings) -> None:
    """Gives a tokenizer the template that `--chat-template` names, if it names one.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        settings (`ServerSettings`):
            What was asked for.
    """
    if settings.chat_template is not None:
        tokenizer.chat_template = load_chat_template(settings.chat_template)


def _check_backend(name: str | None) -> None:
    try:
        if name is not None:
            BACKENDS.get(name)
    except UnknownNameError as error:
        raise UsageError(str(error)) from None


def _early(read: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
    """Reads something of a model before the model; where that fails, loading the model says best what is wrong."""
    try:
        return read(*args, **kwargs)
    except Exception:
        logger.debug("%s is left for later", read.__qualname__, exc_info=True)
        return None


def _check_quantization(path: str, quantization: str, load: dict[str, Any]) -> None:
    try:
        named_scheme(path, quantization, load)
    except ConfigurationError as error:
        raise UsageError(str(error)) from None
    except OSError:
        pass  # loading the model says best what is wrong


def _check_context(settings: ServerSettings, config: Any) -> None:
    """Whoever names a length relies on it; `PagedConfig` takes what fits instead."""
    if config is None or settings.max_model_len is None:
        return
    limit, why = context_limit(config.get_text_config(decoder=True))
    if limit is not None and settings.max_model_len > limit:
        raise UsageError(
            f"`--max-model-len` {settings.max_model_len} is more than the {limit} tokens of this model"
            f"{f' ({why})' if why else ''}; ask for at most that, or leave it out."
        )


def _set_sampling_defaults(config: Any, settings: ServerSettings) -> None:
    if settings.generation_config == "vllm":
        for name in SAMPLING_DEFAULTS:
            setattr(config, name, None)
    for name, value in (settings.override_generation_config or {}).items():
        setattr(config, name, value)
