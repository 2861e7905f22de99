"""The K/V pool of a layer group: its memory, and blocks that are cleared and copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from ..cache.memory import allocate
from ..kernels.triton import device as gpu
from ..modeling.layer_groups import LayerGroup
from .sampling.pending import to_device

Copier = Callable[[torch.Tensor], None]  # takes int64 [2, copies]: sources, and destinations


class KVPool:
    """The K/V blocks of one layer group.

    Layers of one shape lie in one tensor `[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`, so that
    clearing and copying blocks is one operation for all of them. Where Triton's kernels run, copies are one launch for
    layers of any shapes.

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
        self._copier: Copier | None = None  # looked for at the first copy
        self._has_looked = False
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
        if not stale:
            return
        if self._slabs[0].device.type == "cpu":  # where one call for all blocks takes ten times as long as one for each
            for slab in self._slabs:
                for block_id in stale:
                    slab[:, :, block_id].zero_()
        else:
            _clear_at_once(self._slabs, stale)

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies blocks.

        Args:
            pairs (`tuple[tuple[int, int], ...]`):
                (source, destination) block ids; no destination is also a source.
        """
        if not pairs:
            return
        if not self._has_looked:
            self._has_looked, self._copier = True, _triton_copier([*self.keys, *self.values])
        # As rows of sources and destinations, each contiguous.
        both = to_device(np.array(pairs, dtype=np.int64).T.copy(), self._slabs[0].device)
        if self._copier is not None:
            self._copier(both)
            return
        for slab in self._slabs:
            slab.index_copy_(2, both[1], slab.index_select(2, both[0]))


def _clear_at_once(slabs: Sequence[torch.Tensor], block_ids: list[int]) -> None:
    """Zeroes blocks of all layers in one launch, or in a few if there are more tensors than one can take."""
    if len(slabs) == 1:
        slabs[0].index_fill_(2, to_device(np.array(block_ids), slabs[0].device), 0)
    else:
        torch._foreach_zero_([slab[0, 0, block_id] for slab in slabs for block_id in block_ids])


def _triton_copier(caches: Sequence[torch.Tensor]) -> Copier | None:
    """Returns what copies blocks of all layers in one launch, where Triton runs and blocks are as it wants them."""
    if not (caches[0].is_cuda or gpu.interpreted()) or gpu.unavailable_reason() is not None:
        return None
    if any(cache[0].nbytes % 16 for cache in caches):
        return None
    from ..kernels.triton.cache import BlockCopies  # Triton takes long to import

    return BlockCopies(caches).copy
