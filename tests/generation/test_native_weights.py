"""Weights that are laid side by side at load are what they were, whatever is done with the model.

The operators here are those in plain torch, told that they profit from it; products of joined weights are tested with
the Triton operators.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import logging
import pickle

import peft
import pytest
import safetensors.torch
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_paged import AutoPagedModelForCausalLM, SamplingParams
from hf_paged.generation import native_layers, native_weights
from hf_paged.generation.native_operators import REFERENCE
from hf_paged.kernels.triton.fused_weights import joined
from tests.families import tiny_model
from tests.paged_models import answers_without_cache, paged

PROMPTS = [[5, 17, 33, 8, 61, 90, 4, 12, 13, 77, 21], [9, 3, 120]]
NEW = 3
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
BIASED = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(autouse=True)
def joining(monkeypatch):
    operators = dataclasses.replace(REFERENCE, joins_linears=True)
    monkeypatch.setattr(native_layers, "native_operators", lambda: operators)


def answers(model) -> list[list[int]]:
    engine = (model.get_base_model() if isinstance(model, peft.PeftModel) else model).engine
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]


def plain_answers(model) -> list[list[int]]:
    return answers_without_cache(model, PROMPTS, NEW)


def assert_right(model) -> None:
    assert answers(model) == plain_answers(model)


def together(layer) -> list[list[torch.Tensor]]:
    """The weights, and biases, that a layer's linears of one input have."""
    attention, mlp = layer.self_attn, layer.mlp
    groups = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
    lists = [[getattr(linear, kind) for linear in linears] for linears in groups for kind in ("weight", "bias")]
    return [tensors for tensors in lists if tensors[0] is not None]


def are_joined(model) -> list[bool]:
    return [joined(tensors) is not None for layer in model.model.layers for tensors in together(layer)]


@pytest.mark.parametrize("overrides", [{}, BIASED], ids=["weights", "weights and biases"])
def test_weights_of_one_input_lie_side_by_side_after_loading(overrides):
    model = tiny_model("llama", **overrides)
    before = {name: (id(tensor), tensor.detach().clone()) for name, tensor in model.named_parameters()}
    assert not any(are_joined(model))
    model = AutoPagedModelForCausalLM.from_model(model)
    assert all(are_joined(model)) and len(are_joined(model)) == 4 * (1 + bool(overrides))
    for name, tensor in model.named_parameters():
        identity, numbers = before[name]
        assert id(tensor) == identity and torch.equal(tensor, numbers) and tensor.requires_grad
    for tensors in together(model.model.layers[0]):
        assert torch.equal(joined(tensors), torch.cat(tensors))
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [tensor.nbytes for tensor in tensors]
    assert_right(model)


def test_tied_embeddings_stay_tied():
    model = paged(overrides={"tie_word_embeddings": True})
    assert model.lm_head.weight is model.model.embed_tokens.weight and all(are_joined(model))
    assert_right(model)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_right(model)


def test_nothing_moves_without_operators_that_profit(monkeypatch):
    monkeypatch.setattr(native_layers, "native_operators", lambda: REFERENCE)
    model = tiny_model("llama")
    addresses = [tensor.data_ptr() for tensor in model.parameters()]
    model = AutoPagedModelForCausalLM.from_model(model)
    assert [tensor.data_ptr() for tensor in model.parameters()] == addresses


@pytest.mark.parametrize("family", ["phi3", "gpt_neox", "gpt2"])
def test_weights_that_are_one_already_stay_where_they_are(family):
    model = tiny_model(family)
    addresses = [tensor.data_ptr() for tensor in model.parameters()]
    model = AutoPagedModelForCausalLM.from_model(model)
    assert [tensor.data_ptr() for tensor in model.parameters()] == addresses
    assert_right(model)


