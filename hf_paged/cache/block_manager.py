"""Which blocks each request holds: prefix hits, new blocks, copy-on-write, and undoing a step. No torch.

    request's tokens   | prefix hit ........ | computed before | this step ..... |
    its block table    | b7 | b2 | b9 | b4 | b11 .... | b5 | b0 ....... |
                         full, maybe shared,   written in this step: held by
                         never written again   this request alone

A step changes tables through `allocate_slots`. What it changed is kept until the step is over and then either
committed or rolled back, block by block, so that a step that failed leaves no trace.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .block_pool import BlockPool
from .prefix_index import BlockHash, PrefixIndex, blake2b_16, extend_block_hashes

if TYPE_CHECKING:
    from ..generation.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks that already hold a request's beginning.

    Args:
        num_tokens (`int`):
            Tokens found; a multiple of the block size, and fewer than the request has.
        block_ids (`tuple[tuple[int, ...], ...]`):
            For each layer group the blocks, in token order.
        num_idle (`tuple[int, ...]`):
            For each layer group how many of them nobody holds: taking those uses up free blocks.
    """

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    num_idle: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class Allocation:
    """What a step changed in one request's blocks. Sequences are indexed by layer group.

    Args:
        num_blocks_before (`int`):
            Blocks that the request held before, in each group.
        new_block_ids (`Sequence[Sequence[int]]`):
            Blocks appended to its table.
        block_copies (`Sequence[tuple[int, int]]`):
            The (source, destination) pair of a copy-on-write; empty if there is none.
        cleared_blocks (`Sequence[int]`):
            The block that is written for the first time and not filled; empty if there is none.
        registered (`list[tuple[int, int]]`):
            (layer group, block_id) of the blocks that this step fills and that can be found from now on.
        num_adopted_tokens (`int`):
            Tokens in the first of the new blocks that others have computed.
        num_unnamed_blocks (`int`):
            1 if it fills a block whose last token is not known yet, so that its hash is not.
    """

    num_blocks_before: int = 0
    new_block_ids: Sequence[Sequence[int]] = ()
    block_copies: Sequence[tuple[int, int]] = ()
    cleared_blocks: Sequence[int] = ()
    registered: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    num_adopted_tokens: int = 0
    num_unnamed_blocks: int = 0


UNCHANGED = Allocation()  # what most decoding steps need: nothing


@dataclasses.dataclass(slots=True)
class _BlockTable:
    request: Request
    block_ids: list[list[int]]  # by layer group; all of the same length
    cacheable: bool = True  # False once the K/V in it are of other weights than those of now
    num_queried_tokens: int = 0  # what its admission added to the counters
    num_hit_tokens: int = 0
    allocation: Allocation | None = None  # the changes of the step in progress

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids[0])


