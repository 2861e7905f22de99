"""A call of `generate` that runs Transformers' own loop: over rows in the engine, or else on a `PagedCache`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from .. import compat
from ..cache.paged_cache import PagedCache
from .coverage import rows_of
from .engine import Engine
from .engine_cache import EngineCache
from .hf_generate import engine_obstacle
from .request import HiddenStatesWanted
from .session import Session

logger = logging.getLogger(__name__)

_ENGINE_MODES = frozenset(
    {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE}
)
_KNOWN_INPUTS = frozenset(
    {"attention_mask", "inputs_embeds", "logits_to_keep", "position_ids", "use_cache"}
    | {"output_attentions", "output_hidden_states"}
)


@dataclasses.dataclass(eq=False)
class LoopCall:
    """What a call of `generate` brings along while Transformers' loop runs.

    Args:
        obstacle (`str`, *optional*):
            Why its rows cannot be in the engine.
        caches (`list[EngineCache]`):
            The caches that were made for it.
    """

    obstacle: str | None
    caches: list[EngineCache] = dataclasses.field(default_factory=list)

    def finish(self, result: Any) -> Any:
        """Returns what the user gets: a cache that outlives the rows in the engine.

        Args:
            result (`Any`):
                What Transformers' loop returned.
        """
        name = compat.cache_output_field()
        if isinstance(result, ModelOutput) and isinstance(result.get(name), EngineCache):
            result[name] = result[name].to_paged_cache()
        return result


_current: contextvars.ContextVar[LoopCall | None] = contextvars.ContextVar("hf_paged_loop_call", default=None)


@contextlib.contextmanager
def loop_call(obstacle: str | None) -> Iterator[LoopCall]:
    """Marks a call of Transformers' `generate` in this thread; its rows leave the engine when it ends.

    Args:
        obstacle (`str`, *optional*):
            Why its rows cannot be in the engine, if that is known already.
    """
    call = LoopCall(obstacle)
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)
        for cache in call.caches:
            cache.close()


def choose_cache(
    model: Any,
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    mode: GenerationMode,
    num_prompts: int,
    length: int,
) -> Cache | None:
    """Returns the cache that a call of `generate` uses, or `None` to leave it to Transformers.

    Args:
        model (`PreTrainedModel`):
            The paged model.
        config (`GenerationConfig`):
            Complete, with `max_length` in it.
        model_kwargs (`Mapping[str, Any]`):
            What the loop will pass to the model, already expanded for beams.
        mode (`GenerationMode`):
            The loop.
        num_prompts (`int`):
            Rows before they were expanded.
        length (`int`):
            Columns that the cache will hold at most, padding included.
    """
    call = _current.get()
    if model_kwargs.get(compat.cache_argument(model)) is not None or config.use_cache is False:
        return None
    if config.cache_implementation is not None:
        logger.info("generate uses Transformers' %r cache, as asked, and not a paged one.", config.cache_implementation)
        return None
    if model._paged_refusal is not None:
        return None
    if call is None:
        return PagedCache(model.config)
    obstacle = call.obstacle or _obstacle(model, config, model_kwargs, mode)
    if obstacle is None:
        num_each = max(config.num_beams or 1, config.num_return_sequences or 1)
        rows = _Rows(model_kwargs, num_prompts, num_each, length + 1)
        obstacle = rows.obstacle(config, model.engine)
    if obstacle is not None and _wants(config, "output_attentions") and model.engine.needs("window"):
        # A PagedCache keeps the keys that have left the window, and the weights would have a column for each.
        logger.info("generate runs on Transformers' own cache, not in the engine: %s.", obstacle)
        return None
    if obstacle is not None:
        logger.info("generate runs on a PagedCache of its own, not in the engine: %s.", obstacle)
        return PagedCache(model.config)
    session = Session(
        model.engine,
        rows.num_new_tokens,
        hidden_states=HiddenStatesWanted() if _wants(config, "output_hidden_states") else None,
        attentions=_wants(config, "output_attentions"),
    )
    call.caches.append(EngineCache(session, rows.num_columns if config.prefill_chunk_size else 0))
    return call.caches[-1]


def _wants(config: GenerationConfig, name: str) -> bool:
    return bool(config.return_dict_in_generate and getattr(config, name, False))


def _obstacle(
    model: Any, config: GenerationConfig, model_kwargs: Mapping[str, Any], mode: GenerationMode
) -> str | None:
    """Why a call's rows cannot be in the engine, whatever their lengths, or `None`."""
    if mode not in _ENGINE_MODES or getattr(config, "is_assistant", False):
        return f"{mode.value} takes tokens back"
    obstacle = engine_obstacle(model)
    if obstacle is not None:
        return obstacle
    for name, value in model_kwargs.items():
        if value is not None and name not in _KNOWN_INPUTS:
            return f"`{name}` was given"
    if model_kwargs.get("logits_to_keep") not in (None, 1):
        return "`logits_to_keep` was given"
    if _wants(config, "output_attentions"):
        if model.engine.plan.call_layout == "tiles":
            return "`output_attentions` is not computed batch invariantly"
        if model.engine.needs("sinks"):
            return "attention weights beside learned sinks are not computed by the engine"
    return None


