"""`sleep` frees an accelerator and `wake_up` brings everything back: the same parameters, the same texts."""

from __future__ import annotations

import contextlib
import logging
import threading
from types import SimpleNamespace

import pytest
import torch

from hf_paged import (
    LLM,
    AutoPagedModelForCausalLM,
    EngineClosedError,
    NotEnoughMemoryError,
    NotSupportedError,
    PagedConfig,
    SamplingParams,
)
from hf_paged.cache import memory
from hf_paged.generation.sleeping_weights import SleepingWeights
from tests.conftest import random_prompts
from tests.families import greedy, tiny_model
from tests.generation.fake_accelerator import on_accelerator
from tests.paged_models import assert_idle, paged

MIB = 1 << 20
PROMPTS = random_prompts(6, 199, seed=4)
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def texts(engine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def expected():
    return greedy(tiny_model("llama"), PROMPTS, 6)


@pytest.fixture
def device(monkeypatch):
    tiny_model("llama")  # a template of its is kept, which would be the device's
    with on_accelerator(monkeypatch, 64 * MIB) as device:
        yield device


@pytest.fixture
def model(device):
    """On the accelerator, with weights that are tied, and others that are views of one tensor."""
    model = tiny_model("llama", tie_word_embeddings=True)
    attention = model.model.layers[0].self_attn
    projections = [getattr(attention, f"{name}_proj").weight for name in "qkv"]
    whole = torch.cat([parameter.data for parameter in projections])
    for parameter, part in zip(projections, whole.split([len(parameter) for parameter in projections]), strict=True):
        parameter.data = part
    device.count(*model.parameters(), *model.buffers())
    config = PagedConfig(num_blocks=300, max_num_seqs=4, max_num_batched_tokens=32)
    return AutoPagedModelForCausalLM.from_model(model, paged_config=config)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_device_is_empty_meanwhile_and_all_comes_back(device, ahead):
    template = tiny_model("llama", tie_word_embeddings=True)
    with torch.no_grad():
        before = [tensor.clone() for tensor in template.parameters()]
    model = AutoPagedModelForCausalLM.from_model(
        template, paged_config=PagedConfig(num_blocks=300, max_num_seqs=4, async_scheduling=ahead)
    )
    engine, parameters = model.engine, list(model.parameters())
    device.count(*parameters)
    awake = texts(engine)
    for _ in range(2):
        held = device.memory_reserved()
        engine.sleep()
        freed = held - device.memory_reserved()
        weights = sum(tensor.nbytes for tensor in parameters)
        assert freed >= engine.plan.pool_bytes + weights and engine.is_asleep
        with pytest.raises(EngineClosedError, match="sleeps"):
            engine.generate(PROMPTS, GREEDY)
        engine.wake_up()
        assert not engine.is_asleep and texts(engine) == awake
        assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
        assert all(torch.equal(now, then) for now, then in zip(parameters, before, strict=True))
        assert all(tensor.requires_grad for tensor in parameters)
    assert_idle(engine)


def test_nothing_cached_is_found_after_sleeping(model):
    engine = model.engine
    prompt = list(range(3, 40))
    for cached in (0, 32):
        assert engine.generate([prompt], GREEDY)[0].num_cached_tokens == cached
    engine.sleep()
    engine.wake_up()
    assert engine.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def test_shared_storages_are_shared_before_meanwhile_and_after(model, device):
    projections = [getattr(model.model.layers[0].self_attn, f"{name}_proj").weight for name in "qkv"]
    values = [tensor.detach().clone() for tensor in projections]
    addresses = [tensor.data_ptr() for tensor in projections]

    def check() -> None:
        assert model.lm_head.weight is model.model.embed_tokens.weight and all(map(torch.equal, projections, values))
        ends = [tensor.data_ptr() + tensor.nbytes for tensor in projections]
        assert [tensor.data_ptr() for tensor in projections[1:]] == ends[:-1]
        assert len({tensor.untyped_storage().data_ptr() for tensor in projections}) == 1

    check()
    model.engine.sleep()
    check()
    assert addresses != [tensor.data_ptr() for tensor in projections]
    model.engine.wake_up()
    check()


def test_weights_that_are_loaded_meanwhile_are_those_of_afterwards(model):
    other = tiny_model("llama", tie_word_embeddings=True)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.mul_(1.5)
    expected, engine = greedy(other, PROMPTS, 6), model.engine
    assert texts(engine) != expected
    engine.sleep()
    model.load_state_dict(other.state_dict())
    engine.wake_up()
    assert texts(engine) == expected


def test_a_sleeping_model_can_be_saved(model, tmp_path):
    engine = model.engine
    awake = texts(engine)
    engine.sleep()
    model.save_pretrained(tmp_path)
    engine.wake_up()
    again = AutoPagedModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert texts(again.engine) == awake == texts(engine)


def test_no_room_to_wake_up_leaves_the_engine_asleep_and_whole(model, device):
    engine = model.engine
    awake = texts(engine)
    engine.sleep()
    held = device.memory_reserved()
    device.others = device.total - 100_000  # room for some of the weights
    with pytest.raises(NotEnoughMemoryError, match=r"weights are to come back to cpu.*the engine sleeps on"):
        engine.wake_up()
    assert engine.is_asleep
    with pytest.raises(EngineClosedError, match="sleeps"):
        texts(engine)
    device.empty_cache()
    assert device.memory_reserved() == held
    device.others = 0
    engine.wake_up()
    assert texts(engine) == awake


def test_no_room_on_the_host_leaves_the_engine_awake(model, monkeypatch):
    engine = model.engine
    awake = texts(engine)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "free_memory", lambda device: 1000)
        with pytest.raises(NotEnoughMemoryError, match=r"The weights take .* the engine cannot sleep"):
            engine.sleep()
    assert not engine.is_asleep and texts(engine) == awake


