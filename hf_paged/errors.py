"""Every exception that hf_paged raises on purpose.

    HfPagedError
    ├── InvalidRequestError (ValueError)        a request or one of its arguments is wrong; nothing else is touched
    │   ├── InvalidTokenError (IndexError)      a token id outside the vocabulary
    │   ├── InvalidEmbedsError (RuntimeError)   embeddings of a wrong shape or dtype
    │   ├── PromptTooLongError                  the prompt can never fit `max_model_len` or the K/V pool
    │   └── QueueFullError (queue.Full)         the engine takes no more waiting requests now; try again later
    ├── ConfigurationError (ValueError)         a `PagedConfig` field, or two of them together, make no sense
    ├── CheckpointError (ValueError)            a quantized checkpoint is damaged, or contradicts its configuration
    ├── CacheFileError (ValueError)             a file is not a saved `PagedCache`, is damaged or of another version
    ├── NotSupportedError (NotImplementedError) asked for, understood, not built (yet)
    │   ├── UnsupportedModelError               a model that the paged engine cannot run correctly
    │   └── UnsupportedAttentionError           no attention backend can do what a layer needs
    ├── UnknownNameError (LookupError)          a name that no registry entry carries
    ├── MissingDependencyError (ImportError)    an optional package is needed and is not there
    ├── NotEnoughMemoryError (MemoryError)      the pool, or one block of it, does not fit
    ├── RowFailedError (RuntimeError)           one row of many failed; handed out in its place, not raised
    └── EngineError (RuntimeError)              something went wrong while running
        ├── StepFailedError                     a step raised; its requests failed, the cause is `__cause__`
        │   └── StepMemoryError (MemoryError)   a step of one request alone ran out of the device's memory
        ├── NonFiniteLogitsError                the model returned NaN or infinite logits for one request
        ├── AttentionBypassedError              a layer used the paged cache without paged attention
        ├── RequestAbortedError                 somebody aborted the request that is being waited for
        ├── DeadlineExceededError               a request took longer than its caller gave it
        └── EngineClosedError                   the engine was closed, or its process was forked
            └── EngineDiedError                 its thread has ended by an error, which is `__cause__`

A message names the argument, its value, the limit and the way out. Each class also derives from the built-in
exception that Transformers or Python would raise in its place, so that existing `except` clauses keep working.
"""

from __future__ import annotations

import queue


class HfPagedError(Exception):
    """Base class of all errors that hf_paged raises on purpose."""


class InvalidRequestError(HfPagedError, ValueError):
    """A request, or one of its arguments, is wrong. Raised before any other request is touched."""


class InvalidTokenError(InvalidRequestError, IndexError):
    """A token id lies outside the model's vocabulary."""


class InvalidEmbedsError(InvalidRequestError, RuntimeError):
    """A prompt given as embeddings has a wrong shape or dtype."""


class PromptTooLongError(InvalidRequestError):
    """The prompt can never fit into `max_model_len` or into the K/V pool."""


class QueueFullError(InvalidRequestError, queue.Full):
    """The engine's waiting queue is full; the request may be sent again later."""


class ConfigurationError(HfPagedError, ValueError):
    """A configuration field has an impossible value, or contradicts another one."""


class CheckpointError(HfPagedError, ValueError):
    """A quantized checkpoint is damaged or incomplete, or contradicts the configuration beside it."""


class CacheFileError(HfPagedError, ValueError):
    """A file is not a saved `PagedCache`, is damaged, or was written in another version of the format."""


class NotSupportedError(HfPagedError, NotImplementedError):
    """Something was asked for that hf_paged understands but has not built."""


class UnsupportedModelError(NotSupportedError):
    """The paged engine cannot run this model correctly; the message names the layer and why."""


class UnsupportedAttentionError(NotSupportedError):
    """No attention backend has the capabilities that a layer needs; the message lists each one's reason."""


class UnknownNameError(HfPagedError, LookupError):
    """A name is not registered; the message lists what is available and what is not, and why."""


class MissingDependencyError(HfPagedError, ImportError):
    """An optional package is needed for this and is neither installed nor could be fetched."""


class NotEnoughMemoryError(HfPagedError, MemoryError):
    """The K/V pool does not fit into the memory that it may use."""


class RowFailedError(HfPagedError, RuntimeError):
    """One row of an iterable given to a pipeline failed. Stands in the place of its result; the others go on.

    Args:
        index (`int`):
            Which row, counted from 0.
        cause (`Exception`):
            What went wrong; also `__cause__`.
    """

    def __init__(self, index: int, cause: Exception):
        super().__init__(index, cause)
        self.index = index
        self.cause = self.__cause__ = cause

    def __str__(self) -> str:
        return f"Row {self.index} failed: {type(self.cause).__name__}: {self.cause}"


class EngineError(HfPagedError, RuntimeError):
    """Something went wrong while the engine was running."""


class StepFailedError(EngineError):
    """A step raised an exception; the requests of that step failed and the cause is attached."""

    advice = ""  # the end of the message


class StepMemoryError(StepFailedError, MemoryError):
    """A step ran out of the device's memory, though it had been made as small as it can be; its requests failed."""

    advice = (
        ". It was the smallest step that there is: lower `gpu_memory_utilization` or `num_blocks`, or free memory on "
        "the device."
    )


class NonFiniteLogitsError(EngineError):
    """The model returned NaN or infinite logits for a request; only that request failed."""


class AttentionBypassedError(EngineError):
    """A layer stored keys in the engine's cache but did not run paged attention over them."""


class RequestAbortedError(EngineError):
    """The request that is being waited for was aborted."""


class DeadlineExceededError(EngineError):
    """The request was not finished when its deadline came, and was aborted."""


class EngineClosedError(EngineError):
    """The engine was closed, or belongs to another process (it does not survive a fork)."""


class EngineDiedError(EngineClosedError):
    """The thread of an asynchronous engine has ended by an error; only another engine, or process, helps."""
