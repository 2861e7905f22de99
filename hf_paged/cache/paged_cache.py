"""`PagedCache`: a `transformers.Cache` on blocks, for Transformers' own loops and for loops written by hand."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from .. import compat
from ..errors import ConfigurationError, InvalidRequestError, UnsupportedModelError
from .block_store import BlockStore
from .block_tables import BlockTables
from .cache_file import CacheContents, read_cache_file, write_cache_file
from .paged_layer import PagedLayer


class PagedCache(Cache):
    """A K/V cache in fixed-size blocks that can be handed to any decoder-only model of Transformers.

    Rows share blocks: expanding a batch and reordering beams move block tables and copy at most one partial block
    per row, when it is written to. Blocks are taken as tokens need them. Forks of a cache share blocks in the same
    way.

        row 0   table [ 4, 1, 7 ]     block 4 |t0 t1 t2 t3|  block 1 |t4 t5 t6 t7|  block 7 |t8 __ __ __|
        row 1   table [ 4, 1, 2 ]     shared with row 0      shared with row 0      block 2 |t8 t9 __ __|

    `update` returns all keys and values of a layer, like Transformers' `DynamicCache`, so every attention
    implementation and every mask works with it. `copy.deepcopy` and `pickle` give caches that share nothing.

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
    first, second = cache.fork(2)  # two continuations of one prefix, which is in memory once
    cache.save("prefix.safetensors")
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
        self._tables = BlockTables(BlockStore(block_size))
        super().__init__(layers=[])
        if config is not None:
            self._add_layers(_num_layers(config))

    def _add_layers(self, count: int) -> None:
        self.layers += [PagedLayer(self._tables, i) for i in range(len(self.layers), count)]

    def __repr__(self) -> str:
        return (
            f"PagedCache({len(self.layers)} layers, {len(self.tables)} rows of {self.get_seq_length()} tokens, "
            f"{self.num_blocks_held} blocks of {self.block_size})"
        )

    @property
    def block_size(self) -> int:
        """Returns the number of tokens per block."""
        return self._tables.store.block_size

    @property
    def tables(self) -> list[list[int]]:
        """Returns the block ids of each row, in the order of its tokens. They are not to be changed."""
        return self._tables.rows

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks in memory, held or free; forks have one memory."""
        return self._tables.store.num_blocks

    @property
    def num_blocks_free(self) -> int:
        """Returns the number of blocks in memory that neither this cache nor a fork holds."""
        return self._tables.store.num_free

    @property
    def num_blocks_held(self) -> int:
        """Returns the number of blocks that hold tokens of this cache; one that rows share counts once."""
        return len({block_id for row in self.tables for block_id in row})

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

        Returns:
            Keys and values of all tokens so far, `[batch, num_kv_heads, tokens, Dk or Dv]`, for use within this
            step: they may be views of the blocks. `cache.layers[layer_idx].keys` is a copy.

        Raises:
            ConfigurationError: If the number of rows, or the shape, dtype or device of a token changed.
        """
        self._add_layers(layer_idx + 1)
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
        self._add_layers(len(rows[0][1]))
        for layer_idx in range(len(rows[0][1])):
            padded = []
            for side in (0, 1):
                first = rows[0][1][layer_idx][side]
                whole = first.new_zeros(len(rows), first.shape[0], length, first.shape[2])
                for row, (columns, layers) in enumerate(rows):
                    whole[row, :, columns] = layers[layer_idx][side]
                padded.append(whole)
            self.layers[layer_idx].append(padded[0], padded[1])

    def fork(self, n: int = 1) -> list[PagedCache]:
        """Returns caches that continue from here, each on its own.

        The tokens so far stay in memory once. A cache that writes into a block that others hold copies it first, so
        a fork costs at most one partial block per row. The forks and this cache may be changed, reset and deleted in
        any order, and used from different threads; blocks that nobody holds any longer are used again, and their
        memory is freed with the last of the caches. A cache that is given keys with gradients moves to memory of its
        own, since autograd keeps what they were computed from.

        Args:
            n (`int`, defaults to 1):
                How many.

        Returns:
            `list[PagedCache]`: `n` caches.

        Raises:
            InvalidRequestError: If `n` is not a whole number of at least 1.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidRequestError(f"`n` must be a whole number of at least 1, got {n!r}.")
        return [self._twin(self._tables.fork(), [layer.length for layer in self.layers]) for _ in range(n)]

    def _twin(self, tables: BlockTables, lengths: list[int]) -> PagedCache:
        """A cache with these rows, and otherwise all that this one has."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._set_rows(tables, lengths)
        return twin

    def _set_rows(self, tables: BlockTables, lengths: list[int]) -> None:
        self._tables = tables
        self.layers = []
        self._add_layers(len(lengths))
        for layer, length in zip(self.layers, lengths, strict=True):
            layer.length = length

    def _contents(self) -> CacheContents:
        """What this cache holds, without what only its forks do."""
        store, rows = self._tables.compact()
        lengths = [layer.length for layer in self.layers]
        layers = {i: (keys.detach(), values.detach()) for i, (keys, values) in store.layers.items() if lengths[i]}
        return CacheContents(self.block_size, rows, lengths, layers)

    @staticmethod
    def _tables_of(contents: CacheContents) -> BlockTables:
        rows = contents.tables
        return BlockTables(BlockStore.filled(contents.block_size, contents.layers, rows), rows)

    def __deepcopy__(self, memo: dict) -> PagedCache:
        twin = self._twin(BlockTables(*self._tables.compact()), [layer.length for layer in self.layers])
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            if name not in ("_tables", "layers"):
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        others = {name: value for name, value in self.__dict__.items() if name not in ("_tables", "layers")}
        return {**others, "contents": self._contents()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        contents: CacheContents = state["contents"]
        self.__dict__.update({name: value for name, value in state.items() if name != "contents"})
        self._set_rows(self._tables_of(contents), contents.lengths)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the cache to a safetensors file, in the dtype that it has; shared blocks are written once.

        The file appears under its name when it is complete.

        Args:
            path (`str` or `os.PathLike`):
                The file.

        Raises:
            OSError: If it cannot be written.
        """
        write_cache_file(path, self._contents())

    @classmethod
    def load(cls, path: str | os.PathLike, *, device: str | torch.device = "cpu") -> PagedCache:
        """Returns the cache that `save` has written. It continues as the saved one would have.

        Args:
            path (`str` or `os.PathLike`):
                The file.
            device (`str` or `torch.device`, defaults to `"cpu"`):
                Where the model is.

        Returns:
            `PagedCache`: A cache with blocks of its own.

        Raises:
            CacheFileError: If the file is something else, is damaged, or is of another version of the format.
            ConfigurationError: If the device cannot be used here.
            FileNotFoundError: If there is none.
        """
        contents = read_cache_file(path, device)
        cache = cls(block_size=contents.block_size)
        cache._set_rows(cls._tables_of(contents), contents.lengths)
        return cache

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the rows for beam search; blocks are shared, not copied.

        Args:
            beam_idx (`torch.LongTensor`):
                `[batch]`, for each new row the old one that it continues.
        """
        if self.tables:
            self._tables.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row; blocks are shared, not copied.

        Args:
            repeats (`int`):
                How often.
        """
        if self.tables:
            self._tables.select([row for row in range(len(self.tables)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some rows only.

        Args:
            indices (`torch.Tensor`):
                Row numbers, or a boolean mask over the rows.
        """
        if self.tables:
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self._tables.select(rows.tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens of every row and gives up the blocks that no longer hold any.

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
        self._tables.crop(keep)
        for layer in self.layers:
            layer.length = min(layer.length, keep)

    def reset(self) -> None:
        """Forgets all tokens, gives up all blocks and, unless forks use it, their memory."""
        self._set_rows(BlockTables(BlockStore(self.block_size)), [0] * len(self.layers))

    @property
    def batch_size(self) -> int:
        """Returns the number of rows, or -1 before the first update."""
        return len(self.tables) or -1

    @property
    def is_initialized(self) -> bool:
        """Returns whether every layer has blocks."""
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)


def _num_layers(config: PreTrainedConfig) -> int:
    """The number of layers of a model, all of which keep keys and values."""
    text_config = config.get_text_config(decoder=True)
    if getattr(compat.causal_model_class(text_config), "_is_stateful", False):
        raise UnsupportedModelError(
            f"Models of {type(text_config).__name__} keep a recurrent state; a PagedCache holds K/V."
        )
    for i, layer_type in enumerate(getattr(text_config, "layer_types", None) or ()):
        if not layer_type.endswith("attention") or layer_type == "linear_attention":
            raise UnsupportedModelError(f"Layer {i} is of type {layer_type!r}; a PagedCache holds keys and values.")
    return text_config.num_hidden_layers
