"""What all layers of a step share in the plain torch backend: which rows to gather, and who may see what.

K/V are gathered before attention. A cache seen as `[num_blocks * num_kv_heads, block_size * head_dim]` yields, with
the right row numbers, the keys of several requests in one `index_select`, already in the layout that matrix products
want, and without a transpose:

    rows of request 0, head 0: block 7, block 2, block 9 | head 1: ... | rows of request 1, head 0: ...
    -> [requests, num_kv_heads, blocks * block_size, head_dim]
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from .metadata import PagedAttentionMetadata

# Requests whose contexts lie within this many tokens of each other, or within a quarter, are computed together.
SIMILAR_LENGTHS = 32
# Keys gathered at a time for decoding requests; larger ones leave the processor's caches before they are used.
MAX_GATHERED_KEYS = 4096
# No matrix of scores or mask is larger than this.
MAX_SCORE_BYTES = 64 * 2**20
# Rows of a prefill computed at a time; smaller slices skip more of the keys that lie in their future.
MAX_QUERY_ROWS = 512
# Masks larger than this are made again in every layer instead of being kept.
MAX_KEPT_MASK_BYTES = 16 * 2**20


@dataclasses.dataclass(slots=True)
class QuerySlice:
    """Queries that are computed in one call, over a range of the gathered keys.

    Args:
        tokens (`slice` or `torch.Tensor`):
            Where the queries lie in the call's flat row; request after request.
        query_positions (`torch.Tensor`):
            int64 `[num_requests, num_queries]`.
        key_positions (`torch.Tensor`):
            int64 `[num_requests, num_keys]`.
        keys (`slice`):
            The range of the gathered keys.
        window (`int`, *optional*):
            A token sees the last `window` positions.
        causal (`bool`):
            Whether query i sees exactly the keys 0 to i, so that no mask is needed.
    """

    tokens: slice | torch.Tensor
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    keys: slice
    window: int | None
    causal: bool
    _kept: dict[torch.dtype, torch.Tensor] = dataclasses.field(default_factory=dict)

    def distance(self) -> torch.Tensor:
        """Returns key position minus query position, int64 `[num_requests, 1, num_queries, num_keys]`."""
        return (self.key_positions[:, None, :] - self.query_positions[:, :, None]).unsqueeze(1)

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the additive mask, 0 or -inf, `[num_requests, 1, num_queries, num_keys]`.

        Args:
            dtype (`torch.dtype`):
                Dtype of the mask.
        """
        if dtype in self._kept:
            return self._kept[dtype]
        distance = self.distance()
        hidden = distance > 0
        if self.window is not None:
            hidden |= distance <= -self.window
        mask = torch.zeros(distance.shape, dtype=dtype, device=distance.device).masked_fill_(hidden, -math.inf)
        if mask.nbytes <= MAX_KEPT_MASK_BYTES:
            self._kept[dtype] = mask
        return mask


@dataclasses.dataclass(slots=True)
class Gathered:
    """Requests whose keys are gathered together, and the queries that look at them.

    Args:
        rows (`torch.Tensor`):
            int64 `[num_requests * num_kv_heads * num_blocks]`, rows of the cache in the order of the layout above.
        num_requests (`int`):
            How many requests.
        queries (`list[QuerySlice]`):
            One slice for decoding requests, one or more for a prefill.
    """

    rows: torch.Tensor
    num_requests: int
    queries: list[QuerySlice]


