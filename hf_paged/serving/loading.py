"""From settings to a `Service`: the model, its tokenizer, the engine, what watches it."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from transformers.utils import logging as transformers_logging

from ..errors import MissingDependencyError, NotSupportedError
from ..generation.async_engine import AsyncEngine
from ..generation.sampling.params import SamplingParams
from .access_log import RequestLog
from .metrics import Metrics
from .model_loading import load_llm, set_chat_template
from .observability import Observability
from .parser_choice import ParserChoice, choose_parsers
from .rendering import warm_up as warm_up_tokenizer
from .service import Service
from .settings import ServerSettings
from .template_checks import check_templates, warn_of_misfits


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
    parsers: list[ParserChoice] = []
    llm = load_llm(settings, lambda tokenizer: parsers.append(_prepare(tokenizer, settings)))
    with contextlib.suppress(NotSupportedError, MissingDependencyError):  # whoever asks for a form is told
        llm.engine.grammars.warm_up(llm.tokenizer)
    warm_up(llm.model)
    return make_service(llm.model, llm.tokenizer, settings, _names(settings), parsers[-1])


def _names(settings: ServerSettings) -> tuple[str, ...]:
    assert settings.model is not None, "it is loaded"
    return settings.served_model_name or (settings.model,)


def _prepare(tokenizer: Any, settings: ServerSettings) -> ParserChoice:
    set_chat_template(tokenizer, settings)
    check_templates(tokenizer, settings)
    parsers = choose_parsers(
        tokenizer, tool_call_parser=settings.tool_call_parser, reasoning_parser=settings.reasoning_parser
    )
    warn_of_misfits(tokenizer, parsers, settings)
    return parsers


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


def _tracing(settings: ServerSettings, name: str) -> Any:
    if settings.otlp_traces_endpoint is None:
        return None
    from .tracing import Tracing

    return Tracing(settings.otlp_traces_endpoint, name)


def _log(settings: ServerSettings) -> RequestLog | None:
    if not settings.enable_log_requests:
        return None
    return RequestLog(prompts=settings.enable_log_prompts, max_log_len=settings.max_log_len)
