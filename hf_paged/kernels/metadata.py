"""What an attention kernel must know about a step: which tokens belong to whom, and where their K/V lie."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch


@dataclasses.dataclass(slots=True)
class PagedAttentionMetadata:
    """Lengths and block tables of the requests in one model call, for one layer group.

    The call's tokens lie in one flat row, request after request, decoding requests (one token) first:

        tokens        | r0 | r1 | r2 ............ | r3 ....... |
        cu_seqlens_q  0    1    2                 9            14
        seq_lens      17   33   7                 69               (context, this call's tokens included)

    The new tokens are the last `query_len` of their request's context, and their K/V are in the blocks before
    attention runs: query token `i` of a request sits at position `seq_len - query_len + i` and sees the keys at
    positions up to and including its own.

    Args:
        block_tables (`torch.Tensor`):
            int32 `[num_requests, max_blocks]`; entry `[r, j]` is the block that holds the positions
            `j * block_size ... (j + 1) * block_size - 1` of request r. Entries past a request's context are any
            valid block id; their contents must not reach the output.
        slot_mapping (`torch.Tensor`):
            int64 `[num_tokens]`: `block_id * block_size + offset` where each new token's K/V go.
        cu_seqlens_q (`torch.Tensor`):
            int32 `[num_requests + 1]`, running sum of the query lengths.
        seq_lens (`torch.Tensor`):
            int32 `[num_requests]`, context lengths including this call's tokens.
        query_lens_host (`numpy.ndarray`):
            int32 `[num_requests]` on the host.
        seq_lens_host (`numpy.ndarray`):
            int32 `[num_requests]` on the host.
        num_decodes (`int`):
            How many requests at the front have exactly one new token.
        block_size (`int`):
            Tokens per block.
        token_rows (`torch.Tensor`, *optional*):
            int64 `[num_tokens]`, where the new tokens lie in the model's row if that holds padding as well; by default
            they are all of it.
        block_tables_host (`numpy.ndarray`, *optional*):
            `block_tables` on the host, where whoever made the call has them there.
        prepared (`dict[str, Any]`):
            What a backend computed once for this step, under keys of its own (index tensors, masks, buckets).
            All layers of the step share it.
    """

    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    query_lens_host: np.ndarray
    seq_lens_host: np.ndarray
    num_decodes: int
    block_size: int
    token_rows: torch.Tensor | None = None
    block_tables_host: np.ndarray | None = None
    prepared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """Returns the number of requests in the call."""
        return len(self.query_lens_host)

    @property
    def num_tokens(self) -> int:
        """Returns the number of new tokens in the call."""
        return int(self.slot_mapping.shape[0])

    @classmethod
    def build(
        cls,
        block_tables: np.ndarray,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> PagedAttentionMetadata:
        """Builds the metadata of a call from host arrays (tests, benchmarks, the model runner).

        Args:
            block_tables (`numpy.ndarray`):
                int32 `[num_requests, max_blocks]`.
            query_lens (`numpy.ndarray`):
                int32 `[num_requests]`, new tokens of each request, at least 1, ones first.
            seq_lens (`numpy.ndarray`):
                int32 `[num_requests]`, context lengths including the new tokens.
            block_size (`int`):
                Tokens per block.
            device (`torch.device` or `str`, defaults to `"cpu"`):
                Where the tensors go.
        """
        query_lens = np.asarray(query_lens, dtype=np.int32)
        seq_lens = np.asarray(seq_lens, dtype=np.int32)
        cu_seqlens = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=cu_seqlens[1:])
        rows = np.repeat(np.arange(len(query_lens)), query_lens)
        positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - (seq_lens - query_lens), query_lens)
        slots = block_tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        decodes = np.nonzero(query_lens != 1)[0]
        return cls(
            block_tables=torch.from_numpy(np.ascontiguousarray(block_tables, dtype=np.int32)).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
            cu_seqlens_q=torch.from_numpy(cu_seqlens).to(device),
            seq_lens=torch.from_numpy(seq_lens).to(device),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
            num_decodes=int(decodes[0]) if len(decodes) else len(query_lens),
            block_size=block_size,
        )