class _Rows:
    """The rows of a call, without their padding.

    Args:
        model_kwargs (`Mapping[str, Any]`):
            What the loop will pass to the model, already expanded for beams.
        num_prompts (`int`):
            Rows before they were expanded.
        num_each (`int`):
            Rows of each prompt.
        length (`int`):
            Columns at the end of the call at most.
    """

    def __init__(self, model_kwargs: Mapping[str, Any], num_prompts: int, num_each: int, length: int):
        self.mask = model_kwargs.get("attention_mask")
        self.num_each = num_each
        self.num_rows = num_prompts * num_each
        self.embedded = model_kwargs.get("inputs_embeds") is not None
        shapes = [(self.mask, 1), (model_kwargs.get("inputs_embeds"), 1), (model_kwargs.get("position_ids"), -1)]
        self.num_columns = next((tensor.shape[axis] for tensor, axis in shapes if tensor is not None), 1)
        self.num_new_tokens = max(length - self.num_columns, 1)

    def obstacle(self, config: GenerationConfig, engine: Engine) -> str | None:
        """Returns why these rows cannot be in the engine, or `None`.

        Args:
            config (`GenerationConfig`):
                Complete.
            engine (`Engine`):
                The engine.
        """
        plan = engine.plan
        if not self.num_rows or not self.num_columns:
            return "there are no tokens"  # Transformers has its own words for it
        if self.num_rows > plan.max_num_seqs:
            return f"{self.num_rows} rows exceed `max_num_seqs` {plan.max_num_seqs}"
        starts = [0] * self.num_rows
        if self.mask is not None:
            found = rows_of(self.mask, self.mask) if self.mask.ndim == 2 else None
            if found is None or not bool(self.mask[:, -1].all()):
                return "`attention_mask` has holes, or padding on the right"
            starts = found[1]
            if any(starts) and (_wants(config, "output_hidden_states") or _wants(config, "output_attentions")):
                return "hidden states and attentions of padding are wanted"
        lengths = [self.num_columns - start for start in starts]
        longest = max(lengths) + self.num_new_tokens
        if longest > plan.max_model_len:
            return f"a row may get {longest} tokens, and `max_model_len` is {plan.max_model_len}"
        # Rows that are recorded, or given as embeddings, are computed each by itself (see `Session`).
        alone = self.embedded or _wants(config, "output_hidden_states") or _wants(config, "output_attentions")
        num_blocks = self._num_blocks(lengths, plan.block_size, plan.enable_prefix_caching and not alone)
        if num_blocks > plan.num_blocks:
            return f"the rows may need {num_blocks} blocks, and the pool has {plan.num_blocks}"
        if not plan.enable_chunked_prefill and max(lengths) > plan.max_num_batched_tokens:
            return f"a prompt exceeds `max_num_batched_tokens` {plan.max_num_batched_tokens}, unchunked"
        return None

    def _num_blocks(self, lengths: list[int], block_size: int, shared: bool) -> int:
        """Blocks at the end of the call, the worst case: rows of one prompt share its full blocks, if they can."""
        total = 0
        for row, length in enumerate(lengths):
            needed = -(-(length + self.num_new_tokens) // block_size) + 1  # one more while a shared one is copied
            is_first = row % self.num_each == 0
            total += needed if is_first or not shared else needed - length // block_size
        return total
