"""A step's inputs reach the device in one copy, unharmed, and lie where those of the step before lay."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hf_paged import SamplingParams
from hf_paged.generation import model_runner
from hf_paged.generation.async_steps import DEPTH
from hf_paged.generation.staging import ALIGNMENT, NUM_BUFFERS, Staging
from hf_paged.generation.step_inputs import HostInputs
from tests.conftest import random_prompts
from tests.generation.fake_device import FakeEngine, answers
from tests.generation.step_makers import (
    BLOCK_SIZE,
    CPU,
    DECODING,
    MAX_LEN,
    MIXED,
    PROMPTS,
    CountingStaging,
    LateStaging,
    Requests,
    Stream,
    assert_same_inputs,
    tensors_of,
    untold,
)
from tests.generation.test_async_steps import assert_same, random_limits, random_wishes
from tests.generation.test_async_steps import play as run_schedule
from tests.paged_models import assert_idle, paged

KINDS = (PROMPTS, MIXED, DECODING)


def sampling_for(num_rows: int) -> dict[str, np.ndarray]:
    return {"settings": np.random.default_rng(0).random((num_rows, 5)), "keys": np.arange(3 * num_rows).reshape(-1, 3)}


def some_inputs(seed: int) -> list[HostInputs]:
    """Calls of all kinds: prompts, decoding, both; some with prompt logits, draws or untold tokens; a tile."""
    source = random.Random(seed)
    requests = Requests(source, num_groups=1 + seed % 3)
    calls = []
    for kind in [PROMPTS, *source.choices(KINDS, k=4)]:
        output = requests.step(kind, prompt_logits=source.random() < 0.3)
        num_sampled = sum(len(share.sample_ids) for share in output.scheduled)
        calls.append(requests.batch.build(output, sampling_for(num_sampled) if source.random() < 0.5 else None))
    share = output.scheduled[0]
    start, count = share.num_computed_tokens, min(share.num_scheduled_tokens, 16 - share.num_computed_tokens % 16)
    calls.append(requests.batch.build_tile(share, start, count))
    following = untold(output)
    if following.scheduled:
        requests.batch.apply(following)
        requests.batch.keep(output, torch.arange(100, 150))
        calls.append(requests.batch.build(following, sampling_for(len(following.scheduled))))
        assert calls[-1].fill_in is not None
    calls[0].extras = {"blocks": np.arange(5), "none": np.zeros((2, 0), dtype=np.int64)}
    return calls


@pytest.mark.parametrize("seed", range(20))
def test_one_copy_brings_everything(seed):
    staging, plain = CountingStaging(), Staging(CPU)
    for number, host in enumerate(some_inputs(seed), 1):
        assert_same_inputs(staging.send(host), plain.send(host))
        assert staging.num_copies == number


def test_on_a_cpu_nothing_is_copied():
    for host in some_inputs(1):
        inputs = Staging(CPU).send(host)
        for tensor, array in zip(
            (inputs.input_ids, inputs.position_ids), (host.input_ids, host.position_ids), strict=True
        ):
            assert np.shares_memory(tensor.numpy(), array)
        for data, table in zip(inputs.metadata, host.block_tables, strict=True):
            assert np.shares_memory(data.block_tables.numpy(), table)
    assert Staging(CPU).num_bytes == 0


@pytest.mark.parametrize("seed", range(5))
def test_arrays_are_aligned_and_apart(seed):
    staging = CountingStaging()
    for host in some_inputs(seed):
        places = sorted(
            (tensor.data_ptr(), tensor.nbytes) for tensor in set(tensors_of(staging.send(host))) if tensor.numel()
        )
        assert all(address % ALIGNMENT == 0 for address, _ in places)
        assert all(one + size <= other for (one, size), (other, _) in zip(places, places[1:], strict=False))
        assert places[-1][0] + places[-1][1] - places[0][0] <= Staging.room(host)


@pytest.mark.parametrize("seed", range(10))
def test_room_is_bounded_by_the_limits(seed):
    most = Staging.most_room(6 * 16, 6, MAX_LEN // BLOCK_SIZE, 1 + seed % 3)
    sizes = [Staging.room(host) - 3 * ALIGNMENT for host in some_inputs(seed)]  # less what "extras" of the first take
    assert max(sizes) <= most


def test_memory_persists_and_grows_when_it_must():
    staging = CountingStaging()
    small, large = HostInputs.blank(2, 4, 1, BLOCK_SIZE), HostInputs.blank(64, 1000, 2, BLOCK_SIZE)
    first = staging.send(small).input_ids
    assert staging.send(HostInputs.blank(9, 4, 1, BLOCK_SIZE)).input_ids.data_ptr() == first.data_ptr()
    before = staging.num_bytes
    grown = staging.send(large)
    assert staging.num_bytes >= Staging.room(large) > before
    assert_same_inputs(grown, Staging(CPU).send(large))
    assert staging.send(small).input_ids.data_ptr() == grown.input_ids.data_ptr()


def test_padded_steps_lie_in_the_same_places_of_given_memory():
    staging = CountingStaging()
    memory = torch.zeros(Staging.most_room(8, 8, 16, 2), dtype=torch.uint8)
    addresses = set()
    for seed in range(10):
        requests = Requests(random.Random(seed), num_groups=2)
        requests.step(PROMPTS)
        output = requests.step(DECODING)
        num_sampled = len(output.scheduled)
        host = requests.batch.build(output, sampling_for(num_sampled) if seed % 2 else None)
        padded = host.padded(8, 16)
        inputs = staging.send(padded, memory)
        assert_same_inputs(inputs, Staging(CPU).send(padded))
        read = [inputs.input_ids, inputs.position_ids, inputs.logits_indices]
        read += [t for m in inputs.metadata for t in (m.block_tables, m.slot_mapping, m.cu_seqlens_q, m.seq_lens)]
        addresses.add(tuple(tensor.data_ptr() for tensor in read))
        assert min(addresses)[0] == memory.data_ptr()
    assert len(addresses) == 1
    with pytest.raises(AssertionError, match="bytes"):
        staging.send(HostInputs.blank(8, 16, 2, BLOCK_SIZE), memory[:64])
    here = Staging(CPU).send(HostInputs.blank(8, 16, 2, BLOCK_SIZE), memory)  # copied though the device is the CPU
    assert here.input_ids.data_ptr() == memory.data_ptr()


# ---------------------------------------------------------------------- a device that is behind


def play(waits: bool) -> tuple[bool, int]:
    """Sends calls to a device that does nothing before it must; returns whether it saw all as they were, and waits."""
    stream = Stream()
    staging, seen = LateStaging(stream, waits), []
    hosts = [host for seed in range(6) for host in some_inputs(seed)]
    for host in hosts:
        inputs = staging.send(host)
        stream.submit(lambda inputs=inputs: seen.append([tensor.clone() for tensor in tensors_of(inputs)]))
    stream.finish()
    expected = [tensors_of(Staging(CPU).send(host)) for host in hosts]
    same = [
        torch.equal(a, b)
        for mine, theirs in zip(seen, expected, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return all(same), stream.num_waits


def test_memory_of_the_host_is_written_again_only_when_it_has_been_copied():
    right, waits = play(waits=True)
    assert right and waits > 0
    right, _ = play(waits=False)
    assert not right, "without waiting it would be wrong, so this test can fail"


def test_a_pipeline_of_steps_never_waits_for_its_buffers():
    assert NUM_BUFFERS == DEPTH + 1
    stream = Stream()
    staging, hosts = LateStaging(stream), some_inputs(0)
    for number, host in enumerate(hosts):
        staging.send(host)
        if number >= DEPTH - 1:  # the oldest of the steps on the device is read before another is sent
            for _ in range(2):
                stream._work.popleft()()
    assert stream.num_waits == 0


def test_what_persists_is_written_to_in_any_mode():
    staging, host = CountingStaging(), HostInputs.blank(3, 4, 1, BLOCK_SIZE)
    for is_inference in (True, False, True):
        with torch.inference_mode(is_inference):
            inputs = staging.send(host)
            assert inputs.input_ids.tolist() == [[0, 0, 0]]
            inputs.input_ids[0].index_copy_(0, torch.tensor([1]), torch.tensor([7]))
            assert inputs.input_ids.tolist() == [[0, 7, 0]]


# ---------------------------------------------------------------------- whole engines


@pytest.fixture
def watched(monkeypatch):
    """The ways that engines made in the test send inputs, all of which copy; and the runners' calls."""
    made: list[CountingStaging] = []

    def make(device: torch.device) -> CountingStaging:
        made.append(CountingStaging(device))
        return made[-1]

    monkeypatch.setattr(model_runner, "Staging", make)
    return made