def test_blocks_that_are_recognised_alone_are_laid_too():
    model = paged("mixtral")
    attention = model.model.layers[0].self_attn
    assert joined([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
    assert_right(model)


def test_weights_that_share_their_memory_stay_where_they_are():
    model = tiny_model("llama")
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight  # one object: moves with the first layer, and no more
    first.self_attn.v_proj.weight.data = second.self_attn.v_proj.weight.data  # two objects on one memory
    model = AutoPagedModelForCausalLM.from_model(model)
    assert are_joined(model) == [False, True, False, False]
    assert second.mlp.up_proj.weight is first.mlp.up_proj.weight
    with torch.no_grad():
        first.self_attn.v_proj.weight.mul_(-1)
    assert torch.equal(first.self_attn.v_proj.weight, second.self_attn.v_proj.weight)
    assert_right(model)


def write(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-2)
        model.model.layers[1].mlp.gate_proj.weight.neg_()


def load(model):
    model.load_state_dict({name: -tensor for name, tensor in model.state_dict().items()})


def replace_memory(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = -weight.data.clone()


def replace_object(model):
    layer = model.model.layers[1].mlp
    layer.up_proj.weight = torch.nn.Parameter(-layer.up_proj.weight.detach().clone())


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor(PROMPTS[:1]), labels=torch.tensor(PROMPTS[:1])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("change", [write, load, replace_memory, replace_object, train])
def test_weights_are_those_of_the_moment(change):
    model = paged()
    before = answers(model)
    change(model)
    model.engine.weights_changed()
    assert_right(model)
    assert answers(model) != before


def test_copies_and_files_hold_each_weight_once(tmp_path):
    model, other = paged(), tiny_model("llama")
    expected = other.state_dict()

    def check(state):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())

    check(model.state_dict())
    model.save_pretrained(tmp_path / "saved")
    check(type(other).from_pretrained(tmp_path / "saved").state_dict())
    safetensors.torch.save_file(model.state_dict(), tmp_path / "state.safetensors")
    check(safetensors.torch.load_file(tmp_path / "state.safetensors"))
    size = sum(tensor.nbytes for tensor in expected.values())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert buffer.tell() < size * 1.3
    pickled = pickle.dumps(model)
    assert len(pickled) < size * 1.3
    for copied in (copy.deepcopy(model), pickle.loads(pickled)):
        check(copied.state_dict())
        with torch.no_grad():
            copied.model.layers[0].self_attn.q_proj.weight.zero_()
        check(model.state_dict())
        assert_right(copied)
    weight = io.BytesIO()
    torch.save(model.model.layers[0].self_attn.k_proj.weight, weight)
    assert weight.tell() < model.model.layers[0].self_attn.k_proj.weight.nbytes + 2000


def test_another_dtype_and_back():
    model = paged()
    own = answers(model)
    model.double()
    assert_right(model)
    model.float()
    assert answers(model) == own and all(are_joined(model))


def test_adapters_come_and_go():
    model = paged()
    own = answers(model)
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "up_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    assert_right(adapted)
    assert answers(adapted) != own
    with adapted.disable_adapter():
        assert answers(adapted) == own
    adapted.merge_adapter()
    assert_right(adapted)
    merged = adapted.merge_and_unload()
    assert_right(merged)
    assert answers(merged) != own and all(are_joined(merged))


def test_a_model_that_is_no_longer_paged_is_as_good_as_before(tmp_path):
    model = paged()
    own = answers(model)
    model = model.unpaged()
    assert plain_answers(model) == own
    safetensors.torch.save_file(model.state_dict(), tmp_path / "state.safetensors")
    assert AutoPagedModelForCausalLM.from_model(model) is model
    assert answers(model) == own


def test_memory_is_free_once_all_weights_in_it_lie_elsewhere():
    model = paged()
    answers(model)
    tensors = together(model.model.layers[0])[0]
    memory = StorageWeakRef(joined(tensors).untyped_storage())
    for tensor in tensors[:2]:
        tensor.data = tensor.data.clone()
    assert not memory.expired()
    assert_right(model)
    tensors[2].data = tensors[2].data.clone()
    gc.collect()
    assert memory.expired()
    assert_right(model)


def test_a_new_runner_finds_weights_side_by_side_that_were_away():
    model = paged()
    own = answers(model)
    model.engine.release()
    for tensor in model.parameters():
        tensor.data = tensor.data.clone()
    assert not any(are_joined(model))
    assert answers(model) == own and all(are_joined(model))


def test_what_was_moved_is_free_before_more_is_moved(monkeypatch):
    model, lay, calls = tiny_model("llama"), native_weights.lay_side_by_side, []
    memory = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]

    def watched(parameters):
        before = sum(reference.expired() for reference in memory)
        lay(parameters)
        calls.append(sum(reference.expired() for reference in memory) - before)

    monkeypatch.setattr(native_weights, "lay_side_by_side", watched)
    AutoPagedModelForCausalLM.from_model(model)
    assert calls == [3, 2, 3, 2]


def test_without_room_the_rest_stays_where_it_is(monkeypatch, caplog):
    lay, calls = native_weights.lay_side_by_side, []

    def short_of_memory(parameters):
        calls.append(parameters)
        if len(calls) > 2:
            raise torch.OutOfMemoryError("no room")
        lay(parameters)

    monkeypatch.setattr(native_weights, "lay_side_by_side", short_of_memory)
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        model = paged()
    assert are_joined(model) == [True, True, False, False]
    assert "no room to move them" in caplog.text
    assert_right(model)
