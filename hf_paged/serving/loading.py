"""From settings to a `Service`: the model, its tokenizer, the engine, what watches it."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from ..errors import ConfigurationError, MissingDependencyError, NotSupportedError
from ..generation.async_engine import AsyncEngine
from ..generation.sampling.params import SamplingParams
from ..llm import LLM
from .access_log import RequestLog
from .metrics import Metrics
from .observability import Observability
from .rendering import load_chat_template
from .rendering import warm_up as warm_up_tokenizer
from .service import Service
from .settings import ServerSettings

logger = logging.getLogger(__name__)

_DTYPES = {"half": "float16", "float": "float32"}
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def load_service(settings: ServerSettings) -> Service:
    """Loads the model and starts nothing yet.

    Args:
        settings (`ServerSettings`):
            What was asked for; with a `model`.

    Raises:
        HfPagedError: If the engine cannot run the model, or something asked for is not built.
        OSError: If there is no such model.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    name = settings.model
    assert name is not None, "whoever starts a server names a model"
    template = None if settings.chat_template is None else load_chat_template(settings.chat_template)
    where = Path(name)
    gguf: dict[str, Any] = {"gguf_file": where.name} if where.suffix == ".gguf" and where.is_file() else {}
    llm = LLM(
        str(where.parent) if gguf else name,
        settings.tokenizer,
        dtype=_DTYPES.get(settings.dtype, settings.dtype),
        tensor_parallel_size=settings.tensor_parallel_size,
        trust_remote_code=settings.trust_remote_code,
        revision=settings.revision,
        quantization=settings.quantization,
        paged_config=settings.paged_config(),
        device=settings.device,
        **gguf,
    )
    if template is not None:
        llm.tokenizer.chat_template = template
    _set_sampling_defaults(llm.model.generation_config, settings)
    with contextlib.suppress(NotSupportedError, MissingDependencyError):  # whoever asks for a form is told
        llm.engine.grammars.warm_up(llm.tokenizer)
    warm_up(llm.model)
    return make_service(llm.model, llm.tokenizer, settings, settings.served_model_name or (name,))


def make_service(model: Any, tokenizer: Any, settings: ServerSettings, names: tuple[str, ...]) -> Service:
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
    """
    warm_up_tokenizer(tokenizer)
    engine = AsyncEngine(model, tokenizer=tokenizer)
    metrics = Metrics(engine, names[0], vllm_names=settings.vllm_metric_names)
    watch = Observability(metrics, tracing=_tracing(settings, names[0]), request_log=_log(settings))
    return Service(engine, tokenizer, settings, metrics, names, observability=watch)


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
        for name in _SAMPLING_DEFAULTS:
            setattr(config, name, None)
    for name, value in (settings.override_generation_config or {}).items():
        if name not in _SAMPLING_DEFAULTS:
            raise ConfigurationError(
                f"`--override-generation-config` may set {', '.join(_SAMPLING_DEFAULTS)}, not {name!r}."
            )
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
