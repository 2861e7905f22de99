"""Huge pages for weights and K/V, and how many blocks fit into the memory that is really free."""

from __future__ import annotations

import dataclasses
import io
import logging
import mmap
from types import SimpleNamespace

import pytest
import torch

from hf_paged import AutoPagedModelForCausalLM, NotEnoughMemoryError, PagedConfig
from hf_paged.cache import memory
from hf_paged.cache.budget import StepNeeds
from hf_paged.generation.plan import make_plan
from hf_paged.modeling.layer_groups import LayerGroup, LayerSpec
from tests.families import tiny_model
from tests.paged_models import paged

GIB = 1 << 30
needs_huge_pages = pytest.mark.skipif(not memory.huge_pages_available(), reason="this system has no huge pages")


@pytest.fixture
def small_model_is_worth_moving(monkeypatch):
    """Tiny models are smaller than a huge page; pretend that pages are small."""
    monkeypatch.setattr(memory, "_HUGE_PAGE", mmap.PAGESIZE)


def refuse(*args, **kwargs):
    raise OSError("no such memory")


@needs_huge_pages
def test_carved_tensors_are_apart_and_have_their_own_storage():
    shapes = [(3, 5), (7,), (64, 64)]
    tensors = memory.allocate(shapes, torch.float32, torch.device("cpu"))
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape and not tensor.any()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    assert [set(tensor.flatten().tolist()) for tensor in tensors] == [{1.0}, {2.0}, {3.0}]
    last = tensors.pop()
    del tensors, tensor
    assert last.eq(3).all()  # the region lives as long as one of its tensors


def test_blocks_fall_back_to_ordinary_pages_with_a_log_line(monkeypatch, caplog):
    monkeypatch.setattr(memory, "huge_pages_available", lambda: True)
    monkeypatch.setattr(memory.HugeRegion, "__init__", refuse)
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        (blocks,) = memory.allocate([(4, 8)], torch.float32, torch.device("cpu"))
    assert blocks.shape == (4, 8) and not blocks.any()
    assert [record.message for record in caplog.records] == [
        "K/V blocks are on ordinary pages: no huge pages (no such memory)."
    ]


def test_weights_fall_back_to_ordinary_pages_with_a_log_line(monkeypatch, caplog, small_model_is_worth_moving):
    monkeypatch.setattr(memory, "huge_pages_available", lambda: True)
    monkeypatch.setattr(memory.HugeRegion, "__init__", refuse)
    model = tiny_model("llama")
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        assert memory.move_weights_to_huge_pages(model) == 0
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == before
    assert [record.message for record in caplog.records] == [
        "Weights stay on ordinary pages: no huge pages (no such memory)."
    ]


def test_an_engine_runs_without_huge_pages(monkeypatch):
    expected = paged().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6)
    monkeypatch.setattr(memory, "huge_pages_available", lambda: False)
    model = paged()
    assert torch.equal(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6), expected)
    assert not model.engine.plan.huge_pages


@needs_huge_pages
def test_moved_weights_keep_values_ties_and_separate_storages(small_model_is_worth_moving):
    model = tiny_model("llama", tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pointers = {tensor.data_ptr() for tensor in model.parameters()}
    assert memory.move_weights_to_huge_pages(model) > 0
    assert pointers.isdisjoint(tensor.data_ptr() for tensor in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])


@needs_huge_pages
def test_parameters_that_share_a_storage_still_share_it(small_model_is_worth_moving):
    module = torch.nn.Module()
    module.first = torch.nn.Parameter(torch.ones(64, 64))
    module.second = torch.nn.Parameter(module.first.data)
    module.transposed = torch.nn.Parameter(module.first.data.T)
    module.other = torch.nn.Parameter(torch.ones(64, 64))
    memory.move_weights_to_huge_pages(module)
    with torch.no_grad():
        module.first[0, 1] = 2
    assert module.second[0, 1] == 2 and module.transposed[1, 0] == 2 and module.other[0, 1] == 1


@needs_huge_pages
def test_moved_weights_can_be_trained(small_model_is_worth_moving):
    model, reference = tiny_model("llama"), tiny_model("llama")
    memory.move_weights_to_huge_pages(model)
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
        optimizer.step()
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(left, right)


