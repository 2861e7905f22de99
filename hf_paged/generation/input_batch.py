"""Turns a step's decisions into the model's inputs, by updating persistent host buffers instead of rebuilding them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from .recording import TokenRange
from .step import ScheduledRequest, SchedulerOutput
from .step_inputs import HostInputs, ModelInputs

TILE = 16  # tokens in the row of a batch-invariant call


class InputBatch:
    """What the runner remembers of the requests it has been told about: one row of tokens and block ids each.

    Args:
        num_rows (`int`):
            Requests at most.
        max_model_len (`int`):
            Tokens of a request at most.
        block_size (`int`):
            Tokens per block.
        num_groups (`int`):
            Layer groups.
        alike_keys (`int`, *optional*):
            Decoding requests that begin with the same so many keys, in whole blocks, stand side by side; by default all
            stand by context.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, num_groups: int, alike_keys: int | None = None
    ):
        self.block_size = block_size
        self._alike_keys = alike_keys
        max_blocks = -(-max_model_len // block_size)
        # Rows are touched only as far as their requests reach, so untouched pages cost no memory.
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int64)
        self.block_tables = [np.zeros((num_rows, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._newest: torch.Tensor | None = None  # the tokens that the last step chose on the device
        self._places: dict[str, int] = {}  # of the requests in it

    def apply(self, output: SchedulerOutput) -> None:
        """Takes in what a step tells about its requests.

        Args:
            output (`SchedulerOutput`):
                The step.
        """
        for request_id in output.removed_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._free_rows.append(row)
        for share in output.scheduled:
            row = self._rows.get(share.request_id)
            if row is None:
                row = self._rows[share.request_id] = self._free_rows.pop()
            if share.is_new:
                self.num_tokens[row] = self.num_blocks[row] = 0
            self._append(row, share)

    def _append(self, row: int, share: ScheduledRequest) -> None:
        if share.new_token_ids:
            start = self.num_tokens[row]
            end = start + len(share.new_token_ids)
            self.token_ids[row, start:end] = share.new_token_ids
            self.num_tokens[row] = end
        if share.new_block_ids and share.new_block_ids[0]:
            start = self.num_blocks[row]
            end = start + len(share.new_block_ids[0])
            for table, block_ids in zip(self.block_tables, share.new_block_ids, strict=True):
                table[row, start:end] = block_ids
            self.num_blocks[row] = end

    def keep(self, output: SchedulerOutput, token_ids: torch.Tensor) -> None:
        """Keeps the tokens of a step for the next one, which may be told of them too late.

        Args:
            output (`SchedulerOutput`):
                The step.
            token_ids (`torch.Tensor`):
                int64, on the device: a token for each of its `sample_ids`.
        """
        sample_ids = [request_id for share in output.scheduled for request_id in share.sample_ids]
        self._places = {request_id: place for place, request_id in enumerate(sample_ids)}
        self._newest = token_ids

    def tables_of(self, request_id: str) -> list[list[int]]:
        """Returns the block ids of a request, one list per layer group.

        Args:
            request_id (`str`):
                A request that has not been forgotten yet.
        """
        row = self._rows[request_id]
        return [table[row, : self.num_blocks[row]].tolist() for table in self.block_tables]

    def build(self, output: SchedulerOutput, sampling: Mapping[str, np.ndarray] | None = None) -> HostInputs:
        """Builds the inputs of the call that a step makes.

        Args:
            output (`SchedulerOutput`):
                The step, already applied.
            sampling (`Mapping[str, np.ndarray]`, *optional*):
                What the sampler wants on the device (`Sampler.wanted`).
        """
        shares = output.scheduled
        # Decoding requests first, by context: a backend that computes similar lengths together finds them in a row.
        order = sorted(range(len(shares)), key=lambda i: self._place_of(shares[i]))
        placed = [shares[i] for i in order]
        facts = [(self._rows[s.request_id], s.num_computed_tokens, s.num_scheduled_tokens) for s in placed]
        rows, computed, lengths = np.array(list(zip(*facts, strict=True)), dtype=np.int64)
        num_decodes = sum(length == 1 for _, _, length in facts)
        if num_decodes == len(facts):  # most steps
            token_rows, positions = rows, computed
            cu_seqlens = np.arange(len(facts) + 1, dtype=np.int32)
        else:
            token_rows = np.repeat(rows, lengths)
            cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - computed, lengths)
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
        query_lens, seq_lens = lengths.astype(np.int32), (computed + lengths).astype(np.int32)
        num_blocks = -(-int(seq_lens.max()) // self.block_size)
        indices, prompt_rows = self._logits_rows(shares, order, starts, ends)
        untold = np.flatnonzero(computed + lengths > self.num_tokens[rows])
        return HostInputs(
            input_ids=self.token_ids[token_rows, positions],
            position_ids=positions,
            cu_seqlens_q=cu_seqlens,
            seq_lens=seq_lens,
            logits_indices=indices,
            block_tables=[table[rows, :num_blocks] for table in self.block_tables],
            slot_mapping=[self._slots(table, token_rows, positions) for table in self.block_tables],
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
            num_decodes=num_decodes,
            block_size=self.block_size,
            fill_in=self._untold(ends[untold] - 1, [placed[i].request_id for i in untold]) if len(untold) else None,
            sampling=sampling or {},
            prompt_rows=prompt_rows,
            ranges={
                share.request_id: TokenRange(place, int(starts[place]), int(ends[place]), share.num_computed_tokens)
                for place, share in enumerate(placed)
                if share.is_special
            },
        )

    def _place_of(self, share: ScheduledRequest) -> tuple[bool, int, int]:
        """What the requests of a call are sorted by."""
        if share.num_scheduled_tokens != 1:
            return True, 0, 0
        computed, keys = share.num_computed_tokens, self._alike_keys
        block = 0
        if keys is not None and computed >= keys:  # two chains of blocks that share this one share all before it
            block = int(self.block_tables[0][self._rows[share.request_id], keys // self.block_size - 1])
        return False, block, computed

    def build_tile(self, share: ScheduledRequest, start: int, count: int) -> HostInputs:
        """Builds the inputs of a call for some tokens of one request, in a row that is always `TILE` tokens wide.

        A token's place in the row is its position modulo `TILE`, whichever of its neighbours are computed in the same
        call, and attention sees every token as a request of its own: so its result depends on its context alone.

        Args:
            share (`ScheduledRequest`):
                Whose.
            start (`int`):
                Position of the first token.
            count (`int`):
                How many tokens, not reaching past the next multiple of `TILE`.
        """
        row, offset = self._rows[share.request_id], start % TILE
        assert offset + count <= TILE, "a tile ends at a multiple of its size"
        positions = np.arange(start, start + count)
        seq_lens = (positions + 1).astype(np.int32)
        num_blocks = -(-int(seq_lens[-1]) // self.block_size)
        input_ids = np.zeros(TILE, dtype=np.int64)
        input_ids[offset : offset + count] = self.token_ids[row, positions]
        limit = self.token_ids.shape[1] - 2
        return HostInputs(
            input_ids=input_ids,
            position_ids=np.minimum(np.arange(start - offset, start - offset + TILE), limit),
            cu_seqlens_q=np.arange(count + 1, dtype=np.int32),
            seq_lens=seq_lens,
            logits_indices=np.arange(TILE),
            block_tables=[np.repeat(table[row : row + 1, :num_blocks], count, axis=0) for table in self.block_tables],
            slot_mapping=[self._slots(table, row, positions) for table in self.block_tables],
            query_lens_host=np.ones(count, dtype=np.int32),
            seq_lens_host=seq_lens,
            num_decodes=count,
            block_size=self.block_size,
            token_rows=np.arange(offset, offset + count),
            ranges={share.request_id: TokenRange(0, offset, offset + count, start)} if share.is_special else {},
        )

    def _untold(self, places: np.ndarray, request_ids: list[str]) -> np.ndarray:
        """Which of the last step's tokens belong in some places of the row: those that nobody has told of."""
        sources = [self._places[request_id] for request_id in request_ids]
        return np.stack((places, np.array(sources))).astype(np.int64)

    def fill_in(self, inputs: ModelInputs) -> None:
        """Takes the tokens that nobody has told of from where the last step left them, on the device.

        Args:
            inputs (`ModelInputs`):
                Of what `build` returned last; changed.
        """
        if inputs.fill_in is None:
            return
        assert self._newest is not None, "only the step before can have chosen tokens that the host does not know"
        places, sources = inputs.fill_in
        inputs.input_ids[0].index_copy_(0, places, self._newest.index_select(0, sources))

    def _slots(self, table: np.ndarray, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Where the K/V of tokens lie, given the row of the table that each belongs to."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return table[rows, blocks].astype(np.int64) * self.block_size + offsets

    def _logits_rows(self, shares, order, starts, ends) -> tuple[np.ndarray, dict[str, tuple[int, int]]]:
        last_token = np.empty(len(shares), dtype=np.int64)
        last_token[order] = ends - 1
        indices = [last_token[[i for i, share in enumerate(shares) if share.sample_ids]]]
        prompt_rows: dict[str, tuple[int, int]] = {}
        count = len(indices[0])
        for place, i in enumerate(order):
            if shares[i].prompt_logits:
                indices.append(np.arange(starts[place], ends[place]))
                prompt_rows[shares[i].request_id] = (count, count + len(indices[-1]))
                count += len(indices[-1])
        return np.concatenate(indices), prompt_rows
