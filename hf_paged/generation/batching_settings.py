"""What Transformers' `ContinuousBatchingConfig` says, in terms of our engine."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import weakref
from typing import Any

import torch

from ..cache.memory import free_memory
from ..configuration import PagedConfig
from ..errors import ConfigurationError, EngineError, InvalidRequestError, UnsupportedAttentionError
from .engine import Engine
from .plan import EnginePlan
from .policies import SCHEDULING_POLICIES

logger = logging.getLogger(__name__)

# Our counterpart of each field; `page_size` is what newer versions of Transformers call `block_size`.
_COUNTERPARTS = {
    "page_size": "block_size",
    "block_size": "block_size",
    "num_blocks": "num_blocks",
    "max_batch_tokens": "max_num_batched_tokens",
    "max_memory_percent": "num_blocks",
    "max_requests_per_batch": "max_num_seqs",
    "allow_block_sharing": "enable_prefix_caching",
    "scheduler_type": "scheduling_policy",
    "use_cuda_graph": "enforce_eager",
}
_OURS = frozenset({"max_queue_size", "return_logprobs", "seed"})
# What has no counterpart because its effect is always there.
_ALWAYS = frozenset({"per_request_processors", "drop_unsupported_processors"})

# For each model the engine that was made for settings its own engine does not have, and what for.
_engines: weakref.WeakKeyDictionary[torch.nn.Module, tuple[tuple, Engine]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # a thread that held it is not in the child
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_logged: set[str] = set()


@dataclasses.dataclass(frozen=True)
class BatchingSettings:
    """The settings of a `ContinuousBatchingConfig` that were set to something other than their default.

    Args:
        engine_fields (`dict[str, Any]`):
            Those about the engine, by Transformers' names.
        page_size (`int`, *optional*):
            Tokens in one of the blocks that `num_blocks` counts.
        max_queue_size (`int`, *optional*):
            Waiting requests beyond which the manager takes no more.
        return_logprobs (`bool`, defaults to `False`):
            Whether results carry the log-probability of each token.
        seed (`int`, *optional*):
            Fixes what is sampled.
    """

    engine_fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    page_size: int | None = None
    max_queue_size: int | None = None
    return_logprobs: bool = False
    seed: int | None = None

    @classmethod
    def of(cls, config: Any) -> BatchingSettings:
        """Reads a configuration; what does not apply here is logged, once.

        Args:
            config (`ContinuousBatchingConfig`, *optional*):
                Transformers' configuration.

        Raises:
            InvalidRequestError: If it is not one.
        """
        if config is None:
            return cls()
        if not dataclasses.is_dataclass(config) or not hasattr(config, "max_batch_tokens"):
            raise InvalidRequestError(
                "`continuous_batching_config` must be a ContinuousBatchingConfig of Transformers, got "
                f"{type(config).__name__}; settings of the engine itself are in `PagedConfig`."
            )
        given = _explicit(config)
        foreign = sorted(set(given) - set(_COUNTERPARTS) - _OURS - _ALWAYS)
        if foreign:
            _log_once(f"`continuous_batching_config`: {', '.join(foreign)} say nothing to the paged engine.")
        return cls(
            engine_fields={name: value for name, value in given.items() if name in _COUNTERPARTS},
            page_size=getattr(config, "page_size", None) or getattr(config, "block_size", None),
            max_queue_size=given.get("max_queue_size") or None,
            return_logprobs=bool(given.get("return_logprobs")),
            seed=given.get("seed"),
        )

    def defaults(self) -> dict[str, Any]:
        """Returns what every request wishes that does not wish otherwise."""
        return {"processed_logprobs": True} if self.return_logprobs else {}

    def seed_of(self, number: int) -> int | None:
        """Returns the seed of a request, or `None` if it draws one.

        Args:
            number (`int`):
                Which request it is.
        """
        return None if self.seed is None else (self.seed + number * 0x9E3779B97F4A7C15) % 2**64

    def engine(self, model: Any) -> Engine:
        """Returns the engine that these settings ask for: the model's own, or, if that has others, one more.

        The last one that was made for a model is kept; its pool is there only while something uses it.

        Args:
            model (`PreTrainedModel`):
                The paged model.
        """
        own: Engine = model.engine
        if not self.engine_fields:
            return own
        wanted = self._changes(own.plan)
        if wanted.get("enforce_eager") and not own.plan.cuda_graph_sizes:
            del wanted["enforce_eager"]
        if all(getattr(own.plan, name, None) == value for name, value in wanted.items()):
            return own
        key = (*sorted(self.engine_fields.items(), key=str), own.config, model.dtype, model.device)
        with _lock:
            kept = _engines.get(model)
            if kept is None or kept[0] != key or kept[1].is_closed:
                if torch.device(own.plan.device).type != "cpu":  # where a pool takes all that there is
                    with contextlib.suppress(EngineError):  # it is in use
                        own.release()
                kept = _engines[model] = (key, _make_engine(model, own.config, wanted))
            return kept[1]

    def let_go(self, model: Any, *, keep_pool: bool) -> None:
        """Says that a call is over: an engine that is not the model's own frees its pool, if nobody else uses it.

        Args:
            model (`PreTrainedModel`):
                The paged model.
            keep_pool (`bool`):
                Leave it as it is.
        """
        kept = _engines.get(model)
        if self.engine_fields and kept is not None and not keep_pool:
            with contextlib.suppress(EngineError):
                kept[1].release()

    def _changes(self, plan: EnginePlan) -> dict[str, Any]:
        """The fields of `PagedConfig` that these settings ask for."""
        given = dict(self.engine_fields)
        changes = {
            _COUNTERPARTS[name]: given[name]
            for name in ("max_batch_tokens", "max_requests_per_batch", "allow_block_sharing")
            if given.get(name) is not None
        }
        block_size = given.get("page_size", given.get("block_size"))
        if block_size is not None:
            changes["block_size"] = block_size
        if given.get("use_cuda_graph") in (False, (False, False)) and torch.device(plan.device).type != "cpu":
            changes["enforce_eager"] = True
        policy = given.get("scheduler_type")
        if policy in SCHEDULING_POLICIES:
            changes["scheduling_policy"] = policy
        elif policy is not None:
            _log_once(f"`scheduler_type` {policy!r} is not one of {sorted(SCHEDULING_POLICIES)}, and is not used.")
        num_blocks = self._num_blocks(plan, block_size or plan.block_size)
        if num_blocks is not None:
            changes["num_blocks"] = num_blocks
        return changes

    def _num_blocks(self, plan: EnginePlan, block_size: int) -> int | None:
        """Blocks of ours that hold what was asked for, or `None` for as many as there are."""
        counted = self.engine_fields.get("num_blocks")
        if counted is not None:
            return -(-counted * (self.page_size or block_size) // block_size)
        share = self.engine_fields.get("max_memory_percent")
        if share is None:
            return None
        if not 0 < share <= 1:
            raise InvalidRequestError(f"`max_memory_percent` must be a share in (0, 1], got {share!r}.")
        limit = int(share * free_memory(torch.device(plan.device)))
        return (
            None
            if plan.pool_bytes <= limit
            else max(limit // (plan.bytes_per_block * block_size // plan.block_size), 1)
        )


def close_extra_engine(model: Any) -> None:
    """Closes the engine that was made for settings that a model's own engine does not have, if there is one.

    Args:
        model (`PreTrainedModel`):
            The paged model, whose dtype, device or class is about to be another.
    """
    with _lock:
        kept = _engines.pop(model, None)
    if kept is not None:
        kept[1].close()


def _explicit(config: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: getattr(config, name) for name, default in fields.items() if getattr(config, name) != default}


def _make_engine(model: Any, config: PagedConfig, changes: dict[str, Any]) -> Engine:
    logger.info("`continuous_batching_config`: one more engine with %s.", changes)
    try:
        return Engine(model, dataclasses.replace(config, **changes))
    except (UnsupportedAttentionError, ConfigurationError) as error:
        if "block_size" not in changes:
            raise
        logger.warning("`page_size` %s is not used: %s", changes["block_size"], error)
        fewer = {name: value for name, value in changes.items() if name != "block_size"}
        if "num_blocks" in fewer:
            size = config.block_size or 16
            fewer["num_blocks"] = -(-changes["num_blocks"] * changes["block_size"] // size)
        return Engine(model, dataclasses.replace(config, **fewer))


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.info("%s", message)
