"""One layer of a `PagedCache`, as Transformers' `Cache` wants to see it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .block_tables import BlockTables


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`: how many tokens of each row are in it, and how to reach them.

    Args:
        tables (`BlockTables`):
            The cache's rows, the same for all its layers.
        layer_idx (`int`):
            The layer.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, tables: BlockTables, layer_idx: int):
        # `keys` and `values` are properties here, so the base class's assignments are not run.
        self.tables = tables
        self.layer_idx = layer_idx
        self.length = 0

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Returns whether the layer has blocks."""
        return self.layer_idx in self.tables.store.layers

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the layer's blocks, of the shape that the first keys and values have.

        Args:
            key_states (`torch.Tensor`):
                `[batch, num_kv_heads, tokens, Dk]`.
            value_states (`torch.Tensor`):
                `[batch, num_kv_heads, tokens, Dv]`.
        """
        self.tables.store.create(self.layer_idx, key_states, value_states)

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Stores the keys and values of new tokens after those that are there.

        Args:
            key_states (`torch.Tensor`):
                `[batch, num_kv_heads, new tokens, Dk]`.
            value_states (`torch.Tensor`):
                `[batch, num_kv_heads, new tokens, Dv]`.

        Raises:
            ConfigurationError: If the number of rows, or the shape, dtype or device of a token changed.
        """
        batch, _, new, _ = key_states.shape
        end = self.length + new
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self.tables.part()  # else the graphs of all forks would hang together, through the memory they share
        self.tables.reserve(batch, self.length, end)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self.tables.slots(self.length, end, key_states.device)
        self.tables.store.write(self.layer_idx, slots, key_states, value_states)
        self.length = end

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends new keys and values and returns all of them, for use within this step.

        Args:
            key_states (`torch.Tensor`):
                `[batch, num_kv_heads, new tokens, Dk]`.
            value_states (`torch.Tensor`):
                `[batch, num_kv_heads, new tokens, Dv]`.
            args (`Any`):
                Ignored.
            kwargs (`Any`):
                Ignored.

        Returns:
            Keys and values of all tokens so far, `[batch, num_kv_heads, tokens, Dk or Dv]`. Where the tokens lie in
            one piece and no gradient is wanted they are views of the blocks.
        """
        self.append(key_states, value_states)
        # Autograd keeps what attention was given, and later steps write into the blocks.
        first = None if torch.is_grad_enabled() else self.tables.first_of_run
        keys, values = self.tables.store.layers[self.layer_idx]
        if first is None:
            return self._gather(keys), self._gather(values)
        start = first * self.tables.store.block_size
        return keys[None, :, start : start + self.length], values[None, :, start : start + self.length]

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        store = self.tables.store
        block_ids = self.tables.block_ids(-(-self.length // store.block_size), tensor.device)
        return store.gather(tensor, block_ids)[:, :, : self.length]

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """Returns a copy of all keys, `[batch, num_kv_heads, tokens, Dk]`, or `None` before the first update."""
        return self._gather(self.tables.store.layers[self.layer_idx][0]) if self.length else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """Returns a copy of all values, `[batch, num_kv_heads, tokens, Dv]`, or `None` before the first update."""
        return self._gather(self.tables.store.layers[self.layer_idx][1]) if self.length else None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length and offset of the keys that `update` will return.

        Args:
            query_length (`int`):
                New tokens of the call.
        """
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Returns the number of tokens stored for each row."""
        return self.length

    def get_max_length(self) -> int:
        """Returns -1, Transformers' word for no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before Transformers 5.24