class PlanBuilder:
    """Builds the list of `Gathered` of a call.

    Args:
        metadata (`PagedAttentionMetadata`):
            Lengths and block tables.
        num_kv_heads (`int`):
            K/V heads of the cache.
        window (`int`, *optional*):
            A token sees the last `window` positions; blocks before them are not gathered.
        score_bytes (`int`):
            Bytes of scores or mask that one query takes for each key, over all heads.
        causal_without_mask (`bool`):
            Whether a prefill from position 0 may be left to the kernel's own causal mask.
    """

    def __init__(
        self,
        metadata: PagedAttentionMetadata,
        num_kv_heads: int,
        window: int | None,
        score_bytes: int,
        causal_without_mask: bool,
    ):
        self.metadata = metadata
        self.num_kv_heads = num_kv_heads
        self.window = window
        self.score_bytes = score_bytes
        self.causal_without_mask = causal_without_mask
        self.device = metadata.block_tables.device

    def build(self) -> list[Gathered]:
        """Returns the decoding requests in buckets of similar context, then the prefills one by one."""
        metadata = self.metadata
        plan = [self._decode(requests) for requests in self._buckets()]
        first_token = metadata.num_decodes
        for request in range(metadata.num_decodes, metadata.num_requests):
            plan.append(self._prefill(request, first_token))
            first_token += int(metadata.query_lens_host[request])
        return plan

    def _buckets(self) -> list[np.ndarray]:
        """Sorts the decoding requests by how much they see, and cuts where padding would cost too much."""
        seen = self.metadata.seq_lens_host[: self.metadata.num_decodes].astype(np.int64)
        if self.window is not None:
            seen = np.minimum(seen, self.window)
        order = np.argsort(-seen, kind="stable")
        buckets, start = [], 0
        while start < len(order):
            longest = int(seen[order[start]])
            shortest = min(longest - SIMILAR_LENGTHS, longest * 3 // 4)
            limit = start + max(1, MAX_GATHERED_KEYS // longest)
            end = start + 1
            while end < min(limit, len(order)) and seen[order[end]] >= shortest:
                end += 1
            buckets.append(np.sort(order[start:end]))
            start = end
        return buckets

    def _gather(self, requests: np.ndarray, first_positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows that hold everything from `first_positions` on, and the positions of the keys."""
        block_size = self.metadata.block_size
        first = first_positions // block_size
        last = (self.metadata.seq_lens_host[requests].astype(np.int64) - 1) // block_size
        num_blocks = int((last - first).max()) + 1
        # Columns past a request's context repeat its own last block: whatever is masked later is finite.
        columns = self._tensor(first[:, None] + np.arange(num_blocks))
        own = torch.minimum(columns, self._tensor(last)[:, None])
        blocks = self.metadata.block_tables[self._tensor(requests)].long().gather(1, own)
        heads = torch.arange(self.num_kv_heads, device=self.device)
        rows = blocks[:, None, :] * self.num_kv_heads + heads[None, :, None]
        positions = columns[:, :, None] * block_size + torch.arange(block_size, device=self.device)
        return rows.reshape(-1), positions.reshape(len(requests), -1)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _decode(self, requests: np.ndarray) -> Gathered:
        positions = self.metadata.seq_lens_host[requests].astype(np.int64) - 1
        first = np.zeros_like(positions) if self.window is None else np.maximum(positions - self.window + 1, 0)
        rows, key_positions = self._gather(requests, first)
        begin, end = int(requests[0]), int(requests[-1]) + 1
        queries = QuerySlice(
            # A decoding request's only token has its number; neighbours are a view instead of a copy.
            tokens=slice(begin, end) if end - begin == len(requests) else self._tensor(requests),
            query_positions=self._tensor(positions)[:, None],
            key_positions=key_positions,
            keys=slice(0, key_positions.shape[1]),
            window=self.window,
            causal=False,
        )
        return Gathered(rows, len(requests), [queries])

    def _prefill(self, request: int, first_token: int) -> Gathered:
        query_len = int(self.metadata.query_lens_host[request])
        seq_len = int(self.metadata.seq_lens_host[request])
        start = seq_len - query_len
        first = 0 if self.window is None else max(start - self.window + 1, 0)
        rows, key_positions = self._gather(np.array([request]), np.array([first]))
        base = first // self.metadata.block_size * self.metadata.block_size
        unmasked = self.causal_without_mask and start == 0 and (self.window is None or self.window >= seq_len)
        num_rows = query_len if unmasked else self._rows_at_a_time(seq_len - base)
        slices = []
        for begin in range(start, seq_len, num_rows):
            end = min(begin + num_rows, seq_len)
            seen_from = 0 if self.window is None else max(begin - self.window + 1 - base, 0)
            keys = slice(seen_from, end - base)
            slices.append(
                QuerySlice(
                    tokens=slice(first_token + begin - start, first_token + end - start),
                    query_positions=torch.arange(begin, end, device=self.device)[None],
                    key_positions=key_positions[:, keys],
                    keys=keys,
                    window=self.window,
                    causal=unmasked,
                )
            )
        return Gathered(rows, 1, slices)

    def _rows_at_a_time(self, num_keys: int) -> int:
        return max(1, min(MAX_QUERY_ROWS, MAX_SCORE_BYTES // (num_keys * self.score_bytes)))
