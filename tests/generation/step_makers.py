"""Steps for a batch of inputs, as a scheduler would make them, and ways to the device that are watched."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_paged.generation.input_batch import InputBatch
from hf_paged.generation.staging import Staging
from hf_paged.generation.step import ScheduledRequest, SchedulerOutput
from hf_paged.generation.step_inputs import ModelInputs

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_LEN = 64
DECODING, MIXED, PROMPTS = "decoding", "mixed", "prompts"


class Requests:
    """Requests that take steps of some kind; each has its own tokens and blocks, in every layer group."""

    def __init__(self, source: random.Random, num_groups: int = 1, max_requests: int = 6):
        self.source, self.num_groups = source, num_groups
        self.batch = InputBatch(max_requests, MAX_LEN, BLOCK_SIZE, num_groups)
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[list[int]]] = {}
        self.computed: dict[str, int] = {}
        free = [source.sample(range(1000), 400) for _ in range(num_groups)]
        for place in range(source.randint(1, max_requests)):
            name = f"r{place}"
            self.tokens[name] = [source.randrange(1000) for _ in range(MAX_LEN)]
            self.blocks[name] = [[ids.pop() for _ in range(MAX_LEN // BLOCK_SIZE)] for ids in free]
            self.computed[name] = 0
        self._told: set[str] = set()

    def step(self, kind: str, **fields: Any) -> SchedulerOutput:
        """The next step, applied; `fields` go to some of the shares."""
        shares = []
        for name, tokens in self.tokens.items():
            computed = self.computed[name]
            decodes = kind == DECODING or (kind == MIXED and self.source.random() < 0.5)
            count = 1 if decodes else self.source.randint(2, 9)
            shares.append(
                ScheduledRequest(
                    name,
                    computed,
                    count,
                    tuple(tokens[0 if name not in self._told else computed : computed + count]),
                    self._new_blocks(name, computed, count),
                    is_new=name not in self._told,
                    sample_ids=(name,) if self.source.random() < 0.8 or kind == DECODING else (),
                    **(fields if self.source.random() < 0.7 else {}),
                )
            )
            self._told.add(name)
            self.computed[name] = computed + count
        self.source.shuffle(shares)
        output = SchedulerOutput(0, tuple(shares))
        self.batch.apply(output)
        return output

    def _new_blocks(self, name: str, computed: int, count: int) -> tuple[tuple[int, ...], ...]:
        start, end = -(-computed // BLOCK_SIZE), -(-(computed + count) // BLOCK_SIZE)
        return tuple(tuple(ids[start:end]) for ids in self.blocks[name])


def untold(output: SchedulerOutput) -> SchedulerOutput:
    """The step of the same requests in which each computes one token that the host has not been told."""
    return SchedulerOutput(
        1,
        tuple(
            ScheduledRequest(
                share.request_id,
                share.num_computed_tokens + share.num_scheduled_tokens,
                1,
                new_block_ids=(),
                sample_ids=(share.request_id,),
            )
            for share in reversed(output.scheduled)
            if share.sample_ids
        ),
    )


def tensors_of(inputs: ModelInputs) -> list[torch.Tensor]:
    """All tensors of a call's inputs."""
    found = [inputs.input_ids, inputs.position_ids, inputs.logits_indices]
    for data in inputs.metadata:
        found += [data.block_tables, data.slot_mapping, data.cu_seqlens_q, data.seq_lens]
        found += [] if data.token_rows is None else [data.token_rows]
    found += [*inputs.sampling.values(), *inputs.extras.values()]
    return found + ([] if inputs.fill_in is None else [inputs.fill_in])


def assert_same_inputs(mine: ModelInputs, theirs: ModelInputs) -> None:
    """Two ways to the device brought the same."""
    for one, other in zip(tensors_of(mine), tensors_of(theirs), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert (mine.prompt_rows, mine.ranges) == (theirs.prompt_rows, theirs.ranges)
    assert list(mine.sampling) == list(theirs.sampling) and list(mine.extras) == list(theirs.extras)
    for one, other in zip(mine.metadata, theirs.metadata, strict=True):
        for name in ("query_lens_host", "seq_lens_host", "block_tables_host"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert (one.num_decodes, one.block_size) == (other.num_decodes, other.block_size)


class CountingStaging(Staging):
    """A way to a device that is the CPU, by copies that are counted."""

    def __init__(self, device: torch.device = CPU, copies: bool = True):
        super().__init__(device, copies)
        self.num_copies = 0

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self.num_copies += 1
        return super()._copy(target, source)


class Stream:
    """Work of a device that is done in order, but not before somebody waits for it."""

    def __init__(self) -> None:
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self.num_waits = 0

    def submit(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def finish(self) -> None:
        while self._work:
            self._work.popleft()()


class LateStaging(Staging):
    """A way to a device that is far behind the host: copies are done by its stream."""

    def __init__(self, stream: Stream, waits: bool = True):
        super().__init__(CPU, copies=True)
        self.stream, self.waits = stream, waits

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self.stream.submit(lambda: target.copy_(source))
        is_done = []
        self.stream.submit(lambda: is_done.append(True))
        return _Event(self.stream, is_done, self.waits)


class _Event:
    def __init__(self, stream: Stream, is_done: list[bool], waits: bool):
        self._stream, self._is_done, self._waits = stream, is_done, waits

    def synchronize(self) -> None:
        if self._waits and not self._is_done:
            self._stream.num_waits += 1
            while not self._is_done:
                self._stream._work.popleft()()
