"""The K/V pool of a layer group: its memory, and blocks that are cleared and copied."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..cache.memory import allocate
from ..kernels.quantized_blocks import SCALE_DTYPE, Blocks, QuantizedBlocks, tensors_of
from ..kernels.triton import device as gpu
from ..modeling.layer_groups import LayerGroup

Copier = Callable[[torch.Tensor], None]  # takes int64 [2, copies]: sources, and destinations


class KVPool:
    """The K/V blocks of one layer group.

    Keys and values of one shape lie in one tensor `[caches, num_blocks, num_kv_heads, block_size, head_dim]`, so that
    clearing and copying blocks is one operation for all of them. Where Triton's kernels run, copies are one launch for
    layers of any shapes. Quantized ones lie there as bytes, beside their scales in tensors
    `[caches, num_blocks, num_kv_heads, block_size]`, which are cleared and copied with them.

    Args:
        group (`LayerGroup`):
            The layers.
        num_blocks (`int`):
            Blocks in the pool.
        block_size (`int`):
            Tokens per block.
    """

    def __init__(self, group: LayerGroup, num_blocks: int, block_size: int):
        first = group.layers[0]
        # In turn the keys and values of each layer.
        shapes = [(layer.num_kv_heads, dim) for layer in group.layers for dim in (layer.key_dim, layer.value_dim)]
        counts = collections.Counter(shapes)
        dtype = first.dtype if first.cache_dtype is None else torch.int8
        self._slabs = allocate(
            [(count, num_blocks, heads, block_size, dim) for (heads, dim), count in counts.items()], dtype, first.device
        )
        tensors = _dealt(self._slabs, list(counts), shapes)
        caches: list[Blocks] = [*tensors]
        if first.cache_dtype is not None:
            scales = allocate([slab.shape[:-1] for slab in self._slabs], SCALE_DTYPE, first.device)
            codes = [tensor.view(first.cache_dtype) for tensor in tensors]
            caches = [*map(QuantizedBlocks, codes, _dealt(scales, list(counts), shapes))]
            self._slabs += scales
        self.keys, self.values = caches[0::2], caches[1::2]
        self.num_bytes = sum(slab.nbytes for slab in self._slabs)
        self._copier: Copier | None = None  # looked for at the first copy
        self._has_looked = False
        self._num_used = 0  # blocks from here on are zero still: nothing was ever written to them

    def take(self, new_block_ids: Iterable[int], cleared_block_ids: Iterable[int]) -> list[int]:
        """Takes blocks into use.

        Args:
            new_block_ids (`Iterable[int]`):
                All blocks that are about to be written to for the first time.
            cleared_block_ids (`Iterable[int]`):
                Those of them that will not be filled.

        Returns:
            `list[int]`: Which of the latter are to be cleared; the others are zero still.
        """
        stale = [block_id for block_id in cleared_block_ids if block_id < self._num_used]
        self._num_used = max(self._num_used, max(new_block_ids, default=-1) + 1)
        return stale

    def clear(self, block_ids: torch.Tensor) -> None:
        """Zeroes blocks.

        Args:
            block_ids (`torch.Tensor`):
                int64 `[k]`, on the pool's device.
        """
        if self._slabs[0].device.type == "cpu":  # where one call for all blocks takes ten times as long as one for each
            for block_id in block_ids.tolist():
                for slab in self._slabs:
                    slab[:, block_id].zero_()
        else:
            _clear_at_once(self._slabs, block_ids)

    def copy(self, pairs: torch.Tensor) -> None:
        """Copies blocks.

        Args:
            pairs (`torch.Tensor`):
                int64 `[2, k]`, contiguous, on the pool's device: sources and destinations; no destination is also a
                source.
        """
        if not self._has_looked:
            self._has_looked, self._copier = True, _triton_copier(tensors_of(*self.keys, *self.values))
        if self._copier is not None:
            self._copier(pairs)
            return
        for slab in self._slabs:
            slab.index_copy_(1, pairs[1], slab.index_select(1, pairs[0]))


def _dealt(slabs: Sequence[torch.Tensor], kinds: Sequence[Any], wanted: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the parts of slabs, each of one kind, in the order in which they are wanted."""
    parts = {kind: iter(slab.unbind(0)) for kind, slab in zip(kinds, slabs, strict=True)}
    return [next(parts[kind]) for kind in wanted]


def _clear_at_once(slabs: Sequence[torch.Tensor], block_ids: torch.Tensor) -> None:
    for slab in slabs:
        slab.index_fill_(1, block_ids, 0)


def _triton_copier(caches: Sequence[torch.Tensor]) -> Copier | None:
    """Returns what copies blocks of all layers in one launch, where Triton runs and blocks are as it wants them."""
    if not (caches[0].is_cuda or gpu.interpreted()) or gpu.unavailable_reason() is not None:
        return None
    if any(cache[0].nbytes % 16 for cache in caches):
        return None
    from ..kernels.triton.cache import BlockCopies  # Triton takes long to import

    return BlockCopies(caches).copy