PROMPT_IDS = random_prompts(5, 199, seed=8)
WISHES = {
    "greedy": {"temperature": 0},
    "drawn, in branches": {"temperature": 1.0, "seed": 3, "top_k": 20, "n": 3},
    "prompt logits": {"temperature": 0, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("wish", WISHES)
def test_an_engine_sends_once_a_step_and_says_the_same(wish, watched, monkeypatch):
    settings = {"block_size": 8, "num_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 40}
    params = [SamplingParams(max_tokens=4 + 2 * place, **WISHES[wish]) for place in range(len(PROMPT_IDS))]
    ahead = paged(async_scheduling=True, **settings)
    launches, launch = [], model_runner.ModelRunner.launch
    monkeypatch.setattr(
        model_runner.ModelRunner, "launch", lambda self, *args: (launches.append(self), launch(self, *args))[1]
    )
    got = ahead.engine.generate(PROMPT_IDS, params)
    runner = ahead.engine._loop.runner
    assert runner.staging in watched and runner.staging.num_copies == launches.count(runner) > 8
    monkeypatch.undo()
    plain = paged(**settings)
    for mine, theirs in zip(got, plain.engine.generate(PROMPT_IDS, params), strict=True):
        assert [a.token_ids for a in mine.outputs] == [a.token_ids for a in theirs.outputs]
    assert_idle(ahead.engine)


def test_steps_of_tiles_send_once_a_call(watched, monkeypatch):
    model = paged(block_size=8, num_blocks=60, batch_invariant=True)
    calls, call = [], model_runner.ModelRunner._call
    monkeypatch.setattr(
        model_runner.ModelRunner, "_call", lambda self, *args: (calls.append(self), call(self, *args))[1]
    )
    model.engine.generate(PROMPT_IDS[:2], SamplingParams(temperature=0, max_tokens=4))
    runner = model.engine._loop.runner
    assert runner.staging in watched and runner.staging.num_copies == calls.count(runner) > 8


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_end_as_without_copies(seed):
    source = random.Random(1000 + seed)
    limits, wishes = random_limits(source), random_wishes(source)
    for wish in wishes:
        wish.abort_at = None
    plain, ahead = FakeEngine(ahead=False, **limits), FakeEngine(ahead=True, **limits)
    ahead.device.staging = CountingStaging()
    for wish, theirs, mine in zip(wishes, run_schedule(plain, wishes), run_schedule(ahead, wishes), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_same(wish, answers(mine), answers(theirs))
    assert ahead.device.staging.num_copies == ahead.device.num_launched
    ahead.check_idle()
