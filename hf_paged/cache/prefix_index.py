"""Which block holds the K/V of which tokens: a full block is found again by its whole prefix. No torch.

A block's hash covers its tokens, everything before them and whatever else the K/V depend on:

    hash(block i) = blake2b(hash(block i - 1) | token ids of block i | extra keys)

The hash only finds a candidate. A hit is decided by comparing the tokens themselves, back to the first one, so that
no collision, by accident or on purpose, shows one request the K/V of another.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Sequence


def blake2b_16(data: bytes) -> bytes:
    """Returns the 16-byte BLAKE2b digest (RFC 7693) of some bytes.

    Args:
        data (`bytes`):
            What to hash.
    """
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclasses.dataclass(slots=True, eq=False)
class BlockHash:
    """The identity of a full block: its digest and all that went into it.

    Args:
        digest (`bytes`):
            Where to look it up.
        token_ids (`tuple[int, ...]`):
            The block's tokens.
        extra_keys (`tuple`):
            What else the K/V depend on.
        parent (`BlockHash`, *optional*):
            The block before it; None for the first.
    """

    digest: bytes
    token_ids: tuple[int, ...]
    extra_keys: tuple
    parent: BlockHash | None = dataclasses.field(repr=False)

    def same_prefix(self, other: BlockHash) -> bool:
        """Returns whether two blocks hold the same tokens after the same tokens.

        Args:
            other (`BlockHash`):
                The other block.
        """
        left: BlockHash | None = self
        right: BlockHash | None = other
        while left is not right:  # a hit makes both sides use the same parent, so this rarely goes back far
            if left is None or right is None:
                return False
            if left.token_ids != right.token_ids or left.extra_keys != right.extra_keys:
                return False
            left, right = left.parent, right.parent
        return True


def extend_block_hashes(
    block_hashes: list[BlockHash],
    token_ids: Sequence[int],
    block_size: int,
    num_blocks: int,
    extra_keys: tuple = (),
    hash_function: Callable[[bytes], bytes] = blake2b_16,
) -> None:
    """Appends the hashes of a request's further full blocks, in place.

    Args:
        block_hashes (`list[BlockHash]`):
            The hashes so far.
        token_ids (`Sequence[int]`):
            All tokens of the request.
        block_size (`int`):
            Tokens per block.
        num_blocks (`int`):
            How many hashes there shall be at least; only full blocks have one.
        extra_keys (`tuple`, defaults to `()`):
            What else the K/V depend on.
        hash_function (`Callable[[bytes], bytes]`, defaults to `blake2b_16`):
            Digest of bytes.
    """
    assert num_blocks * block_size <= len(token_ids), "only full blocks have a hash"
    for index in range(len(block_hashes), num_blocks):
        parent = block_hashes[-1] if block_hashes else None
        tokens = tuple(token_ids[index * block_size : (index + 1) * block_size])
        data = (parent.digest if parent else b"") + array("q", tokens).tobytes() + repr(extra_keys).encode()
        block_hashes.append(BlockHash(hash_function(data), tokens, extra_keys, parent))


class PrefixIndex:
    """Finds the full blocks of one layer group by content. One block per hash, one hash per block.

    `marks` says the same as `in` for all blocks at once, for whoever looks at the pool: a byte for each, 1 if it
    carries a hash. Blocks beyond its end carry none.
    """

    def __init__(self) -> None:
        self.marks = bytearray()
        self._block_ids: dict[bytes, int] = {}
        self._hashes: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_id: object) -> bool:
        """Whether a block carries a hash."""
        return block_id in self._hashes

    def items(self):
        """Returns the (block_id, `BlockHash`) pairs."""
        return self._hashes.items()

    def block_id(self, digest: bytes) -> int | None:
        """Returns the block registered under a digest, whatever its tokens are.

        Args:
            digest (`bytes`):
                The digest.
        """
        return self._block_ids.get(digest)

    def find(self, block_hashes: list[BlockHash]) -> list[int]:
        """Returns the blocks that hold the longest known beginning.

        Args:
            block_hashes (`list[BlockHash]`):
                The blocks looked for, from the first. Those found are replaced by the index's own equal objects,
                so that later comparisons end at the first step.
        """
        found: list[int] = []
        parent: BlockHash | None = None
        for index, wanted in enumerate(block_hashes):
            wanted.parent = parent
            block_id = self._block_ids.get(wanted.digest)
            if block_id is None or not self._hashes[block_id].same_prefix(wanted):
                break
            parent = block_hashes[index] = self._hashes[block_id]
            parent.parent = wanted.parent  # equal, and the one that later lookups bring along
            found.append(block_id)
        return found

    def register(self, block_hash: BlockHash, block_id: int) -> bool:
        """Makes a block findable. The first block of a hash stays; a block keeps its first hash.

        Args:
            block_hash (`BlockHash`):
                What the block holds, or will hold before anybody reads it.
            block_id (`int`):
                The block.

        Returns:
            `bool`: Whether it was registered.
        """
        if block_id in self._hashes or block_hash.digest in self._block_ids:
            return False
        self._block_ids[block_hash.digest] = block_id
        self._hashes[block_id] = block_hash
        if block_id >= len(self.marks):
            self.marks.extend(bytes(block_id + 1 - len(self.marks)))
        self.marks[block_id] = 1
        return True

    def forget(self, block_id: int) -> None:
        """Drops a block's hash, if it has one.

        Args:
            block_id (`int`):
                The block.
        """
        block_hash = self._hashes.pop(block_id, None)
        if block_hash is not None:
            del self._block_ids[block_hash.digest]
            self.marks[block_id] = 0

    def clear(self) -> None:
        """Drops all hashes."""
        self.marks = bytearray()
        self._block_ids.clear()
        self._hashes.clear()
