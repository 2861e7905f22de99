"""Which decoding requests of a call begin with the same blocks, so that these can be read once for all of them.

    requests       | r0  r1  r2  r3 | r4 | r5  r6 |      runs of neighbours; sharing is what a prefix hit leaves behind
    shared keys    |      1024      |  0 |  512   |      of their first blocks, before every one's new token

The keys of a run are visited by one launch, with all its tokens as rows; what each request has beyond them, by another;
their results are merged by log-sum-exp (Juravsky et al., arXiv 2402.05099).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ..metadata import PagedAttentionMetadata
from .configs import MIN_KEYS_PER_SPLIT

MIN_REQUESTS = 4
# Under this key a call's shared prefixes are kept in `PagedAttentionMetadata.prepared`.
PREPARED = "triton_shared_prefixes"


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """Runs of decoding requests and what each run shares.

    Args:
        cu_seqlens_q (`torch.Tensor`):
            int32 `[num_runs + 1]`: where runs begin and end, in tokens (a decoding request has one).
        lengths (`torch.Tensor`):
            int32 `[num_runs]`: keys that are shared, whole blocks; 0 for a run that shares nothing.
        block_tables (`torch.Tensor`):
            int32 `[num_runs, max_blocks]`: the table of a run's first request.
        starts (`torch.Tensor`):
            int32 `[num_decodes]`: the same lengths, by request.
        longest_run (`int`):
            Requests of the longest run.
        longest_prefix (`int`):
            Keys of the longest prefix.
        longest_rest (`int`):
            Keys of the longest context without what it shares.
    """

    cu_seqlens_q: torch.Tensor
    lengths: torch.Tensor
    block_tables: torch.Tensor
    starts: torch.Tensor
    longest_run: int
    longest_prefix: int
    longest_rest: int

    @classmethod
    def find(
        cls, block_tables_host: np.ndarray, seq_lens: np.ndarray, block_size: int, block_tables: torch.Tensor
    ) -> SharedPrefixes | None:
        """Looks for runs of neighbouring decoding requests that share at least a split's worth of keys.

        Nothing waits for the device; the runs go to it in one copy. Where no two neighbours have a block in common at
        the end of a split's worth of keys, this takes a few microseconds.

        Args:
            block_tables_host (`numpy.ndarray`):
                int32 `[num_decodes, max_blocks]` of the decoding requests.
            seq_lens (`numpy.ndarray`):
                int32 `[num_decodes]`, their contexts with the new token.
            block_size (`int`):
                Tokens per block.
            block_tables (`torch.Tensor`):
                The same tables, on the device.

        Returns:
            `None` if no run has `MIN_REQUESTS` requests.
        """
        if not _may_share(block_tables_host, block_size):
            return None
        runs = find_runs(block_tables_host, seq_lens, block_size)
        sizes = np.array([end - first for first, end, _ in runs], dtype=np.int32)
        lengths = np.array([length for _, _, length in runs], dtype=np.int32)
        if not lengths.any():
            return None
        firsts = np.array([first for first, _, _ in runs], dtype=np.int32)
        starts = np.repeat(lengths, sizes)
        packed = torch.from_numpy(np.concatenate([firsts, [len(starts)], lengths, starts]).astype(np.int32))
        if block_tables.is_cuda:
            packed = packed.pin_memory().to(block_tables.device, non_blocking=True)
        borders, lengths_there, starts_there = packed.split([len(runs) + 1, len(runs), len(starts)])
        return cls(
            cu_seqlens_q=borders,
            lengths=lengths_there,
            block_tables=block_tables.index_select(0, borders[:-1]),
            starts=starts_there,
            longest_run=int(sizes[lengths > 0].max()),
            longest_prefix=int(lengths.max()),
            longest_rest=int((seq_lens - starts).max()),
        )


def prepared_prefixes(metadata: PagedAttentionMetadata) -> SharedPrefixes | None:
    """Returns what the decoding requests of a call share, if the call has its block tables on the host.

    A call that is captured in a graph must share nothing, or its replays would take the same for shared; one with
    nobody in it does not, whose tables name one block all over.

    Args:
        metadata (`PagedAttentionMetadata`):
            The call's lengths and block tables.
    """
    tables, count = metadata.block_tables_host, metadata.num_decodes
    if tables is None or count < MIN_REQUESTS:
        return None
    return SharedPrefixes.find(
        tables[:count], metadata.seq_lens_host[:count], metadata.block_size, metadata.block_tables
    )


def keys_saved(block_tables: np.ndarray, seq_lens: np.ndarray, block_size: int) -> int:
    """Returns how many keys less are read when each run of requests reads what it shares once.

    Args:
        block_tables (`np.ndarray`):
            int32 `[num_decodes, max_blocks]`.
        seq_lens (`np.ndarray`):
            int32 `[num_decodes]`, contexts with the new token.
        block_size (`int`):
            Tokens per block.
    """
    if not _may_share(block_tables, block_size):
        return 0
    return sum((end - first - 1) * length for first, end, length in find_runs(block_tables, seq_lens, block_size))


def _may_share(block_tables: np.ndarray, block_size: int) -> bool:
    """Returns whether neighbours have the block in common that ends a split's worth of keys.

    A table that names a block twice there is none of a request (padding), or its keys have left the window.
    """
    last = MIN_KEYS_PER_SPLIT // block_size - 1
    if len(block_tables) < MIN_REQUESTS or block_tables.shape[1] <= last:
        return False
    column = block_tables[:, last]
    is_shared = column[1:] == column[:-1]
    if last > 0:
        is_shared &= column[1:] != block_tables[1:, 0]
    return int(np.count_nonzero(is_shared)) >= MIN_REQUESTS - 1


def find_runs(block_tables: np.ndarray, seq_lens: np.ndarray, block_size: int) -> list[tuple[int, int, int]]:
    """Returns runs of requests as (first, end, shared keys); together they are all requests.

    Args:
        block_tables (`numpy.ndarray`):
            int32 `[num_requests, max_blocks]`.
        seq_lens (`numpy.ndarray`):
            int32 `[num_requests]`, contexts with the new token, which is in no shared block.
        block_size (`int`):
            Tokens per block.
    """
    least = MIN_KEYS_PER_SPLIT // block_size
    full_blocks = np.maximum(np.asarray(seq_lens) - 1, 0) // block_size
    # How many leading blocks each request has in common with the one before it.
    differs = block_tables[1:] != block_tables[:-1]
    common = np.where(differs.any(1), differs.argmax(1), block_tables.shape[1])
    common = np.minimum(common, np.minimum(full_blocks[1:], full_blocks[:-1]))
    runs, first, shared = [], 0, 0
    for request in range(1, len(full_blocks) + 1):
        found = int(common[request - 1]) if request <= len(common) else 0
        # A run does not give up half of what it shares for one more member.
        if found >= max(least, -(-shared // 2)):
            shared = min(shared, found) if shared else found
            continue
        runs += _closed(first, request, shared * block_size)
        first, shared = request, 0
    return runs


def _closed(first: int, end: int, length: int) -> list[tuple[int, int, int]]:
    return [(first, end, length if end - first >= MIN_REQUESTS else 0)]
