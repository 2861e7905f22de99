"""`gpu_memory_utilization` on an accelerator whose memory is counted: what is promised is kept, and what is used up."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
import torch

from hf_paged import AutoPagedModelForCausalLM, NotEnoughMemoryError, PagedConfig, SamplingParams, StepFailedError
from hf_paged.cache import memory
from hf_paged.cache.budget import GRAPH_SHARE
from hf_paged.generation import engine as engine_module
from hf_paged.generation import memory_probe
from tests.families import tiny_model
from tests.generation.fake_accelerator import on_accelerator

MIB = 1 << 20
VOCAB = 16384  # logits take more than activations
LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "attn_backend": "torch_sdpa"}
PARAMS = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1, logprobs=1, seed=3, max_tokens=4, ignore_eos=True
)


@pytest.fixture
def build(monkeypatch):
    """Makes an engine on an accelerator, where other programs have 3 MiB; the device and the engine."""
    # What native operators allocate for themselves is no operator's of torch.
    monkeypatch.setattr(engine_module, "native_layers", lambda *args: None)
    kept, contexts = [], []

    def make(total: int, **config):
        model = tiny_model("llama", vocab_size=VOCAB, tie_word_embeddings=True)
        context = on_accelerator(monkeypatch, total, others=3 * MIB)
        device = context.__enter__()
        contexts.append(context)
        device.count(*model.parameters(), *model.buffers())
        kept.append(AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(**LIMITS, **config)))
        return device, kept[-1].engine

    yield make
    for context in contexts:
        context.__exit__(None, None, None)


def busy(engine) -> None:
    """Steps of all kinds at the limits: prompts of all lengths, then every seat decoding."""
    source = random.Random(1)
    lengths = [8] * 32 + [300] + [source.randint(1, 60) for _ in range(16)]
    prompts = [[source.randrange(2, 4000) for _ in range(length)] for length in lengths]
    engine.generate(prompts, PARAMS)


@pytest.mark.parametrize(("share", "ahead"), [(0.7, False), (0.95, False), (0.95, True)])
def test_the_promise_is_kept_and_used_up_at_full_load(build, share, ahead, caplog):
    total = 20 * MIB
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        device, engine = build(total, gpu_memory_utilization=share, async_scheduling=ahead)
        assert device.used < share * total - engine.plan.pool_bytes, "the pool is made by the first request"
        busy(engine)
    used = device.others + device.max_memory_reserved()
    assert -0.02 < used / total - share < 0.002
    logits = 32 * VOCAB * 4
    assert engine.plan.memory.activations > 2 * logits
    (line,) = [record for record in caplog.records if "in use after the first step" in record.message]
    assert line.levelno == logging.INFO and device.others < engine.memory_watch.used < (share + 0.002) * total


def test_nothing_of_the_measurement_stays(build):
    device, engine = build(24 * MIB)
    plan = engine.plan.memory
    assert device.memory_reserved() == device.memory_allocated() == plan.used - device.others


def test_programs_that_come_later_are_told_of(build, caplog):
    device, engine = build(20 * MIB)
    device.others += 5 * MIB
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        engine.generate([[3, 4, 5]], PARAMS)
    (line,) = [record for record in caplog.records if "in use after the first step" in record.message]
    assert line.levelno == logging.WARNING and "other programs may have come" in line.message
    engine.release()
    assert device.memory_reserved() == device.memory_allocated() < engine.plan.memory.used
    device.others -= 5 * MIB
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        for _ in range(2):
            engine.generate([[3, 4, 5]], PARAMS)
    assert [record.levelno for record in caplog.records if "in use after" in record.message] == [logging.INFO]


def test_a_pool_that_has_no_room_any_more_says_how_much_is_missing(build):
    device, engine = build(24 * MIB)
    device.others += 10 * MIB
    with pytest.raises(StepFailedError) as caught:
        engine.generate([[3, 4, 5]], PARAMS)
    assert isinstance(caught.value.__cause__, NotEnoughMemoryError)
    assert "GiB do not fit" in str(caught.value.__cause__) and "are free on cpu now" in str(caught.value.__cause__)
    device.others -= 10 * MIB
    assert engine.generate([[3, 4, 5]], PARAMS)


def test_steps_that_do_not_fit_beside_the_weights_are_an_error_with_the_numbers(build):
    with pytest.raises(NotEnoughMemoryError) as caught:
        build(10 * MIB)
    message = str(caught.value)
    assert "A step of 256 tokens and 32 requests does not fit" in message and "max_num_batched_tokens" in message


def test_a_device_that_is_full_already_is_an_error_with_the_numbers(build):
    with pytest.raises(NotEnoughMemoryError, match=r"tokens of .* cannot be computed on cpu: \d+ MiB are free"):
        build(7 * MIB + MIB // 3)


def test_too_small_a_share_is_an_error_with_the_numbers(build):
    with pytest.raises(NotEnoughMemoryError, match=r"`gpu_memory_utilization` 0.2 of 0.02 GiB, less .* in use"):
        build(24 * MIB, gpu_memory_utilization=0.2)


def test_blocks_that_were_asked_for_are_checked_and_steps_measured(build):
    device, engine = build(24 * MIB, num_blocks=512)
    plan = engine.plan.memory
    assert plan.pool == engine.plan.pool_bytes and plan.activations > 0
    busy(engine)
    assert device.others + device.max_memory_reserved() < plan.limit + 0.002 * plan.total
    engine.close()
    assert device.memory_reserved() == device.memory_allocated() < plan.used


def test_more_blocks_than_fit_are_an_error_with_the_numbers(build):
    with pytest.raises(NotEnoughMemoryError, match="`num_blocks` is 100000, of"):
        build(24 * MIB, num_blocks=100_000)


def test_memory_is_set_aside_for_graphs_where_there_are_any(monkeypatch):
    monkeypatch.setattr(memory, "total_memory", lambda device: 1000 * MIB)

    def set_aside(device: str, **config) -> int:
        backend = SimpleNamespace(name="some", spec=SimpleNamespace(device_type=device), graph_safe=True)
        return memory_probe._graph_bytes(PagedConfig(**config), backend, torch.device(device))

    assert set_aside("cuda") == int(GRAPH_SHARE * 1000 * MIB) > 0
    assert set_aside("cuda", enforce_eager=True) == set_aside("cpu") == 0