def test_saved_files_hold_the_weights_and_not_the_pool(tmp_path, small_model_is_worth_moving):
    """vllm-project/vllm#6544: a pool in the wrong place is carried along by whatever is saved or copied."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    model = AutoPagedModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, paged_config=PagedConfig(num_blocks=2048)
    )
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    assert model.engine.plan.pool_bytes > 10 * size
    for content in (model, model.state_dict(), model.model.norm.weight):
        file = io.BytesIO()
        torch.save(content, file)
        assert file.tell() < size + 100_000
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").stat().st_size < size + 100_000


def group(bytes_per_token: int, device: str = "cpu") -> tuple[LayerGroup, ...]:
    spec = LayerSpec(0, 1, 1, bytes_per_token // 4, bytes_per_token // 4, torch.bfloat16, torch.device(device), None)
    return (LayerGroup((spec,)),)


def plan(
    config: PagedConfig, *, device: str = "cpu", bytes_per_token: int = 1024, activations: int = 0, graphs: int = 0
):
    model = SimpleNamespace(config=tiny_model("llama").config)
    return make_plan(
        model,
        group(bytes_per_token, device),
        config,
        attn_backend="reference",
        rejected_backends={},
        needs=StepNeeds(activations, graphs),
    )


@pytest.fixture
def machine(monkeypatch):
    """A machine whose free and total memory the test sets, on the CPU and on an accelerator."""
    state = SimpleNamespace(free=16 * GIB, total=80 * GIB)
    accelerator = SimpleNamespace(mem_get_info=lambda device: (state.free, state.total))
    monkeypatch.setattr(torch, "get_device_module", lambda device: accelerator)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=state.free))
    monkeypatch.setattr(memory, "_cgroup_room", lambda: 1 << 62)
    return state


def test_pool_takes_what_the_seats_can_use_and_no_more(machine):
    result = plan(PagedConfig(max_num_seqs=4, max_model_len=100))
    assert result.num_blocks == 4 * 7 and result.max_model_len == 100 and not result.notes


def test_pool_on_a_cpu_takes_at_most_a_quarter_of_what_is_free(machine):
    machine.free = 64 << 20
    assert plan(PagedConfig(), bytes_per_token=1 << 14).pool_bytes == 16 << 20


def test_a_containers_limit_counts_on_a_cpu(machine, monkeypatch):
    monkeypatch.setattr(memory, "_cgroup_room", lambda: 32 << 20)
    assert plan(PagedConfig(), bytes_per_token=1 << 14).pool_bytes == 8 << 20


def test_share_of_an_accelerator_counts_other_programs_and_activations(machine):
    """vllm-project/vllm#7256: a budget from the total memory is too large if others use the device too."""
    machine.free, machine.total = int(0.7 * 80 * GIB), 80 * GIB
    config = PagedConfig(gpu_memory_utilization=0.9, max_num_seqs=4096, max_model_len=512)
    result = plan(config, device="cuda", bytes_per_token=1 << 16, activations=3 * GIB, graphs=GIB)
    assert 0.6 * 80 * GIB - 4 * GIB - result.bytes_per_block < result.pool_bytes <= 0.6 * 80 * GIB - 4 * GIB
    assert result.graph_bytes == GIB and result.memory.limit == int(0.9 * 80 * GIB)
    assert 0 <= result.memory.limit - result.memory.planned < result.bytes_per_block
    assert "at most 72.00: weights and other programs 24.00, pool 44.00, a step 3.00, graphs 1.00" in result.describe()


def test_small_share_leaves_room_for_training(machine):
    """huggingface/trl PR#5765: a share of 0.9 leaves nothing for training beside generation."""
    machine.free = machine.total = 80 * GIB
    config = PagedConfig(gpu_memory_utilization=0.3, max_num_seqs=4096, max_model_len=512)
    result = plan(config, device="cuda", bytes_per_token=1 << 16)
    assert 0.29 * 80 * GIB < result.pool_bytes <= 0.3 * 80 * GIB


def test_no_room_for_a_block_is_an_error_with_the_numbers(machine):
    """vllm-project/vllm#2248: "No available memory for the cache blocks" must say how much was wanted and free."""
    machine.free, machine.total = 8 * GIB, 80 * GIB
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(PagedConfig(gpu_memory_utilization=0.9), device="cuda", activations=GIB, graphs=GIB)
    message = str(caught.value)
    assert "0.9 of 80.00 GiB" in message and "72.00 GiB in use" in message and "1.00 GiB for a step" in message
    assert "1.00 GiB for graphs" in message
    assert "may take 0.0000 GiB" in message and "one block" in message


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_blocks_than_fit_are_refused_with_the_numbers(machine, device):
    assert plan(PagedConfig(num_blocks=(16 << 30) >> 14), device=device).pool_bytes == 16 * GIB
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan(PagedConfig(num_blocks=1 << 21), device=device)
    message = str(caught.value)
    assert "`num_blocks` is 2097152, of 16384 bytes each: 32.00 GiB" in message and "16.00 GiB are free" in message
    assert f"on {device}" in message and f"At most {1 << 20} blocks fit" in message


def test_blocks_that_leave_no_room_for_steps_are_a_note(machine):
    machine.free = 16 * GIB
    result = plan(PagedConfig(num_blocks=(15 << 30) >> 14), device="cuda", activations=2 * GIB)
    assert result.notes[0].startswith("num_blocks leaves too little memory for the largest steps: they need 2.00 GiB")
    assert not plan(PagedConfig(num_blocks=(14 << 30) >> 14), device="cuda", activations=2 * GIB).notes
    assert result.memory.limit == result.memory.total


@pytest.mark.parametrize(("spare", "fits"), [(-1, False), (0, True), (1, True)])
def test_one_block_is_enough(machine, spare, fits):
    bytes_per_block = 16 * 1024
    machine.free = 4 * (bytes_per_block + spare)
    if fits:
        result = plan(PagedConfig())
        assert result.num_blocks == 1 and result.max_model_len == 16 and result.max_num_seqs == 1
        assert len(result.notes) == 2
    else:
        with pytest.raises(NotEnoughMemoryError, match="cpu_kv_cache_gib"):
            plan(PagedConfig())


def test_a_pool_of_one_block_generates(caplog):
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        model = paged(num_blocks=1)
    assert any("max_model_len is 16 instead of 512" in record.message for record in caplog.records)
    expected = tiny_model("llama").generate(torch.tensor([[3, 4, 5]]), max_new_tokens=13)
    assert torch.equal(model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=13), expected)


def test_too_small_a_budget_leaves_the_model_as_it_was():
    model = tiny_model("llama")
    with pytest.raises(NotEnoughMemoryError, match=r"`cpu_kv_cache_gib` is 1e-06"):
        AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(cpu_kv_cache_gib=1e-6))
    assert type(model) is type(tiny_model("llama")) and model.config._attn_implementation == "sdpa"
    assert torch.equal(
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4),
        tiny_model("llama").generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4),
    )


def test_plan_is_plain_data():
    values = paged(num_blocks=8).engine.plan.to_dict()
    assert values["pool_tokens"] == 128 and values["num_blocks"] == 8
    assert dataclasses.is_dataclass(paged(num_blocks=8).engine.plan)
