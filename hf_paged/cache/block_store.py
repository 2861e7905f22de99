"""The memory of `PagedCache`s: blocks of keys and values for every layer, shared by a cache and its forks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from ..errors import ConfigurationError
from .block_pool import BlockPool

_FIRST_SLAB = 64


class BlockStore:
    """Blocks that grow in slabs. A block has one id for all layers, and counts the rows that refer to it.

    The blocks of a layer lie side by side, head by head, so that the tokens of a row whose block ids are
    consecutive can be read without copying them:

        keys of one layer, [num_kv_heads, num_blocks * block_size, Dk]

            head 0   | block 0: t0 t1 t2 t3 | block 1: t4 t5 t6 t7 | ...
            head 1   | block 0: t0 t1 t2 t3 | block 1: t4 t5 t6 t7 | ...

    Caches that share a store may be used from different threads.

    Args:
        block_size (`int`):
            Tokens per block.
        num_blocks (`int`, defaults to 64):
            Blocks of the first slab.
    """

    def __init__(self, block_size: int, num_blocks: int = _FIRST_SLAB):
        self.block_size = block_size
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pool = BlockPool(num_blocks)
        # A cache may die while any thread is inside of any method here, so its blocks are freed by the next call.
        self._dropped: deque[list[list[int]]] = deque()
        self._num_users = 0
        self._lock = threading.Lock()

    @classmethod
    def filled(
        cls, block_size: int, layers: dict[int, tuple[torch.Tensor, torch.Tensor]], rows: Sequence[Sequence[int]]
    ) -> BlockStore:
        """Returns a store of just these blocks.

        Args:
            block_size (`int`):
                Tokens per block.
            layers (`dict[int, tuple[torch.Tensor, torch.Tensor]]`):
                Keys and values of each layer, `[num_kv_heads, num_blocks * block_size, Dk or Dv]`.
            rows (`Sequence[Sequence[int]]`):
                Who refers to the blocks, whose ids are counted from 0 without gaps.
        """
        count = len({block_id for row in rows for block_id in row})
        store = cls(block_size, max(count, 1))
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            # A view, or a tensor of inference mode, could not be written to in every mode.
            store.layers = {i: (keys.clone(), values.clone()) for i, (keys, values) in layers.items()}
        store.take(count)
        for row in rows:
            store.share(row)
        store.free(range(count))
        return store

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks, held or free."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Returns the number of blocks to which no row refers."""
        with self._lock:
            self._free_dropped()
            return self._pool.num_free

    @property
    def is_shared(self) -> bool:
        """Returns whether several caches have blocks here."""
        with self._lock:
            self._free_dropped()
            return self._num_users > 1

    def enter(self) -> None:
        """Counts one more cache."""
        with self._lock:
            self._num_users += 1

    def leave(self, rows: list[list[int]]) -> None:
        """Counts one cache less and frees its blocks, at the next call; never waits, so that finalizers may call it.

        Args:
            rows (`list[list[int]]`):
                Block ids of each of its rows.
        """
        self._dropped.append(rows)

    def take(self, count: int) -> list[int]:
        """Returns blocks that were free, with consecutive ids where possible; adds a slab if there are too few.

        Args:
            count (`int`):
                How many.
        """
        with self._lock:
            self._free_dropped()
            taken = self._pool.allocate(min(count, self._pool.num_free))
            missing = count - len(taken)
            if missing:
                self._grow(max(self._pool.num_blocks, missing))
                taken += self._pool.allocate(missing)
            return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Counts one more row for each block.

        Args:
            block_ids (`Sequence[int]`):
                The blocks of the row.
        """
        with self._lock:
            self._pool.touch(block_ids)

    def free(self, block_ids: Sequence[int]) -> None:
        """Counts one row less for each block.

        Args:
            block_ids (`Sequence[int]`):
                The blocks of the row.
        """
        with self._lock:
            self._pool.free(block_ids)

    def shared(self, block_ids: Sequence[int]) -> list[int]:
        """Returns those of the blocks to which more than one row refers.

        Args:
            block_ids (`Sequence[int]`):
                The blocks.
        """
        with self._lock:
            self._free_dropped()
            return [block_id for block_id in block_ids if self._pool.ref_counts[block_id] > 1]

    def _free_dropped(self) -> None:
        while self._dropped:
            self._num_users -= 1
            for row in self._dropped.popleft():
                self._pool.free(row)

    def _grow(self, num_blocks: int) -> None:
        self._pool.grow(num_blocks)
        for layer_idx, tensors in self.layers.items():
            larger = [self._zeros(tensor, tensor.shape[0], tensor.shape[2]) for tensor in tensors]
            for new, old in zip(larger, tensors, strict=True):
                new[:, : old.shape[1]] = old
            self.layers[layer_idx] = (larger[0], larger[1])

    def _zeros(self, like: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
        # Blocks can be written to inside and outside of inference mode, wherever the first call was.
        with torch.inference_mode(False):
            shape = (heads, self._pool.num_blocks * self.block_size, dim)
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def create(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the blocks of a layer, unless it has them.

        Args:
            layer_idx (`int`):
                The layer.
            key_states (`torch.Tensor`):
                `[batch, num_kv_heads, tokens, Dk]`, of which the shape, dtype and device are taken.
            value_states (`torch.Tensor`):
                `[batch, num_kv_heads, tokens, Dv]`.
        """
        with self._lock:
            if layer_idx not in self.layers:
                keys, values = (self._zeros(new, new.shape[1], new.shape[3]) for new in (key_states, value_states))
                self.layers[layer_idx] = (keys, values)

    def write(self, layer_idx: int, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Stores the keys and values of tokens.

        Args:
            layer_idx (`int`):
                The layer; its blocks exist.
            slots (`torch.Tensor`):
                int64 `[batch * tokens]`, where each token lies: block id * block_size + offset.
            key_states (`torch.Tensor`):
                `[batch, num_kv_heads, tokens, Dk]`.
            value_states (`torch.Tensor`):
                `[batch, num_kv_heads, tokens, Dv]`.

        Raises:
            ConfigurationError: If they have another shape, dtype or device than those that the layer holds.
        """
        with self._lock:
            for what, held, new in zip(
                ("keys", "values"), self.layers[layer_idx], (key_states, value_states), strict=True
            ):
                if _kind(held) != _kind(new.transpose(0, 1)):
                    raise ConfigurationError(
                        f"Layer {layer_idx} of the cache holds {what} of {_described(held)}, but was given "
                        f"{_described(new.transpose(0, 1))}; a cache belongs to one model, in one dtype and on one "
                        "device."
                    )
                held.index_copy_(1, slots, new.transpose(0, 1).reshape(held.shape[0], -1, held.shape[2]))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, of every layer.

        Args:
            pairs (`Sequence[tuple[int, int]]`):
                (source, destination) block ids.
        """
        with self._lock:
            for tensors in self.layers.values():
                for tensor in tensors:
                    sources, destinations = torch.tensor(pairs, device=tensor.device).unbind(1)
                    blocks = tensor.view(tensor.shape[0], -1, self.block_size, tensor.shape[2])
                    blocks[:, destinations] = blocks[:, sources]

    def gather(self, tensor: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the blocks of rows.

        Args:
            tensor (`torch.Tensor`):
                The keys or values of a layer, `[num_kv_heads, num_blocks * block_size, D]`.
            block_ids (`torch.Tensor`):
                int64 `[batch, blocks per row]`.

        Returns:
            `torch.Tensor`: `[batch, num_kv_heads, blocks per row * block_size, D]`.
        """
        heads, _, dim = tensor.shape
        blocks = tensor.view(heads, -1, self.block_size, dim)
        picked = blocks.index_select(1, block_ids.flatten())
        return picked.view(heads, block_ids.shape[0], -1, dim).transpose(0, 1)


def _kind(tensor: torch.Tensor) -> tuple:
    return tensor.shape[0], tensor.shape[-1], tensor.dtype, tensor.device


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.shape[0]} heads of {tensor.shape[-1]} ({tensor.dtype} on {tensor.device})"
