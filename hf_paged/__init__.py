"""hf_paged: a paged K/V cache and continuous batching for Hugging Face Transformers models.

Names are imported when they are first used, so that `import hf_paged` is instant and loads neither torch nor
Transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "AsyncEngine": ".generation.async_engine",
    "AutoPagedModelForCausalLM": ".auto",
    "CompletionOutput": ".generation.outputs",
    "Engine": ".generation.engine",
    "EnginePlan": ".generation.plan",
    "GenerationOutput": ".generation.outputs",
    "GenerationStatus": ".generation.outputs",
    "HiddenStatesWanted": ".generation.request",
    "LLM": ".llm",
    "Logprob": ".generation.outputs",
    "PagedCache": ".cache.paged_cache",
    "PagedConfig": ".configuration",
    "PagedGenerationMixin": ".generation.mixin",
    "RequestExtras": ".generation.request",
    "RequestOutput": ".generation.outputs",
    "SamplingParams": ".generation.sampling.params",
    "StructuredOutputsParams": ".generation.structured.params",
    "errors": ".errors",
    "pipeline": ".pipelines",
}
_ERRORS = (
    "AttentionBypassedError",
    "CacheFileError",
    "CheckpointError",
    "ConfigurationError",
    "DeadlineExceededError",
    "EngineClosedError",
    "EngineDiedError",
    "EngineError",
    "HfPagedError",
    "InvalidEmbedsError",
    "InvalidRequestError",
    "InvalidTokenError",
    "MissingDependencyError",
    "NonFiniteLogitsError",
    "NotEnoughMemoryError",
    "NotSupportedError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestAbortedError",
    "RowFailedError",
    "StepFailedError",
    "StepMemoryError",
    "UnknownNameError",
    "UnsupportedAttentionError",
    "UnsupportedModelError",
)
_EXPORTS.update(dict.fromkeys(_ERRORS, ".errors"))

__version__ = "0.1.0"
__all__ = sorted([*_EXPORTS, "__version__"])

if TYPE_CHECKING:
    from . import errors as errors
    from .auto import AutoPagedModelForCausalLM as AutoPagedModelForCausalLM
    from .cache.paged_cache import PagedCache as PagedCache
    from .configuration import PagedConfig as PagedConfig
    from .errors import *  # noqa: F403
    from .generation.async_engine import AsyncEngine as AsyncEngine
    from .generation.engine import Engine as Engine
    from .generation.mixin import PagedGenerationMixin as PagedGenerationMixin
    from .generation.outputs import CompletionOutput as CompletionOutput
    from .generation.outputs import GenerationOutput as GenerationOutput
    from .generation.outputs import GenerationStatus as GenerationStatus
    from .generation.outputs import Logprob as Logprob
    from .generation.outputs import RequestOutput as RequestOutput
    from .generation.plan import EnginePlan as EnginePlan
    from .generation.request import HiddenStatesWanted as HiddenStatesWanted
    from .generation.request import RequestExtras as RequestExtras
    from .generation.sampling.params import SamplingParams as SamplingParams
    from .generation.structured.params import StructuredOutputsParams as StructuredOutputsParams
    from .llm import LLM as LLM
    from .pipelines import pipeline as pipeline


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if name == "GuidedDecodingParams":  # an ImportError, for code that tries one name of vLLM after the other
        raise ImportError(
            f"cannot import name {name!r} from {__name__!r}: it is vLLM's older name of StructuredOutputsParams, which "
            "`SamplingParams(structured_outputs=...)` takes."
        )
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loaded = importlib.import_module(module, __name__)
    value = loaded if name == "errors" else getattr(loaded, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
