"""Which blocks of a `BlockStore` hold the tokens of each row of one `PagedCache`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ConfigurationError
from .block_store import BlockStore


class BlockTables:
    """The rows of one cache, all of the same length, as lists of block ids. Frees its blocks when it dies.

    Args:
        store (`BlockStore`):
            The blocks.
        rows (`Sequence[Sequence[int]]`, defaults to `()`):
            Block ids of each row, which are counted as theirs already.
    """

    def __init__(self, store: BlockStore, rows: Sequence[Sequence[int]] = ()):
        self.store = store
        self.rows = [list(row) for row in rows]
        store.enter()
        self._forget()

    def __del__(self) -> None:
        self.store.leave(self.rows)

    def _forget(self) -> None:
        """Drops what was derived from the rows. Every change of them ends here."""
        self._reserved: tuple[int, int, int] | None = None
        self._derived: dict[tuple, torch.Tensor] = {}
        self._run: int | None = None
        if len(self.rows) == 1 and self.rows[0]:
            first = self.rows[0][0]
            if self.rows[0] == list(range(first, first + len(self.rows[0]))):
                self._run = first

    @property
    def first_of_run(self) -> int | None:
        """Returns the first block id of a single row whose ids are consecutive, else `None`."""
        return self._run

    def block_ids(self, count: int, device: torch.device) -> torch.Tensor:
        """Returns the first block ids of each row, int64 `[batch, count]`.

        Args:
            count (`int`):
                How many of each row.
            device (`torch.device`):
                Where to.
        """
        key = ("blocks", count, device)
        if key not in self._derived:
            with torch.inference_mode(False):  # autograd may keep it
                self._derived[key] = torch.tensor([row[:count] for row in self.rows], device=device)
        return self._derived[key]

    def slots(self, start: int, end: int, device: torch.device) -> torch.Tensor:
        """Returns where the tokens of some positions lie, int64 `[batch * positions]`.

        Args:
            start (`int`):
                First position.
            end (`int`):
                Position after the last.
            device (`torch.device`):
                Where to.
        """
        key = ("slots", start, end, device)
        if key not in self._derived:
            size = self.store.block_size
            with torch.inference_mode(False):
                slots = [row[i // size] * size + i % size for row in self.rows for i in range(start, end)]
                self._derived[key] = torch.tensor(slots, dtype=torch.long, device=device)
        return self._derived[key]

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
        if self._reserved == (batch, start, end):
            return  # another layer did
        if not self.rows:
            self.rows = [[] for _ in range(batch)]
        if len(self.rows) != batch:
            raise ConfigurationError(
                f"The cache holds {len(self.rows)} rows but was given keys of {batch}; use `batch_repeat_interleave` "
                "or `batch_select_indices` to change the number of rows."
            )
        size = self.store.block_size
        self._own(start // size, -(-end // size))
        missing = -(-end // size) - (len(self.rows[0]) if self.rows else 0)
        if missing > 0:
            taken = self.store.take(missing * batch)
            for number, row in enumerate(self.rows):
                row += taken[number * missing : (number + 1) * missing]
        self._forget()
        self._reserved = (batch, start, end)

    def _own(self, first: int, last: int) -> None:
        """Replaces shared blocks by copies. The copies are made before the blocks are given up: another cache that
        then holds one alone writes to it."""
        for row in self.rows:
            shared = set(self.store.shared(row[first:last]))
            if shared:
                copies = dict(zip(sorted(shared), self.store.take(len(shared)), strict=True))
                self.store.copy(list(copies.items()))
                row[first:last] = [copies.get(block_id, block_id) for block_id in row[first:last]]
                self.store.free(list(copies))

    def select(self, rows: Sequence[int]) -> None:
        """Makes row i refer to the blocks of what was row `rows[i]`.

        Args:
            rows (`Sequence[int]`):
                Old row numbers.
        """
        new = [list(self.rows[row]) for row in rows]
        for row in new:
            self.store.share(row)
        for row in self.rows:
            self.store.free(row)
        self.rows = new
        self._forget()

    def crop(self, length: int) -> None:
        """Gives up the blocks of the positions from `length` on.

        Args:
            length (`int`):
                Tokens to keep.
        """
        blocks = -(-length // self.store.block_size)
        for row in self.rows:
            self.store.free(row[blocks:])
            del row[blocks:]
        self._forget()

    def fork(self) -> BlockTables:
        """Returns tables of their own with the same rows, by reference."""
        for row in self.rows:
            self.store.share(row)
        self._forget()
        return BlockTables(self.store, self.rows)

    def compact(self) -> tuple[BlockStore, list[list[int]]]:
        """Returns a copy of the blocks in a store of their own, and the rows in it."""
        old = sorted({block_id for row in self.rows for block_id in row})
        numbers = {block_id: number for number, block_id in enumerate(old)}
        rows = [[numbers[block_id] for block_id in row] for row in self.rows]
        grad = torch.is_grad_enabled()
        layers = {}
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            for i, (keys, values) in list(self.store.layers.items()) if old else ():
                ids = torch.tensor([old], device=keys.device)
                layers[i] = (self.store.gather(keys, ids)[0], self.store.gather(values, ids)[0])
        return BlockStore.filled(self.store.block_size, layers, rows), rows

    def part(self) -> None:
        """Moves to a store of its own, if other caches have blocks in this one."""
        if self.store.is_shared:
            store, rows = self.compact()
            store.enter()
            self.store.leave(self.rows)
            self.store, self.rows = store, rows
            self._forget()
