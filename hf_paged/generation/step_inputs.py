"""What a model call, and the choice of its tokens, need on the device: put together on the host, sent there at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from ..kernels.metadata import PagedAttentionMetadata
from .recording import TokenRange
from .sampling.choose import padded_sampling


@dataclasses.dataclass(slots=True)
class ModelInputs:
    """The inputs of one model call, where the model is.

    Args:
        input_ids (`torch.Tensor`):
            int64 `[1, num_tokens]`, request after request, decoding requests first.
        position_ids (`torch.Tensor`):
            int64 `[1, num_tokens]`.
        metadata (`tuple[PagedAttentionMetadata, ...]`):
            One per layer group.
        logits_indices (`torch.Tensor`):
            int64 `[num_rows]`, tokens of the call whose logits are needed: first the last token of every share that
            samples, in schedule order, then all tokens of the shares that want prompt logits.
        prompt_rows (`dict[str, tuple[int, int]]`):
            For each share that wants prompt logits the half-open range of its rows.
        ranges (`dict[str, TokenRange]`):
            For each share that wants or brings something special its tokens.
        sampling (`dict[str, torch.Tensor]`):
            What the sampler wanted on the device.
        extras (`dict[str, torch.Tensor]`):
            What others wanted on the device.
        fill_in (`torch.Tensor`, *optional*):
            int64 `[2, k]`: places in the row of tokens, and which of the tokens of the last step belong there.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    metadata: tuple[PagedAttentionMetadata, ...]
    logits_indices: torch.Tensor
    prompt_rows: dict[str, tuple[int, int]]
    ranges: dict[str, TokenRange] = dataclasses.field(default_factory=dict)
    sampling: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    extras: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    fill_in: torch.Tensor | None = None


