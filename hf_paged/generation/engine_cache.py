"""`EngineCache`: what Transformers' own decoding loop holds instead of a K/V cache when its rows are in the engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .. import compat
from ..cache.paged_cache import PagedCache
from ..errors import EngineError, InvalidRequestError, NotSupportedError
from .session import Session

# What the loop passes to the model and the engine does not need: it knows its rows' positions itself, and computes
# the logits of the last token only. (A tokenizer and a streamer get here on their way from `generate` to
# nowhere.)
_KNOWN = frozenset(
    {"attention_mask", "cache", "past_key_values", "input_ids", "inputs_embeds", "logits_to_keep", "position_ids"}
    | {"output_attentions", "output_hidden_states", "return_dict", "use_cache"}
    | {"tokenizer", "streamer"}
)


class _ColumnCounter(CacheLayerMixin):
    """Stands for all layers: the loop asks the first one how many columns there are."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the blocks are the engine's."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Must not be reached: a model that is called with this cache does not run its layers."""
        raise EngineError(
            "The model's layers were run with an EngineCache, which only the paged model itself knows how to use; call "
            "the model object, not its forward method or a part of it."
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length and offset of the keys after a call."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Returns the number of columns."""
        return self.length

    def get_max_length(self) -> int:
        """Returns -1, Transformers' word for no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before Transformers 5.24


class EngineCache(Cache):
    """Rows of a decoding loop of Transformers that live in the engine. Made by `generate`.

    Calling the paged model with this cache computes the next logits of all rows in engine steps.

    Args:
        session (`Session`):
            The rows.
        num_prompt_columns (`int`, defaults to 0):
            Columns of the prompts. As long as they are not all there (`prefill_chunk_size`), nobody reads logits, and
            the engine, which has chunks of its own, is not bothered.
    """

    def __init__(self, session: Session, num_prompt_columns: int = 0):
        self._counter = _ColumnCounter()
        super().__init__(layers=[self._counter])
        self.session = session
        self._num_prompt_columns = num_prompt_columns
        self._pending: list[list[int]] | None = None  # the beginnings of prompts that are not complete
        self._columns: list[list[int]] = []  # of each row's tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of columns, padding included.

        Args:
            layer_idx (`int`, defaults to 0):
                Ignored: all layers are alike.
        """
        return self._counter.length

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the rows: block tables move, no K/V does.

        Args:
            beam_idx (`torch.LongTensor`):
                `[rows]`, for each new row the old one that it continues.
        """
        parents = beam_idx.tolist()
        self.session.reorder(parents)
        self._columns = [list(self._columns[parent]) for parent in parents]

    def forward(self, **inputs: Any) -> CausalLMOutputWithPast:
        """Answers a call of the model.

        Args:
            inputs (`Any`):
                What the model was called with: `input_ids` or `inputs_embeds`, a mask of padding, and so on.

        Returns:
            `CausalLMOutputWithPast`: With the logits `[rows, 1, vocab_size]` of the last column.

        Raises:
            NotSupportedError: For an input that the engine does not know.
        """
        unknown = sorted(name for name, value in inputs.items() if value is not None and name not in _KNOWN)
        if unknown:
            raise NotSupportedError(f"The model was called with {unknown} in the middle of a `generate` on the engine.")
        embeds = inputs.get("inputs_embeds")
        tokens = inputs.get("input_ids") if embeds is None else embeds
        assert isinstance(tokens, torch.Tensor), "Transformers' loop passes tokens or embeddings"
        if tokens.ndim != (2 if embeds is None else 3):
            raise InvalidRequestError(f"The inputs must be tokens [rows, columns], got the shape {list(tokens.shape)}.")
        batch, count = tokens.shape[:2]
        position_ids = inputs.get("position_ids")
        if embeds is None and position_ids is not None and position_ids.shape[-1] != count:
            raise InvalidRequestError(
                f"`attention_mask` and the inputs do not match: {position_ids.shape[-1]} and {count} columns."
            )
        if count == 0:
            raise NotSupportedError(
                "The model was called with no tokens; `prefill_chunk_size` goes with token ids only."
            )
        first = self.get_seq_length()
        mask = inputs.get("attention_mask")
        if mask is not None and mask.shape[1] < first + count:
            raise NotSupportedError(f"The mask has {mask.shape[1]} columns, for {first + count} columns of tokens.")
        # The first columns: a mask may be too wide after `token_healing`, and Transformers then reads it like this.
        kept = slice(first, first + count)
        real = torch.ones(batch, count, dtype=torch.bool) if mask is None else mask[:, kept].bool().cpu()
        if not self._columns:
            self._columns = [[] for _ in range(batch)]
        for columns, row in zip(self._columns, real, strict=True):
            columns += (row.nonzero().flatten() + first).tolist()
        self._counter.length += count
        logits = self._compute(tokens, real, embeds is not None)
        # The loop asks for them without `return_dict_in_generate` too, and then throws them away.
        session = self.session
        hidden_states = session.hidden_states() if session.records_hidden_states else None
        attentions = session.attentions() if session.records_attentions else None
        fields: dict[str, Any] = {compat.model_output_cache_field(): self}
        return CausalLMOutputWithPast(
            logits=logits[:, None].to(tokens.device), hidden_states=hidden_states, attentions=attentions, **fields
        )

    def _compute(self, tokens: torch.Tensor, real: torch.Tensor, embedded: bool) -> torch.Tensor:
        if embedded:
            if self.session.requests or self._pending is not None:
                raise NotSupportedError("`inputs_embeds` came in several pieces; set `prefill_chunk_size` to None.")
            embeds = [row[mask.to(row.device)] for row, mask in zip(tokens, real, strict=True)]
            return self.session.start([[0] * len(row) for row in embeds], embeds)
        rows = [row[mask].tolist() for row, mask in zip(tokens.cpu(), real, strict=True)]
        if self.session.requests:
            return self.session.feed(rows)
        if self._pending is not None:
            rows = [before + row for before, row in zip(self._pending, rows, strict=True)]
        is_partial = self.get_seq_length() < self._num_prompt_columns and not self.session.records
        if is_partial or not all(rows):
            self._pending = rows
            return torch.zeros(len(rows), self.session.engine.limits.vocab_size, dtype=torch.float32)
        self._pending = None
        return self.session.start(rows)

    def to_paged_cache(self) -> PagedCache:
        """Returns the rows' K/V as a cache of their own, with zeros in the columns of padding."""
        cache = PagedCache(block_size=self.session.engine.plan.block_size)
        cache.fill(list(zip(self._columns, self.session.read_kv(), strict=True)), self.get_seq_length())
        return cache

    def close(self) -> None:
        """Gives the rows' blocks back to the engine. Safe to call twice."""
        self.session.close()