def test_without_pinned_memory_the_weights_wait_in_ordinary_memory(monkeypatch, caplog):
    sleeping, calls = SleepingWeights.__new__(SleepingWeights), []

    def refused(num_bytes: int, pinned: bool) -> torch.Tensor:
        calls.append(pinned)
        if pinned:
            raise RuntimeError("no more pinned memory")
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(memory, "host_buffer", refused)
    sleeping._is_pinned = True
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        assert [sleeping._host_buffer(8, torch.device("cpu")).nbytes for _ in range(2)] == [8, 8]
    assert calls == [True, False, False] and "no more pinned memory" in caplog.records[0].message


def test_an_interrupt_while_weights_move_leaves_all_of_them_in_one_place(model, monkeypatch):
    before, moved = [tensor.data_ptr() for tensor in model.parameters()], []
    original = torch.Tensor.set_

    def interrupted(self, source, *args):
        if args:
            moved.append(source)
            if len(moved) == 5:
                raise KeyboardInterrupt
        return original(self, source, *args)

    monkeypatch.setattr(torch.Tensor, "set_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SleepingWeights(model)
    assert len(moved) == 5 and [tensor.data_ptr() for tensor in model.parameters()] == before


@pytest.mark.parametrize("how", ["close", "unpaged"])
def test_the_model_of_an_engine_that_is_closed_asleep_is_as_it_was(model, device, how):
    held, weights = device.memory_allocated(), [tensor.detach().clone() for tensor in model.parameters()]
    engine = model.engine
    engine.sleep()
    engine.close() if how == "close" else model.unpaged()
    assert all(map(torch.equal, model.parameters(), weights))
    assert device.memory_allocated() >= held
    engine.wake_up()
    with pytest.raises(EngineClosedError, match="closed"):
        texts(engine)


def test_weights_that_have_no_room_when_a_sleeping_engine_is_closed_stay_with_a_warning(model, device, caplog):
    engine = model.engine
    engine.sleep()
    device.others = device.total - 1000
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        engine.close()
    assert "the weights stay in host memory" in caplog.records[-1].message
    engine.close()


def test_other_levels_are_refused():
    engine_of = paged().engine
    for level in (0, 2, "1", None):
        with pytest.raises(NotSupportedError, match="`level`"):
            engine_of.sleep(level)
    assert not engine_of.is_asleep


def test_on_a_cpu_the_weights_stay(expected):
    model = paged(num_blocks=300)
    addresses = [tensor.data_ptr() for tensor in model.parameters()]
    assert texts(model.engine) == expected
    for _ in range(2):
        model.engine.sleep()
        assert [tensor.data_ptr() for tensor in model.parameters()] == addresses
        assert model.engine._loop.runner is None
        model.engine.wake_up()
        assert texts(model.engine) == expected


def test_requests_of_other_threads_are_answered_or_refused(expected):
    """While they run the engine does not sleep; once it does, nobody waits for ever."""
    model = paged(num_blocks=300, max_num_seqs=3)
    engine, stop = model.engine, threading.Event()
    answered, refused, wrong = [0], [0], []

    def ask(place: int) -> None:
        while not stop.is_set():
            try:
                (output,) = engine.generate([PROMPTS[place]], GREEDY)
            except EngineClosedError:
                refused[0] += 1
            else:
                answered[0] += 1
                if output.outputs[0].token_ids != expected[place]:
                    wrong.append(place)
            stop.wait(0.03)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    naps = 0
    while naps < 5:
        # `EngineError`: requests are running.
        with contextlib.suppress(RuntimeError):
            engine.sleep()
            naps += 1
            assert engine.is_asleep and not engine.has_unfinished
            stop.wait(0.08)
            engine.wake_up()
            before = answered[0]
            while answered[0] == before:
                stop.wait(0.005)
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong and answered[0] >= 5 and refused[0] > 0
    assert texts(engine) == expected


def test_an_llm_passes_it_on(monkeypatch):
    llm = LLM(tiny_model("llama"), tokenizer=SimpleNamespace())
    calls = []
    monkeypatch.setattr(llm.engine, "sleep", lambda level: calls.append(level))
    monkeypatch.setattr(llm.engine, "wake_up", lambda: calls.append("wake"))
    llm.sleep()
    llm.sleep(level=2)
    llm.wake_up()
    assert calls == [1, 2, "wake"]
