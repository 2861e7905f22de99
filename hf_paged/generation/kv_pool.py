"""The K/V pool of a layer group: its memory, and blocks that are cleared and copied."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..cache.memory import allocate
from ..modeling.layer_groups import LayerGroup
from .sampling.pending import to_device


class KVPool:
    """The K/V blocks of one layer group.

    Layers of one shape lie in one tensor `[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`, so that
    clearing and copying blocks is one operation for all of them.

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
        same = all(
            (layer.num_kv_heads, layer.key_dim, layer.value_dim) == (first.num_kv_heads, first.key_dim, first.key_dim)
            for layer in group.layers
        )
        if same:
            shape = (len(group.layers), 2, num_blocks, first.num_kv_heads, block_size, first.key_dim)
            self._slabs = allocate([shape], first.dtype, first.device)
            self.keys = [slab[0] for slab in self._slabs[0]]
            self.values = [slab[1] for slab in self._slabs[0]]
        else:
            shapes = [
                (1, 1, num_blocks, layer.num_kv_heads, block_size, dim)
                for layer in group.layers
                for dim in (layer.key_dim, layer.value_dim)
            ]
            self._slabs = allocate(shapes, first.dtype, first.device)
            self.keys = [slab[0, 0] for slab in self._slabs[0::2]]
            self.values = [slab[0, 0] for slab in self._slabs[1::2]]
        self.num_bytes = sum(slab.nbytes for slab in self._slabs)
        self._num_used = 0  # blocks from here on are zero still: nothing was ever written to them

    def use(self, new_block_ids: Iterable[int], cleared_block_ids: Iterable[int]) -> None:
        """Takes blocks into use, and zeroes some of them unless they are zero still.

        Args:
            new_block_ids (`Iterable[int]`):
                All blocks that are about to be written to for the first time.
            cleared_block_ids (`Iterable[int]`):
                Those of them that will not be filled.
        """
        stale = [block_id for block_id in cleared_block_ids if block_id < self._num_used]
        self._num_used = max(self._num_used, max(new_block_ids, default=-1) + 1)
        for slab in self._slabs:
            if slab.device.type == "cpu":  # where one call for all blocks takes ten times as long as one for each
                for block_id in stale:
                    slab[:, :, block_id].zero_()
            elif stale:
                slab.index_fill_(2, to_device(np.array(stale), slab.device), 0)

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies blocks.

        Args:
            pairs (`tuple[tuple[int, int], ...]`):
                (source, destination) block ids; no destination is also a source.
        """
        if pairs:
            sources, destinations = to_device(np.array(pairs), self._slabs[0].device).unbind(1)
            for slab in self._slabs:
                slab.index_copy_(2, destinations, slab.index_select(2, sources))