class BlockManager:
    """Block tables of the live requests over one pool and one prefix index per layer group.

    Args:
        num_blocks_per_group (`Sequence[int]`):
            Blocks in the pool of each layer group.
        block_size (`int`):
            Tokens per block, the same in all groups; so a request holds the same number of blocks in each.
        enable_prefix_caching (`bool`, defaults to `True`):
            Whether blocks are found again by content.
        hash_function (`Callable[[bytes], bytes]`, defaults to `blake2b_16`):
            Digest of a block's identity.
    """

    def __init__(
        self,
        num_blocks_per_group: Sequence[int],
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_function: Callable[[bytes], bytes] = blake2b_16,
    ):
        self.block_size = block_size
        self.num_groups = len(num_blocks_per_group)
        self.enable_prefix_caching = enable_prefix_caching
        self.pools = [BlockPool(num_blocks) for num_blocks in num_blocks_per_group]
        self.indexes = [PrefixIndex() for _ in num_blocks_per_group]
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.weights_key: tuple = ()
        self._hash_function = hash_function
        self._tables: dict[str, _BlockTable] = {}
        self._unconfirmed: set[tuple[int, int]] = set()
        self._copy_sources: list[Counter[int]] = [Counter() for _ in num_blocks_per_group]

    # --- sizes -------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Returns the blocks of the smallest pool."""
        return min(pool.num_blocks for pool in self.pools)

    @property
    def num_free_blocks(self) -> int:
        """Returns the blocks that can be handed out now in every group."""
        return min(pool.num_free for pool in self.pools)

    @property
    def usable_tokens(self) -> int:
        """Returns how many tokens one request alone can store. No block is reserved."""
        return self.num_blocks * self.block_size

    def blocks_needed(self, num_tokens: int) -> int:
        """Returns the blocks that hold some number of tokens.

        Args:
            num_tokens (`int`):
                How many tokens.
        """
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, request: Request) -> int:
        """Returns the blocks in a request's table, in each group; 0 if it has none.

        Args:
            request (`Request`):
                Whose.
        """
        table = self._tables.get(request.request_id)
        return table.num_blocks if table else 0

    def block_table(self, request: Request) -> list[list[int]]:
        """Returns a request's blocks by layer group, in token order. Not to be changed.

        Args:
            request (`Request`):
                Whose; it holds blocks.
        """
        return self._tables[request.request_id].block_ids

    def num_owners(self, group: int, block_id: int) -> int:
        """Returns how many requests have a block in their tables.

        Args:
            group (`int`):
                The layer group.
            block_id (`int`):
                The block.
        """
        return self.pools[group].ref_counts[block_id] - self._copy_sources[group].get(block_id, 0)

    def tables(self) -> list[tuple[Request, list[list[int]]]]:
        """Returns whoever holds blocks, with its blocks by layer group, in token order. Not to be changed."""
        return [(table.request, table.block_ids) for table in list(self._tables.values())]

    # --- statistics --------------------------------------------------------------------------------------------

    @property
    def num_blocks_held(self) -> int:
        """Returns the blocks that live requests hold in one group, shared ones counted once."""
        return self.pools[0].num_used

    @property
    def num_tokens_stored(self) -> int:
        """Returns the tokens stored in the held blocks of one group, shared ones counted once."""
        filled: dict[int, int] = {}  # of the blocks that are not full
        for table in self._tables.values():
            first, here = divmod(table.request.num_computed_tokens, self.block_size)
            for block_id in table.block_ids[0][first:]:
                filled[block_id] = max(filled.get(block_id, 0), here)
                here = 0  # nothing is in the blocks after it
        return (self.num_blocks_held - len(filled)) * self.block_size + sum(filled.values())

    @property
    def waste(self) -> float:
        """Returns the share of the slots in held blocks that store nothing."""
        num_slots = self.num_blocks_held * self.block_size
        return 1 - self.num_tokens_stored / num_slots if num_slots else 0.0

    # --- admission ---------------------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> PrefixHit:
        """Looks for a request's beginning among the cached blocks. Changes nothing.

        Only full blocks count, and at least one token is left: its logits are needed.

        Args:
            request (`Request`):
                The request. One that needs more than the K/V of its whole prompt finds nothing.
        """
        if not self.enable_prefix_caching or request.skips_prefix_cache:
            return PrefixHit(0, ((),) * self.num_groups, (0,) * self.num_groups)
        num_blocks = (request.num_tokens - 1) // self.block_size
        hashes = self._block_hashes(request, num_blocks)[:num_blocks]
        found = [index.find(hashes) for index in self.indexes]
        request.block_hashes[:num_blocks] = hashes
        num_hits = min(len(block_ids) for block_ids in found)  # a hit counts if all groups have it
        return PrefixHit(
            num_tokens=num_hits * self.block_size,
            block_ids=tuple(tuple(block_ids[:num_hits]) for block_ids in found),
            num_idle=tuple(
                sum(pool.ref_counts[block_id] == 0 for block_id in block_ids[:num_hits])
                for pool, block_ids in zip(self.pools, found, strict=True)
            ),
        )

    def can_admit(self, request: Request, hit: PrefixHit, num_reserved: int = 0) -> bool:
        """Returns whether all tokens of a request would fit now.

        Args:
            request (`Request`):
                The request.
            hit (`PrefixHit`):
                What `find_prefix` found for it.
            num_reserved (`int`, defaults to 0):
                Free blocks that must remain.
        """
        num_blocks = self.blocks_needed(request.num_tokens) - hit.num_tokens // self.block_size + num_reserved
        return all(num_blocks + idle <= pool.num_free for pool, idle in zip(self.pools, hit.num_idle, strict=True))

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Gives a request a table that starts with the blocks found, and moves its `num_computed_tokens` there.

        Args:
            request (`Request`):
                The request; it has no table.
            hit (`PrefixHit`):
                What `find_prefix` found for it, with nothing allocated in between.
        """
        assert request.request_id not in self._tables, f"{request.request_id} holds blocks already"
        for pool, block_ids in zip(self.pools, hit.block_ids, strict=True):
            pool.touch(block_ids)
        table = _BlockTable(request, [list(block_ids) for block_ids in hit.block_ids])
        if request.metrics.num_preemptions == 0:  # finding one's own blocks again says nothing about the prompts
            table.num_queried_tokens, table.num_hit_tokens = request.num_tokens, hit.num_tokens
            self.num_queried_tokens += table.num_queried_tokens
            self.num_hit_tokens += table.num_hit_tokens
        self._tables[request.request_id] = table
        request.num_computed_tokens = hit.num_tokens

    def undo_admission(self, request: Request) -> None:
        """Frees a request's blocks and takes its admission out of the hit counters.

        Args:
            request (`Request`):
                A request that was admitted in a step that is being rolled back.
        """
        table = self._tables[request.request_id]
        self.num_queried_tokens -= table.num_queried_tokens
        self.num_hit_tokens -= table.num_hit_tokens
        self.free(request)

    # --- a step ------------------------------------------------------------------------------------------------

    def allocate_slots(self, request: Request, num_new_tokens: int) -> Allocation | None:
        """Makes room for a request's next tokens and registers the full blocks that they complete.

        May be called again in the same step with a larger number.

        Args:
            request (`Request`):
                An admitted request.
            num_new_tokens (`int`):
                Tokens computed in this step, from `num_computed_tokens` on.

        Returns:
            `Allocation`: All that the step has changed for this request so far, or None (and nothing changed) if
            blocks are missing.
        """
        table = self._tables[request.request_id]
        start = request.num_computed_tokens
        end = start + num_new_tokens
        first, last = start // self.block_size, end // self.block_size
        num_missing = max(0, self.blocks_needed(end) - table.num_blocks)
        # Only the first written block can be shared: the others hold nothing that anybody could have shared. And only
        # a sharer from before this step calls for a copy: one that came since wants what this step writes there.
        shared = table.allocation is None and start % self.block_size > 0
        copy = shared and self.num_owners(0, table.block_ids[0][first]) > 1
        clear = end % self.block_size > 0 and last * self.block_size >= start
        if not (num_missing or copy or clear or last > first):
            return table.allocation or UNCHANGED
        if any(num_missing + copy > pool.num_free for pool in self.pools):
            return None
        allocation = table.allocation = table.allocation or Allocation(table.num_blocks)
        if copy:
            allocation.block_copies = [self._copy_on_write(table, group, first) for group in range(self.num_groups)]
        for group, block_ids in enumerate(table.block_ids):
            block_ids.extend(self._take(group, num_missing))
        allocation.new_block_ids = [block_ids[allocation.num_blocks_before :] for block_ids in table.block_ids]
        allocation.cleared_blocks = [block_ids[last] for block_ids in table.block_ids] if clear else ()
        allocation.num_unnamed_blocks = max(0, last - len(request.token_ids) // self.block_size)
        self._register(table, allocation, first, last - allocation.num_unnamed_blocks)
        return allocation

    def adopt_prefix(self, request: Request) -> None:
        """Gives a request in the middle of its prompt the blocks that others have computed for it meanwhile.

        Prompts with the same beginning that run at the same time then compute it together instead of each.

        Args:
            request (`Request`):
                A running request; its `num_computed_tokens` moves past the blocks found.
        """
        table, start = self._tables[request.request_id], request.num_computed_tokens
        first = start // self.block_size
        if start % self.block_size or table.num_blocks != first or not table.cacheable or table.allocation is not None:
            return
        block_ids = [ids[first:] for ids in self.find_prefix(request).block_ids]
        num_tokens = len(block_ids[0]) * self.block_size
        if not num_tokens:
            return
        table.allocation = Allocation(first, num_adopted_tokens=num_tokens)
        for pool, ids, found in zip(self.pools, table.block_ids, block_ids, strict=True):
            pool.touch(found)
            ids.extend(found)
        table.allocation.new_block_ids = block_ids
        self._count_hits(table, num_tokens)
        request.num_computed_tokens += num_tokens

    def _count_hits(self, table: _BlockTable, num_tokens: int) -> None:
        table.num_hit_tokens += num_tokens
        self.num_hit_tokens += num_tokens

    def commit(self, request: Request) -> None:
        """The step has run: its changes to a request's blocks stay.

        Args:
            request (`Request`):
                A request of the step.
        """
        table = self._tables[request.request_id]
        if table.allocation is not None:
            self._register_unnamed(table, table.allocation)
            for group, (source, _) in enumerate(table.allocation.block_copies):
                self._copy_sources[group][source] -= 1
                self.pools[group].free([source], self.indexes[group])
            table.allocation = None

    def rollback(self, request: Request) -> None:
        """The step will not run, or did not succeed: undoes its changes to a request's blocks.

        Args:
            request (`Request`):
                A request of the step.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            return
        allocation, table.allocation = table.allocation, None
        if allocation is None:
            return
        for group, block_id in allocation.registered:
            self.indexes[group].forget(block_id)
        for group, block_ids in enumerate(table.block_ids):
            self.pools[group].free(block_ids[allocation.num_blocks_before :], self.indexes[group])
            del block_ids[allocation.num_blocks_before :]
        request.num_computed_tokens -= allocation.num_adopted_tokens
        self._count_hits(table, -allocation.num_adopted_tokens)
        for group, (source, destination) in enumerate(allocation.block_copies):
            block_ids = table.block_ids[group]
            block_ids[block_ids.index(destination)] = source
            self._copy_sources[group][source] -= 1
            self.pools[group].free([destination])

    def disown(self, allocation: Allocation) -> None:
        """A step that was committed has failed after all: nobody may find the blocks that it should have filled.

        Args:
            allocation (`Allocation`):
                What it had changed for a request. The request has to be ended.
        """
        for group, block_id in allocation.registered:
            self.indexes[group].forget(block_id)

    def fork(self, parent: Request, child: Request) -> None:
        """Gives a request all blocks of another, the partly filled one included. Who writes into that first copies it.

        Args:
            parent (`Request`):
                The request with blocks.
            child (`Request`):
                The request without; it has the same tokens.
        """
        assert child.request_id not in self._tables, f"{child.request_id} holds blocks already"
        table = self._tables[parent.request_id]
        for pool, block_ids in zip(self.pools, table.block_ids, strict=True):
            pool.touch(block_ids)
        copies = [list(block_ids) for block_ids in table.block_ids]
        self._tables[child.request_id] = _BlockTable(child, copies, table.cacheable)
        child.block_hashes = list(parent.block_hashes)

    def reassign(self, pairs: Sequence[tuple[Request, Request]]) -> None:
        """Gives requests the blocks that others of them hold, all at once: how beams move. Nothing is copied.

            before   a [4 1 7]   b [4 1 2]           reassign([(a, b)])
            after    a [4 1 2]   b [4 1 2]           block 7 is free; who writes into block 2 first copies it

        Args:
            pairs (`Sequence[tuple[Request, Request]]`):
                (request, whose blocks it gets); all hold blocks, and none takes part in a step.
        """
        tables = []
        for request, source in pairs:
            table = self._tables[source.request_id]
            assert table.allocation is None, f"{source.request_id} is part of a step"
            for pool, block_ids in zip(self.pools, table.block_ids, strict=True):
                pool.touch(block_ids)
            tables.append(_BlockTable(request, [list(block_ids) for block_ids in table.block_ids], table.cacheable))
        for request, _ in pairs:
            self.free(request)
        self._tables.update((table.request.request_id, table) for table in tables)

    def free(self, request: Request) -> None:
        """Takes a request's blocks away; those with a hash can be found until they are reused.

        Args:
            request (`Request`):
                The request; nothing happens if it holds none.
        """
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        assert table.allocation is None, f"{request.request_id} is part of a step; commit or roll back first"
        for pool, index, block_ids in zip(self.pools, self.indexes, table.block_ids, strict=True):
            pool.free(block_ids, index)

    # --- other weights -----------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """The model's weights have changed: forgets all blocks, and registers none of the requests running now."""
        for index in self.indexes:
            index.clear()
        self.switch_weights(self.weights_key)

    def switch_weights(self, key: tuple) -> None:
        """Other weights compute K/V from now on, and those of before may come back (an adapter).

        Blocks are only found under the key that they were computed under. What was registered since the last call of
        `confirm` is forgotten: nobody knows which weights computed it. Requests with blocks keep them and go on, but
        register none until they are admitted anew.

        Args:
            key (`tuple`):
                Stands for the weights of now.
        """
        for group, block_id in self._unconfirmed:
            self.indexes[group].forget(block_id)
        self._unconfirmed.clear()
        for table in self._tables.values():
            table.cacheable = False
        self.weights_key = key

    def confirm(self) -> None:
        """The weights are still those of the last call: what was registered since then is right."""
        self._unconfirmed.clear()

    # --- inside ------------------------------------------------------------------------------------------------

    def _take(self, group: int, num_blocks: int) -> list[int]:
        """Takes blocks to be written anew: what they held cannot be found any more."""
        block_ids = self.pools[group].allocate(num_blocks)
        for block_id in block_ids:
            self.indexes[group].forget(block_id)
        return block_ids

    def _copy_on_write(self, table: _BlockTable, group: int, index: int) -> tuple[int, int]:
        """Replaces a shared block by one of its own. Of several owners the last to write keeps the original.

        The source stays taken until the step is over: it must not be handed out, and so cleared, before it is copied.
        """
        source = table.block_ids[group][index]
        (destination,) = self._take(group, 1)
        table.block_ids[group][index] = destination
        self._copy_sources[group][source] += 1
        return source, destination

    def _register(self, table: _BlockTable, allocation: Allocation, first: int, last: int) -> None:
        if not (self.enable_prefix_caching and table.cacheable):
            return
        hashes = self._block_hashes(table.request, last)
        for group, block_ids in enumerate(table.block_ids):
            for index in range(first, last):
                if self.indexes[group].register(hashes[index], block_ids[index]):
                    allocation.registered.append((group, block_ids[index]))
                    self._unconfirmed.add((group, block_ids[index]))

    def _register_unnamed(self, table: _BlockTable, allocation: Allocation) -> None:
        """Registers a block that was filled up before its last token was known, if the request went on after that."""
        num_full = len(table.request.token_ids) // self.block_size
        if allocation.num_unnamed_blocks and not table.request.is_finished:
            self._register(table, allocation, num_full - allocation.num_unnamed_blocks, num_full)

    def _block_hashes(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """Returns the request's cached hashes, extended to at least some number of blocks."""
        hashes, keys = request.block_hashes, (*request.extra_keys, *self.weights_key)
        if hashes and hashes[0].extra_keys != keys:
            hashes.clear()  # they are from before the weights were switched
        if len(hashes) < num_blocks:
            extend_block_hashes(hashes, request.token_ids, self.block_size, num_blocks, keys, self._hash_function)
        return hashes
