"""From settings to a `Service`: the model, its tokenizer, the engine, what watches it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from ..errors import MissingDependencyError, NotSupportedError, UnknownNameError
from ..generation.async_engine import AsyncEngine
from ..generation.sampling.params import SamplingParams
from ..kernels.selection import BACKENDS
from ..llm import LLM, load_tokenizer
from ..modeling.layer_groups import context_limit
from .access_log import RequestLog
from .command_line import UsageError
from .metrics import Metrics
from .observability import Observability
from .parser_choice import ParserChoice, choose_parsers
from .preflight import SAMPLING_DEFAULTS, check_flags, check_model, load_chat_template
from .rendering import warm_up as warm_up_tokenizer
from .service import Service
from .settings import ServerSettings
from .template_checks import check_templates, warn_of_misfits

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DTYPES = {"half": "float16", "float": "float32"}


def load_service(settings: ServerSettings) -> Service:
    """Loads the model and starts nothing yet.

    Args:
        settings (`ServerSettings`):
            What was asked for; with a `model`.

    Raises:
        UsageError: If flags ask for what cannot be, alone or of this model; if possible before it is loaded.
        HfPagedError: If the engine cannot run the model, or something asked for is not built.
        OSError: If the model cannot be read.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    name = settings.model
    assert name is not None, "whoever starts a server names a model"
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
    if settings.max_model_len is not None and not is_gguf:
        _check_context(settings, _early(AutoConfig.from_pretrained, path, **load))
    tokenizer = _early(load_tokenizer, settings.tokenizer or path, load)
    parsers = None if tokenizer is None else _prepare(tokenizer, settings)
    llm = LLM(
        path,
        tokenizer or settings.tokenizer,
        dtype=_DTYPES.get(settings.dtype, settings.dtype),
        paged_config=settings.paged_config(),
        device=settings.device,
        **load,
    )
    _check_context(settings, llm.model.config)
    parsers = parsers or _prepare(llm.tokenizer, settings)
    _set_sampling_defaults(llm.model.generation_config, settings)
    with contextlib.suppress(NotSupportedError, MissingDependencyError):  # whoever asks for a form is told
        llm.engine.grammars.warm_up(llm.tokenizer)
    warm_up(llm.model)
    return make_service(llm.model, llm.tokenizer, settings, settings.served_model_name or (name,), parsers)


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


def _prepare(tokenizer: Any, settings: ServerSettings) -> ParserChoice:
    if settings.chat_template is not None:
        tokenizer.chat_template = load_chat_template(settings.chat_template)
    check_templates(tokenizer, settings)
    parsers = choose_parsers(
        tokenizer, tool_call_parser=settings.tool_call_parser, reasoning_parser=settings.reasoning_parser
    )
    warn_of_misfits(tokenizer, parsers, settings)
    return parsers


def _check_context(settings: ServerSettings, config: Any) -> None:
    """A server's clients rely on its length; `PagedConfig` takes what fits instead."""
    if config is None or settings.max_model_len is None:
        return
    limit, why = context_limit(config.get_text_config(decoder=True))
    if limit is not None and settings.max_model_len > limit:
        raise UsageError(
            f"`--max-model-len` {settings.max_model_len} is more than the {limit} tokens of this model"
            f"{f' ({why})' if why else ''}; ask for at most that, or leave it out."
        )


def make_service(
    model: Any,
    tokenizer: Any,
    settings: ServerSettings,
    names: tuple[str, ...],
    parsers: ParserChoice | None = None,
) -> Service:
    """Puts a service around a model in memory.

    Args:
        model (`PreTrainedModel`):
            A paged model.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
        settings (`ServerSettings`):
            What was asked for.
        names (`tuple[str, ...]`):
            What clients may call the model.
        parsers (`ParserChoice`, *optional*):
            Which parsers read answers; those that `settings` name by default.
    """
    warm_up_tokenizer(tokenizer)
    engine = AsyncEngine(model, tokenizer=tokenizer)
    metrics = Metrics(engine, names[0], vllm_names=settings.vllm_metric_names)
    watch = Observability(metrics, tracing=_tracing(settings, names[0]), request_log=_log(settings))
    return Service(engine, tokenizer, settings, metrics, names, parsers=parsers, observability=watch)


def warm_up(model: Any) -> None:
    """Runs a little, so that whatever happens only once does not make the first request wait, or fail.

    Args:
        model (`PreTrainedModel`):
            A paged model.
    """
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    model.engine.generate([[1, 2, 3]] if model.config.get_text_config().vocab_size > 3 else [[0]], [params])
    model.engine.weights_changed()  # forgets the K/V
    model.engine.reset_stats()


def _set_sampling_defaults(config: Any, settings: ServerSettings) -> None:
    if settings.generation_config == "vllm":
        for name in SAMPLING_DEFAULTS:
            setattr(config, name, None)
    for name, value in (settings.override_generation_config or {}).items():
        setattr(config, name, value)


def _tracing(settings: ServerSettings, name: str) -> Any:
    if settings.otlp_traces_endpoint is None:
        return None
    from .tracing import Tracing

    return Tracing(settings.otlp_traces_endpoint, name)


def _log(settings: ServerSettings) -> RequestLog | None:
    if not settings.enable_log_requests:
        return None
    return RequestLog(prompts=settings.enable_log_prompts, max_log_len=settings.max_log_len)
