"""Who holds which block: reference counts and the order in which free blocks are reused. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence


class BlockPool:
    """The blocks of one layer group. A block is free (ref_count 0) or held by one or more owners.

    Free blocks wait in one queue; blocks worth keeping wait longest:

        reused first | without a hash | cached, oldest ... newest | reused last

    Args:
        num_blocks (`int`):
            Blocks in the pool; their ids are `0 ... num_blocks - 1`. None is reserved.
    """

    def __init__(self, num_blocks: int):
        assert num_blocks > 0, f"a pool needs at least one block, got {num_blocks}; the engine's plan checks this"
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Returns how many blocks nobody holds (cached ones included)."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Returns how many blocks somebody holds."""
        return self.num_blocks - len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, those reused first in front. The caller must drop their hashes.

        Args:
            num_blocks (`int`):
                How many; at most `num_free`.

        Returns:
            `list[int]`: Their ids, each with a ref_count of 1.
        """
        assert num_blocks <= len(self._free), (
            f"{num_blocks} blocks wanted, {len(self._free)} free; check num_free first"
        )
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def grow(self, num_blocks: int) -> None:
        """Adds free blocks, with the ids that follow the last.

        Args:
            num_blocks (`int`):
                How many.
        """
        for block_id in reversed(range(self.num_blocks, self.num_blocks + num_blocks)):
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=False)
        self.ref_counts += [0] * num_blocks
        self.num_blocks += num_blocks

    def touch(self, block_ids: Sequence[int]) -> None:
        """Adds an owner to each block; a free one is held again.

        Args:
            block_ids (`Sequence[int]`):
                The blocks.
        """
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self._free[block_id]
            self.ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int], cached: Container[int] = ()) -> None:
        """Takes an owner from each block; those without any become free.

        Args:
            block_ids (`Sequence[int]`):
                The blocks in the order of their tokens. The last is reused before the first: a prefix is of use
                without its continuation, a continuation is not without its prefix.
            cached (`Container[int]`, defaults to `()`):
                The blocks that carry a hash and so are reused last.
        """
        for block_id in reversed(block_ids):
            assert self.ref_counts[block_id] > 0, f"block {block_id} was freed more often than it was taken"
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self._free[block_id] = None
                if block_id not in cached:
                    self._free.move_to_end(block_id, last=False)
