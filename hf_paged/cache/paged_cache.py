"""`PagedCache`: a `transformers.Cache` on blocks, for Transformers' own loops and for loops written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from .. import compat
from ..errors import ConfigurationError, UnsupportedModelError
from .block_pool import BlockPool

_FIRST_SLAB = 64


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`: its blocks, and how many tokens of each row are in them.

    Args:
        owner (`PagedCache`):
            The cache, which owns the block tables.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: PagedCache):
        # `keys` and `values` are properties here, so the base class's assignments are not run.
        self.owner = owner
        self.length = 0
        self.key_blocks: torch.Tensor | None = None
        self.value_blocks: torch.Tensor | None = None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Returns whether the layer has blocks."""
        return self.key_blocks is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the layer's blocks, of the shape that the first keys and values have.

        Args:
            key_states (`torch.Tensor`):
                `[batch, num_kv_heads, tokens, Dk]`.
            value_states (`torch.Tensor`):
                `[batch, num_kv_heads, tokens, Dv]`.
        """
        blocks, size = self.owner.num_blocks, self.owner.block_size
        self.key_blocks = _zeros_like(key_states, (blocks, key_states.shape[1], size, key_states.shape[3]))
        self.value_blocks = _zeros_like(value_states, (blocks, value_states.shape[1], size, value_states.shape[3]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends new keys and values and returns all of them.

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
            Keys and values of all tokens so far, `[batch, num_kv_heads, tokens, Dk or Dv]`.
        """
        batch, _, new, _ = key_states.shape
        self.owner.reserve(batch, self.length, self.length + new)
        if self.key_blocks is None or self.value_blocks is None:
            self.lazy_initialization(key_states, value_states)
        positions = torch.arange(self.length, self.length + new)
        blocks = self.owner.table()[:, positions // self.owner.block_size].to(key_states.device)
        offsets = (positions % self.owner.block_size).to(key_states.device).expand(batch, -1)
        self.key_blocks[blocks, :, offsets] = key_states.transpose(1, 2)  # type: ignore[index]
        self.value_blocks[blocks, :, offsets] = value_states.transpose(1, 2)  # type: ignore[index]
        self.length += new
        return self._gather(self.key_blocks), self._gather(self.value_blocks)

    def _gather(self, blocks: torch.Tensor | None) -> torch.Tensor:
        assert blocks is not None, "a layer is initialized before it is read"
        used = -(-self.length // self.owner.block_size)
        picked = blocks[self.owner.table()[:, :used].to(blocks.device)]  # [batch, used, heads, block_size, D]
        batch, _, heads, _, dim = picked.shape
        return picked.transpose(1, 2).reshape(batch, heads, -1, dim)[:, :, : self.length]

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """Returns all keys, `[batch, num_kv_heads, tokens, Dk]`, or `None` before the first update."""
        return self._gather(self.key_blocks) if self.length else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """Returns all values, `[batch, num_kv_heads, tokens, Dv]`, or `None` before the first update."""
        return self._gather(self.value_blocks) if self.length else None

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

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks, for rows that are about to write into a shared one.

        Args:
            pairs (`list[tuple[int, int]]`):
                (source, destination) block ids.
        """
        for blocks in (self.key_blocks, self.value_blocks):
            if blocks is not None:
                sources, destinations = torch.tensor(pairs, device=blocks.device).unbind(1)
                blocks[destinations] = blocks[sources]

    def grow(self, num_blocks: int) -> None:
        """Enlarges the layer's blocks and keeps their contents.

        Args:
            num_blocks (`int`):
                New number of blocks.
        """
        for name in ("key_blocks", "value_blocks"):
            blocks = getattr(self, name)
            if blocks is not None:
                larger = _zeros_like(blocks, (num_blocks, *blocks.shape[1:]))
                larger[: blocks.shape[0]] = blocks
                setattr(self, name, larger)


def _zeros_like(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Makes blocks that can be written to inside and outside of inference mode, wherever the first call was."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)


class PagedCache(Cache):
    """A K/V cache in fixed-size blocks that can be handed to any decoder-only model of Transformers.

    Rows share blocks: expanding a batch and reordering beams move block tables and copy at most one partial block
    per row, when it is written to. Blocks are taken as tokens need them.

        row 0   table [ 4, 1, 7 ]     block 4 |t0 t1 t2 t3|  block 1 |t4 t5 t6 t7|  block 7 |t8 __ __ __|
        row 1   table [ 4, 1, 2 ]     shared with row 0      shared with row 0      block 2 |t8 t9 __ __|

    `update` returns all keys and values of a layer, like Transformers' `DynamicCache`, so every attention
    implementation and every mask works with it.

    Args:
        config (`PreTrainedConfig`, *optional*):
            Configuration of the model; without it layers are added as the model asks for them.
        block_size (`int`, defaults to 16):
            Tokens per block.

    Raises:
        UnsupportedModelError: If a layer of the configuration keeps something other than keys and values.
        ConfigurationError: If `block_size` is not positive.

    Example:

    ```python
    cache = PagedCache(model.config)
    logits = model(input_ids, past_key_values=cache).logits
    logits = model(next_ids, past_key_values=cache).logits  # continues
    ```
    """

    layers: list[PagedLayer]  # type: ignore[assignment]

    def __init__(self, config: PreTrainedConfig | None = None, *, block_size: int = 16):
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ConfigurationError(f"`block_size` must be a whole number of at least 1, got {block_size!r}.")
        if config is not None and not hasattr(config, "get_text_config"):
            raise ConfigurationError(
                f"`config` must be a model's configuration, got {type(config).__name__}; pass `model.config`."
            )
        self.block_size = block_size
        self.tables: list[list[int]] = []
        self._pool = BlockPool(_FIRST_SLAB)
        self._table_tensor: torch.Tensor | None = None
        super().__init__(layers=[])
        if config is not None:
            text_config = config.get_text_config(decoder=True)
            if getattr(compat.causal_model_class(text_config), "_is_stateful", False):
                raise UnsupportedModelError(
                    f"Models of {type(text_config).__name__} keep a recurrent state; a PagedCache holds K/V."
                )
            for i, layer_type in enumerate(getattr(text_config, "layer_types", None) or ()):
                if not layer_type.endswith("attention") or layer_type == "linear_attention":
                    raise UnsupportedModelError(
                        f"Layer {i} is of type {layer_type!r}; a PagedCache holds keys and values."
                    )
            self.layers = [PagedLayer(self) for _ in range(text_config.num_hidden_layers)]

    def __repr__(self) -> str:
        return (
            f"PagedCache({len(self.layers)} layers, {len(self.tables)} rows of {self.get_seq_length()} tokens, "
            f"{self.num_blocks_held} blocks of {self.block_size})"
        )

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks in the pool, held or free."""
        return self._pool.num_blocks

    @property
    def num_blocks_held(self) -> int:
        """Returns the number of blocks that hold tokens; a shared one counts once."""
        return self._pool.num_used

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends new keys and values to a layer and returns all of them.

        Args:
            key_states (`torch.Tensor`):
                `[batch, num_kv_heads, new tokens, Dk]`.
            value_states (`torch.Tensor`):
                `[batch, num_kv_heads, new tokens, Dv]`.
            layer_idx (`int`):
                The layer.
            args (`Any`):
                Ignored.
            kwargs (`Any`):
                Ignored.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(PagedLayer(self))
        return self.layers[layer_idx].update(key_states, value_states)

    def fill(self, rows: Sequence[tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]], length: int) -> None:
        """Stores K/V that were computed elsewhere into an empty cache.

        Args:
            rows (`Sequence[tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]]`):
                For each row the columns of its tokens, and per layer its keys and values
                `[num_kv_heads, tokens, Dk or Dv]`. Other columns hold zeros.
            length (`int`):
                Tokens of every row, padding included.
        """
        for layer_idx in range(len(rows[0][1])):
            padded = []
            for side in (0, 1):
                first = rows[0][1][layer_idx][side]
                whole = first.new_zeros(len(rows), first.shape[0], length, first.shape[2])
                for row, (columns, layers) in enumerate(rows):
                    whole[row, :, columns] = layers[layer_idx][side]
                padded.append(whole)
            self.update(padded[0], padded[1], layer_idx)

    def table(self) -> torch.Tensor:
        """Returns the block table, int64 `[batch, blocks per row]`, on the CPU."""
        if self._table_tensor is None:
            self._table_tensor = torch.tensor(self.tables, dtype=torch.long)
        return self._table_tensor

    def reserve(self, batch: int, start: int, end: int) -> None:
        """Makes the slots of the positions `start` to `end` of each row exist and belong to that row alone.

        Args:
            batch (`int`):
                Rows of the call.
            start (`int`):
                First position that will be written.
            end (`int`):
                Position after the last.

        Raises:
            ConfigurationError: If the number of rows changed without `reorder_cache` or its siblings.
        """
        if not self.tables:
            self.tables = [[] for _ in range(batch)]
        if len(self.tables) != batch:
            raise ConfigurationError(
                f"The cache holds {len(self.tables)} rows but was given keys of {batch}; use `batch_repeat_interleave` "
                "or `batch_select_indices` to change the number of rows."
            )
        first, last = start // self.block_size, -(-end // self.block_size)
        copies: list[tuple[int, int]] = []
        for table in self.tables:
            for i in range(first, min(last, len(table))):
                if self._pool.ref_counts[table[i]] > 1:
                    copies.append((table[i], self._take(1)[0]))
                    self._pool.free([table[i]])
                    table[i] = copies[-1][1]
            missing = last - len(table)
            if missing > 0:
                table.extend(self._take(missing))
                self._table_tensor = None
        if copies:
            self._table_tensor = None
            for layer in self.layers:
                layer.copy_blocks(copies)

    def _take(self, count: int) -> list[int]:
        if self._pool.num_free < count:
            self._pool.grow(max(self._pool.num_blocks, count))
            for layer in self.layers:
                layer.grow(self._pool.num_blocks)
        return self._pool.allocate(count)

    def _set_rows(self, rows: list[int]) -> None:
        """Makes row i a copy, by reference, of what was row `rows[i]`."""
        new_tables = [list(self.tables[row]) for row in rows]
        for table in new_tables:
            self._pool.touch(table)
        for table in self.tables:
            self._pool.free(table)
        self.tables = new_tables
        self._table_tensor = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the rows for beam search; blocks are shared, not copied.

        Args:
            beam_idx (`torch.LongTensor`):
                `[batch]`, for each new row the old one that it continues.
        """
        if self.tables:
            self._set_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row; blocks are shared, not copied.

        Args:
            repeats (`int`):
                How often.
        """
        if self.tables:
            self._set_rows([row for row in range(len(self.tables)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some rows only.

        Args:
            indices (`torch.Tensor`):
                Row numbers, or a boolean mask over the rows.
        """
        if self.tables:
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self._set_rows(rows.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens of every row and frees the blocks that no longer hold any.

        Args:
            tokens_to_remove (`int`):
                Minus the number of tokens to remove. A positive number is the length to keep, as in Transformers
                before 5.24.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding gives a tensor
        length = max((layer.length for layer in self.layers), default=0)
        keep = tokens_to_remove if tokens_to_remove > 0 else max(length + tokens_to_remove, 0)
        if keep >= length:
            return
        blocks = -(-keep // self.block_size)
        for table in self.tables:
            self._pool.free(table[blocks:])
            del table[blocks:]
        self._table_tensor = None
        for layer in self.layers:
            layer.length = min(layer.length, keep)

    def reset(self) -> None:
        """Forgets all tokens and frees all blocks, and their memory."""
        self._pool = BlockPool(_FIRST_SLAB)
        self.tables = []
        self._table_tensor = None
        for layer in self.layers:
            layer.length = 0
            layer.key_blocks = layer.value_blocks = None

    @property
    def batch_size(self) -> int:
        """Returns the number of rows, or -1 before the first update."""
        return len(self.tables) or -1

    @property
    def is_initialized(self) -> bool:
        """Returns whether every layer has blocks."""
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)