@dataclasses.dataclass(slots=True)
class HostInputs:
    """The inputs of one model call as arrays on the host; `Staging.send` makes `ModelInputs` of them.

    Args:
        input_ids (`np.ndarray`):
            int64 `[num_tokens]`.
        position_ids (`np.ndarray`):
            int64 `[num_tokens]`.
        cu_seqlens_q (`np.ndarray`):
            int32 `[num_requests + 1]`.
        seq_lens (`np.ndarray`):
            int32 `[num_requests]`.
        logits_indices (`np.ndarray`):
            int64 `[num_rows]`.
        block_tables (`list[np.ndarray]`):
            For each layer group int32 `[num_requests, width]`.
        slot_mapping (`list[np.ndarray]`):
            For each layer group int64, one for each token that belongs to a request.
        query_lens_host (`np.ndarray`):
            int32 `[num_requests]`; not sent.
        seq_lens_host (`np.ndarray`):
            int32 `[num_requests]`, what backends plan by; not sent.
        num_decodes (`int`):
            How many requests at the front have exactly one new token.
        block_size (`int`):
            Tokens per block.
        fill_in (`np.ndarray`, *optional*):
            int64 `[2, k]`, as in `ModelInputs`.
        token_rows (`np.ndarray`, *optional*):
            int64, as in `PagedAttentionMetadata`.
        sampling (`Mapping[str, np.ndarray]`):
            What the sampler wants on the device, each with a row for every token that is chosen.
        extras (`Mapping[str, np.ndarray]`):
            What others want there for this step, of any shapes.
        prompt_rows (`dict[str, tuple[int, int]]`):
            As in `ModelInputs`.
        ranges (`dict[str, TokenRange]`):
            As in `ModelInputs`.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    logits_indices: np.ndarray
    block_tables: list[np.ndarray]
    slot_mapping: list[np.ndarray]
    query_lens_host: np.ndarray
    seq_lens_host: np.ndarray
    num_decodes: int
    block_size: int
    fill_in: np.ndarray | None = None
    token_rows: np.ndarray | None = None
    sampling: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    extras: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    prompt_rows: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    ranges: dict[str, TokenRange] = dataclasses.field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """Returns the number of requests in the call."""
        return len(self.query_lens_host)

    @property
    def table_width(self) -> int:
        """Returns the number of blocks in a row of the block tables."""
        return self.block_tables[0].shape[1]

    @property
    def is_plain_decode(self) -> bool:
        """Returns whether every request has one new token and wants nothing but the next one."""
        plain = not self.prompt_rows and not self.ranges and self.token_rows is None
        return plain and self.num_decodes == self.num_requests

    def arrays(self) -> list[np.ndarray]:
        """Returns what is sent, in its order: first what the model call reads, then what is read around it."""
        arrays = [
            self.input_ids[None],
            self.position_ids[None],
            self.cu_seqlens_q,
            self.seq_lens,
            self.logits_indices,
            *self.block_tables,
            *self.slot_mapping,
        ]
        if self.token_rows is not None:
            arrays.append(self.token_rows)
        arrays += self.sampling.values()
        arrays += self.extras.values()
        if self.fill_in is not None:
            arrays.append(self.fill_in)
        return arrays

    def received(self, tensors: Iterable[torch.Tensor]) -> ModelInputs:
        """Puts together what has arrived.

        Args:
            tensors (`Iterable[torch.Tensor]`):
                One for each of `arrays`.
        """
        left = iter(tensors)
        input_ids, position_ids, cu_seqlens_q, seq_lens, logits_indices = (next(left) for _ in range(5))
        tables = [next(left) for _ in self.block_tables]
        slots = [next(left) for _ in self.slot_mapping]
        token_rows = next(left) if self.token_rows is not None else None
        metadata = tuple(
            PagedAttentionMetadata(
                block_tables=table,
                slot_mapping=slot_mapping,
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=seq_lens,
                query_lens_host=self.query_lens_host,
                seq_lens_host=self.seq_lens_host,
                num_decodes=self.num_decodes,
                block_size=self.block_size,
                token_rows=token_rows,
                block_tables_host=table_host,
            )
            for table, slot_mapping, table_host in zip(tables, slots, self.block_tables, strict=True)
        )
        return ModelInputs(
            input_ids,
            position_ids,
            metadata,
            logits_indices,
            self.prompt_rows,
            self.ranges,
            {name: next(left) for name in self.sampling},
            {name: next(left) for name in self.extras},
            next(left) if self.fill_in is not None else None,
        )

    def padded(self, num_requests: int, table_width: int) -> HostInputs:
        """Returns a larger call that computes the same: further requests have no context and store nothing.

        What is sent has the same shapes whoever is in the call, but for `sampling` (nothing where no token is drawn),
        `extras` and `fill_in`, which come last.

        Args:
            num_requests (`int`):
                How many requests it has, at least as many as this one.
            table_width (`int`):
                Blocks in a row of its block tables, at least as many as in this one.

        Returns:
            `HostInputs`: With token 0 at position 0, slot -1 and context 0 for each further request; `logits_indices`
            goes on with 0, and `sampling` with rows that take the best token.
        """
        assert self.is_plain_decode, "only calls in which every request has one plain token are padded"
        more = num_requests - self.num_requests
        assert more >= 0 and table_width >= self.table_width, "a call does not get smaller by padding"
        assert len(self.logits_indices) <= num_requests, "a decoding request has one row of logits"
        seq_lens = _longer(self.seq_lens, num_requests)
        return dataclasses.replace(
            self,
            input_ids=_longer(self.input_ids, num_requests),
            position_ids=_longer(self.position_ids, num_requests),
            cu_seqlens_q=np.arange(num_requests + 1, dtype=np.int32),
            seq_lens=seq_lens,
            logits_indices=_longer(self.logits_indices, num_requests),
            block_tables=[_wider(table, num_requests, table_width) for table in self.block_tables],
            slot_mapping=[_longer(slots, num_requests, -1) for slots in self.slot_mapping],
            query_lens_host=np.ones(num_requests, dtype=np.int32),
            seq_lens_host=seq_lens,
            num_decodes=num_requests,
            sampling=padded_sampling(self.sampling, num_requests),
        )

    @classmethod
    def blank(cls, num_requests: int, table_width: int, num_groups: int, block_size: int) -> HostInputs:
        """Returns a padded call with nobody in it.

        Args:
            num_requests (`int`):
                How many requests it has.
            table_width (`int`):
                Blocks in a row of its block tables.
            num_groups (`int`):
                Layer groups.
            block_size (`int`):
                Tokens per block.
        """
        longs, ints = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
        tables, slots = [np.zeros((0, 0), dtype=np.int32)] * num_groups, [longs] * num_groups
        nobody = cls(longs, longs, ints, ints, longs, tables, slots, ints, ints, 0, block_size)
        return nobody.padded(num_requests, table_width)


def _longer(array: np.ndarray, length: int, value: int = 0) -> np.ndarray:
    result = np.full(length, value, dtype=array.dtype)
    result[: len(array)] = array
    return result


def _wider(table: np.ndarray, num_requests: int, width: int) -> np.ndarray:
    result = np.zeros((num_requests, width), dtype=table.dtype)
    result[: table.shape[0], : table.shape[1]] = table
    return result
