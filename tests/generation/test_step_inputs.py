"""What a step's inputs are: against a slow way to say the same, and padded."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hf_paged.generation.input_batch import TILE, InputBatch
from hf_paged.generation.staging import Staging
from hf_paged.generation.step import ScheduledRequest, SchedulerOutput
from hf_paged.generation.step_inputs import HostInputs
from hf_paged.kernels.metadata import PagedAttentionMetadata
from tests.generation.step_makers import BLOCK_SIZE, CPU, DECODING, MIXED, PROMPTS, Requests, untold


def check(requests: Requests, output: SchedulerOutput, host: HostInputs) -> None:
    """Every number of a call, request by request and token by token."""
    decoding = [s for s in output.scheduled if s.num_scheduled_tokens == 1]
    decoding.sort(key=lambda share: share.num_computed_tokens)
    placed = decoding + [s for s in output.scheduled if s.num_scheduled_tokens > 1]
    pairs = [
        (s.request_id, s.num_computed_tokens + i, row)
        for row, s in enumerate(placed)
        for i in range(s.num_scheduled_tokens)
    ]
    assert host.input_ids.tolist() == [requests.tokens[name][position] for name, position, _ in pairs]
    assert host.position_ids.tolist() == [position for _, position, _ in pairs]
    for group in range(requests.num_groups):
        slots = [
            requests.blocks[name][group][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for name, position, _ in pairs
        ]
        assert host.slot_mapping[group].tolist() == slots
        for share, row in zip(placed, host.block_tables[group].tolist(), strict=True):
            used = -(-(share.num_computed_tokens + share.num_scheduled_tokens) // BLOCK_SIZE)
            assert row[:used] == requests.blocks[share.request_id][group][:used]
    lengths = [s.num_scheduled_tokens for s in placed]
    assert host.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert host.query_lens_host.tolist() == lengths and host.num_decodes == len(decoding)
    contexts = [s.num_computed_tokens + s.num_scheduled_tokens for s in placed]
    assert host.seq_lens.tolist() == host.seq_lens_host.tolist() == contexts
    ends = {s.request_id: i + 1 for i, (_, _, row) in enumerate(pairs) for s in [placed[row]]}
    wanted = [ends[s.request_id] - 1 for s in output.scheduled if s.sample_ids]
    for share in placed:
        if share.prompt_logits:
            first = len(wanted)
            wanted += range(ends[share.request_id] - share.num_scheduled_tokens, ends[share.request_id])
            assert host.prompt_rows[share.request_id] == (first, len(wanted))
    assert host.logits_indices.tolist() == wanted
    assert set(host.prompt_rows) == {s.request_id for s in placed if s.prompt_logits}


@pytest.mark.parametrize("seed", range(25))
def test_every_number_of_a_call_is_where_it_belongs(seed):
    source = random.Random(seed)
    requests = Requests(source, num_groups=1 + seed % 3)
    for kind in [PROMPTS, *source.choices([DECODING, MIXED, PROMPTS], k=5)]:
        output = requests.step(kind, **({"prompt_logits": True} if seed % 2 else {}))
        host = requests.batch.build(output)
        check(requests, output, host)
        assert host.is_plain_decode == (host.num_decodes == len(output.scheduled) and not host.prompt_rows)


def test_tokens_that_the_host_was_not_told_come_from_the_step_before():
    requests = Requests(random.Random(3), max_requests=6)
    output = requests.step(PROMPTS)
    sampled = [share.request_id for share in output.scheduled if share.sample_ids]
    assert len(sampled) > 2
    chosen = torch.arange(100, 100 + len(sampled))
    requests.batch.keep(output, chosen)
    following = untold(output)
    requests.batch.apply(following)
    inputs = Staging(CPU).send(requests.batch.build(following))
    requests.batch.fill_in(inputs)
    contexts = {s.request_id: s.num_computed_tokens for s in following.scheduled}
    in_order = sorted((share.request_id for share in following.scheduled), key=contexts.__getitem__)
    assert inputs.input_ids[0].tolist() == [100 + sampled.index(name) for name in in_order]


def test_tables_are_on_the_host_too():
    requests = Requests(random.Random(0), num_groups=2)
    inputs = Staging(CPU).send(requests.batch.build(requests.step(PROMPTS)))
    for data in inputs.metadata:
        assert np.array_equal(data.block_tables_host, data.block_tables.numpy())
    assert PagedAttentionMetadata.build(np.zeros((1, 1)), np.ones(1), np.ones(1), 4).block_tables_host is None


def test_a_tile_says_where_its_tokens_lie():
    requests = Requests(random.Random(1), num_groups=2)
    output = requests.step(PROMPTS)
    share = output.scheduled[0]
    host = requests.batch.build_tile(share, 1, share.num_scheduled_tokens - 1)
    count = share.num_scheduled_tokens - 1
    assert host.token_rows.tolist() == list(range(1, 1 + count)) and len(host.input_ids) == TILE
    assert host.input_ids[1 : 1 + count].tolist() == requests.tokens[share.request_id][1 : 1 + count]
    assert host.seq_lens.tolist() == list(range(2, 2 + count)) and not host.is_plain_decode
    assert all(len(slots) == count for slots in host.slot_mapping)


# ---------------------------------------------------------------------- padding


def decoding_step(seed: int, num_groups: int = 2) -> HostInputs:
    requests = Requests(random.Random(seed), num_groups)
    requests.step(PROMPTS)
    output = requests.step(DECODING)
    count = len(output.scheduled)
    sampling = {"settings": np.full((count, 5), 0.5), "keys": np.full((count, 3), 7)}
    return requests.batch.build(output, sampling)


@pytest.mark.parametrize("seed", range(5))
def test_padding_adds_requests_without_context(seed):
    host = decoding_step(seed)
    count, size, width = host.num_requests, host.num_requests + seed, host.table_width + 3
    padded = host.padded(size, width)
    for name in ("input_ids", "position_ids", "seq_lens", "seq_lens_host", "logits_indices"):
        assert np.array_equal(getattr(padded, name)[:count], getattr(host, name))
        assert getattr(padded, name)[count:].tolist() == [0] * seed
        assert getattr(padded, name).dtype == getattr(host, name).dtype
    for mine, theirs in zip(padded.slot_mapping, host.slot_mapping, strict=True):
        assert mine.tolist() == [*theirs.tolist(), *[-1] * seed]
    for mine, theirs in zip(padded.block_tables, host.block_tables, strict=True):
        assert mine.shape == (size, width) and mine.dtype == np.int32
        assert np.array_equal(mine[:count, : width - 3], theirs) and mine.sum() == theirs.sum()
    assert padded.cu_seqlens_q.tolist() == list(range(size + 1))
    assert padded.query_lens_host.tolist() == [1] * size and padded.num_decodes == size
    assert padded.sampling["settings"][count:].tolist() == [[0, 1, 0, 1, 0]] * seed
    assert padded.sampling["keys"][count:].tolist() == [[0, 0, 0]] * seed
    assert (padded.sampling["settings"][:count] == 0.5).all() and (padded.sampling["keys"][:count] == 7).all()


def test_only_plain_decoding_is_padded():
    requests = Requests(random.Random(2))
    prompts = requests.step(PROMPTS)
    with pytest.raises(AssertionError, match="one plain token"):
        requests.batch.build(prompts).padded(8, 16)
    with pytest.raises(AssertionError, match="one plain token"):
        requests.batch.build_tile(prompts.scheduled[0], 0, 1).padded(8, 16)
    host = requests.batch.build(requests.step(DECODING, prompt_logits=True))
    assert host.prompt_rows
    with pytest.raises(AssertionError, match="one plain token"):
        host.padded(8, 16)
    host = requests.batch.build(requests.step(DECODING))
    for size in ((host.num_requests - 1, host.table_width), (host.num_requests, host.table_width - 1)):
        with pytest.raises(AssertionError, match="smaller"):
            host.padded(*size)


def test_a_blank_call_is_all_padding():
    blank = HostInputs.blank(4, 3, 2, BLOCK_SIZE)
    assert blank.num_requests == blank.num_decodes == 4 and blank.table_width == 3 and blank.is_plain_decode
    assert [slots.tolist() for slots in blank.slot_mapping] == [[-1] * 4] * 2
    alone = ScheduledRequest("r", 0, 1, (5,), ((1,), (2,)), is_new=True, sample_ids=("r",))
    requests = Requests(random.Random(0), num_groups=2)
    output = SchedulerOutput(0, (alone,))
    requests.batch.apply(output)
    host = requests.batch.build(output).padded(4, 3)
    shapes = [[(array.shape, array.dtype) for array in inputs.arrays()] for inputs in (blank, host)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("alike_keys", [None, 32])
def test_decoding_requests_stand_by_context_or_beside_those_that_begin_alike(alike_keys):
    batch = InputBatch(8, 96, 16, 1, alike_keys)
    contexts = {"a": 40, "b": 41, "c": 42, "d": 43, "short": 20}  # a and c begin alike, and so do b and d
    first = {"a": (5, 6), "b": (1, 2), "c": (5, 6), "d": (1, 2), "short": (3, 4)}
    shares = [
        ScheduledRequest(name, context, 1, (1,) * (context + 1), ((*first[name], 7),), is_new=True, sample_ids=(name,))
        for name, context in reversed(contexts.items())
    ]
    output = SchedulerOutput(0, tuple(shares))
    batch.apply(output)
    lengths = [contexts[name] + 1 for name in (["short", "b", "d", "a", "c"] if alike_keys else ["short", *"abcd"])]
    assert batch.build(output).seq_lens.tolist() == lengths
