"""An attention backend for tests of graphs on a CPU, in plain torch: it reads everything on the device."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.kernels.base import Capabilities, PagedAttentionBackend
from hf_paged.kernels.metadata import PagedAttentionMetadata


class DeviceLengths(PagedAttentionBackend):
    """Looks at every key of every block of the table, and masks those that a token may not see."""

    name = "device_lengths"
    graph_safe = True
    capabilities = Capabilities(frozenset({"cpu"}), frozenset({torch.float32}), frozenset({"window"}))

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: PagedAttentionMetadata,
    ) -> None:
        num_blocks, _, block_size, _ = key_cache.shape
        num_slots, slots = num_blocks * block_size, metadata.slot_mapping
        # The last place is for tokens that go nowhere.
        tokens = slots.new_full((num_slots + 1,), -1)
        tokens.scatter_(0, torch.where(slots < 0, num_slots, slots), torch.arange(len(slots)))
        tokens = tokens[:-1].view(num_blocks, block_size)
        for new, cache in ((key, key_cache), (value, value_cache)):
            there = new.index_select(0, tokens.clamp(min=0).flatten())
            there = there.view(num_blocks, block_size, *new.shape[1:]).transpose(1, 2)
            cache.copy_(torch.where(tokens[:, None, :, None] >= 0, there, cache))

    def lengths(self, metadata: PagedAttentionMetadata) -> torch.Tensor:
        """Contexts of the requests."""
        return metadata.seq_lens

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: PagedAttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        ends, tokens = metadata.cu_seqlens_q[1:], torch.arange(len(query))
        requests = torch.searchsorted(ends, tokens, right=True)
        tables, lengths = metadata.block_tables[requests], self.lengths(metadata)[requests]
        group = query.shape[1] // key_cache.shape[1]
        keys, values = (
            cache[tables].transpose(1, 2).flatten(2, 3).repeat_interleave(group, 1)
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("thd,thkd->thk", query, keys) * scale
        behind = (lengths - (ends[requests] - tokens))[:, None] - torch.arange(keys.shape[2])
        seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        weights = torch.where(seen[:, None], scores, float("-inf")).softmax(-1)
        values = torch.where(seen[:, None, :, None], values, 0.0)
        return torch.einsum("thk,thkd->thd", weights.nan_to_num(0.0), values)


class HostLengths(DeviceLengths):
    """Claims what it does not keep: the lengths that a replay would see are those of the capture."""

    name = "host_lengths"

    def lengths(self, metadata: PagedAttentionMetadata) -> torch.Tensor:
        return torch.from_numpy(metadata.seq_lens_host)
