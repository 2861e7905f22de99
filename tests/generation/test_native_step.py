"""Recognised modules are computed natively inside of engine steps only, and never after they have changed.

The operators here are those in plain torch, which count their calls; what the native ones compute is tested elsewhere.
Expected answers are those of plain forwards without a cache, which no engine takes part in.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import peft
import pytest
import torch

from hf_paged import AutoPagedModelForCausalLM, SamplingParams
from hf_paged.generation import native_layers
from hf_paged.generation.native_operators import REFERENCE, Operators
from hf_paged.modeling.native_step import Substitute, substituted
from tests.families import tiny_model
from tests.paged_models import answers_without_cache, paged

PROMPTS = [[5, 17, 33, 8, 61, 90, 4, 12, 13, 77, 21], [9, 3, 120]]
NEW = 4
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


class Counted:
    """Operators that count what they compute, and multiply it."""

    def __init__(self):
        self.factor = 1.0
        self.calls = self.layers = self.linears = 0

    def operators(self) -> Operators:
        return dataclasses.replace(REFERENCE, decoder_layers=self.decoder_layers, linear=self.linear)

    def decoder_layers(self, hidden, layers, cos, sin, metadata):
        self.calls += 1
        self.layers += len(layers)
        return REFERENCE.decoder_layers(hidden, layers, cos, sin, metadata) * self.factor

    def linear(self, x, weight, bias):
        self.linears += 1
        return REFERENCE.linear(x, weight, bias)


@pytest.fixture
def counted(monkeypatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(native_layers, "native_operators", counted.operators)
    return counted


def engine_of(model):
    return (model.get_base_model() if isinstance(model, peft.PeftModel) else model).engine


def answers(model, **params) -> list[list[int]]:
    outputs = engine_of(model).generate(PROMPTS, dataclasses.replace(PARAMS, **params))
    return [output.outputs[0].token_ids for output in outputs]


def plain_answers(model) -> list[list[int]]:
    return answers_without_cache(model, PROMPTS, NEW)


def computed(model, counted: Counted) -> float:
    """How many layers were computed natively in each step of answers that are the model's own."""
    engine_of(model)._native.current_units()  # perhaps the model is inspected, which counts too
    before, steps = counted.layers, engine_of(model).stats().num_steps
    assert answers(model) == plain_answers(model)
    return (counted.layers - before) / (engine_of(model).stats().num_steps - steps)


def test_a_run_of_layers_is_one_call_in_each_step(counted):
    model = paged()
    assert model.engine.plan.native == "2 of 2 layers in 1 call, 1 norm, 1 linear"
    counted.calls = counted.layers = counted.linears = 0
    assert answers(model) == plain_answers(model)
    steps = model.engine.stats().num_steps
    assert (counted.calls, counted.layers, counted.linears) == (steps, 2 * steps, steps)


def test_plain_forwards_never_meet_native_modules(counted):
    model = paged()
    answers(model)
    counted.calls = counted.linears = 0
    plain_answers(model)
    model(input_ids=torch.tensor(PROMPTS[:1]), use_cache=True)
    assert counted.calls == counted.linears == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_nothing_is_native_without_operators(monkeypatch):
    monkeypatch.setattr(native_layers, "native_operators", lambda: None)
    model = paged()
    assert model.engine.plan.native == "off"
    assert answers(model) == plain_answers(model)


def test_batch_invariant_engines_use_the_model_as_it_is(counted):
    model = paged(batch_invariant=True)
    answers(model)
    assert (model.engine.plan.native, counted.calls) == ("off", 0)


def test_what_computes_something_else_stays_off_and_says_so(counted, caplog):
    counted.factor = 1.01
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        model = paged()
        assert "layers" not in model.engine.plan.native
    (record,) = [r for r in caplog.records if "layer (LlamaDecoderLayer)" in r.message]
    assert "2 x" in record.message and "off by more than 0.0001, by 0.0" in record.message
    assert answers(model) == plain_answers(model)


def refuse(*args, **kwargs):
    raise RuntimeError("no such luck")


def test_what_the_operator_refuses_stays_as_it_is(monkeypatch, caplog):
    monkeypatch.setattr(
        native_layers, "native_operators", lambda: dataclasses.replace(REFERENCE, decoder_layers=refuse)
    )
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        model = paged()
        assert "layers" not in model.engine.plan.native
    assert "no such luck" in caplog.text
    assert answers(model) == plain_answers(model)


def test_an_inspection_that_fails_leaves_the_model_as_it_is(counted, monkeypatch, caplog):
    monkeypatch.setattr(native_layers, "inspect", refuse)
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        model = paged()
        assert model.engine.plan.native == "off"
    assert "no such luck" in caplog.text
    assert answers(model) == plain_answers(model)


def write_in_place(layer):
    layer.mlp.down_proj.weight.data.mul_(-1)


def swap_data(layer):
    layer.self_attn.k_proj.weight.data = -layer.self_attn.k_proj.weight.data.clone()


def assign(layer):
    layer.input_layernorm.weight = torch.nn.Parameter(torch.linspace(-1, 1, len(layer.input_layernorm.weight)))


def load(layer):
    layer.load_state_dict({name: -tensor for name, tensor in layer.state_dict().items()})


@pytest.mark.parametrize("write", [write_in_place, swap_data, assign, load])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_weights_are_those_of_the_moment(counted, family, write):
    model = paged(family)
    before = answers(model)
    layer = model.model.layers[0]
    if family == "phi3" and write is swap_data:
        layer.self_attn.qkv_proj.weight.data = -layer.self_attn.qkv_proj.weight.data.clone()
    else:
        write(layer)
    model.engine.weights_changed()  # forgets K/V; `.data` leaves no trace
    assert computed(model, counted) == 2
    assert answers(model) != before


def test_weights_written_between_two_steps_count_from_the_next_one_on(counted):
    model = paged()
    engine = model.engine
    state = engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    counted.layers = 0
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[7] += 1000 * model.model.norm.weight
        model.model.layers[1].mlp.down_proj.weight.data = torch.zeros(64, 96)
    engine.wait(state)
    assert counted.layers > 0
    expected = model(input_ids=torch.tensor([PROMPTS[0] + state.output().outputs[0].token_ids[:1]]), use_cache=False)
    assert state.output().outputs[0].token_ids[1] == int(expected.logits[0, -1].argmax())


def test_adapters_come_and_go(counted):
    model = paged()
    own = answers(model)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], layers_to_transform=[1])
    with_adapter = peft.get_peft_model(model, config)
    assert computed(with_adapter, counted) == 1 + 1  # the first layer, and the MLP of the second
    assert answers(with_adapter) != own
    with with_adapter.disable_adapter():
        assert answers(with_adapter) == own
    with_adapter.merge_adapter()
    assert answers(with_adapter) == plain_answers(with_adapter) != own
    with_adapter.unmerge_adapter()
    merged = with_adapter.merge_and_unload()
    assert computed(merged, counted) == 2
    assert answers(merged) != own


def adapted(**settings):
    """A model whose adapter is no adapter to it: nothing of it takes part."""
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], layers_to_transform=[1])
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("llama"), config).eval()
    return model, [module for module in model.modules() if isinstance(module, peft.tuners.lora.Linear)]


def test_an_adapter_that_was_merged_at_load_counts_once_it_is_taken_out(counted):
    with_adapter, _ = adapted()
    with_adapter.merge_adapter()
    AutoPagedModelForCausalLM.from_model(with_adapter.get_base_model())
    assert computed(with_adapter, counted) == 2
    with_adapter.unmerge_adapter()
    assert computed(with_adapter, counted) == 1 + 1


def test_an_adapter_that_was_not_active_at_load_counts_once_it_is(counted):
    with_adapter, layers = adapted()
    for layer in layers:
        layer.set_adapter([])
    AutoPagedModelForCausalLM.from_model(with_adapter.get_base_model())
    assert computed(with_adapter, counted) == 2
    for layer in layers:
        layer.set_adapter("default")
    assert computed(with_adapter, counted) == 1 + 1


def test_weights_that_are_laid_out_otherwise_are_left_to_torch(counted):
    model = paged()
    answers(model)
    for weight in (model.model.layers[0].mlp.down_proj.weight, model.lm_head.weight):
        weight.data = weight.data.t().contiguous().t()
    assert computed(model, counted) == 1 + 1


class Faded(torch.nn.Module):
    """An MLP times a buffer that is one."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        self.register_buffer("share", torch.ones(()))

    def forward(self, x):
        return self.mlp(x) * self.share


def test_a_buffer_without_effect_counts_once_it_has_one(counted):
    model = tiny_model("llama")
    model.model.layers[1].mlp = mlp = Faded(model.model.layers[1].mlp).eval()
    model = AutoPagedModelForCausalLM.from_model(model)
    assert computed(model, counted) == 2
    mlp.share.fill_(-3)
    model.engine.weights_changed()
    assert computed(model, counted) == 1 + 2  # attention and the MLP inside


def test_hooks_count_as_long_as_they_are_there(counted):
    model = paged()
    own = answers(model)
    layer = model.model.layers[1]
    handle = layer.mlp.register_forward_hook(lambda module, args, output: -output)
    assert computed(model, counted) == 1
    assert answers(model) != own
    handle.remove()
    assert computed(model, counted) == 2
    handle = layer.self_attn.q_proj.register_forward_pre_hook(lambda module, args: (-args[0],))
    assert computed(model, counted) == 1
    handle.remove()
    assert answers(model) == own


def test_a_hook_that_was_there_at_load_keeps_its_layer_off_until_it_goes(counted):
    model = tiny_model("llama")
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    model = AutoPagedModelForCausalLM.from_model(model)
    assert "1 of 2 layers" in model.engine.plan.native
    assert computed(model, counted) == 1 + 2  # and the blocks inside of the other layer
    handle.remove()
    assert computed(model, counted) == 2


def test_a_hook_on_all_modules_keeps_everything_off(counted):
    model = paged()
    answers(model)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: -output if isinstance(module, torch.nn.Linear) else None
    )
    try:
        assert computed(model, counted) == 0
    finally:
        handle.remove()
    assert computed(model, counted) == 2


def test_a_forward_that_is_set_on_a_module_is_called(counted):
    model = paged()
    answers(model)
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda x: -type(norm).forward(norm, x)
    assert computed(model, counted) == 1
    del norm.forward
    assert computed(model, counted) == 2


class Loud(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3


def test_modules_that_are_replaced_are_looked_at_again(counted):
    model = paged()
    own = answers(model)
    mlp = model.model.layers[0].mlp
    old, mlp.up_proj = mlp.up_proj, Loud(64, 96, bias=False)
    mlp.up_proj.load_state_dict(old.state_dict())
    assert computed(model, counted) == 1 + 1  # the second layer, and attention of the first
    assert answers(model) != own
    mlp.up_proj = old
    assert computed(model, counted) == 2
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = i
    assert computed(model, counted) == 2
    assert answers(model) != own


def test_settings_of_modules_are_looked_at_again(counted):
    model = paged()
    own = answers(model)
    model.model.layers[0].self_attn.scaling *= 3
    model.engine.weights_changed()  # forgets K/V
    assert computed(model, counted) == 2
    assert answers(model) != own


def test_a_forward_that_is_replaced_in_a_class_is_looked_at_again(counted, monkeypatch):
    model = paged()
    own = answers(model)
    cls = type(model.model.layers[0].mlp)
    forward = cls.forward
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", lambda self, x: -forward(self, x))
        model.engine.weights_changed()
        assert computed(model, counted) == 2  # attention alone
        assert answers(model) != own
    model.engine.weights_changed()
    assert answers(model) == own


def test_a_bias_that_is_given_to_a_linear_counts(counted):
    model = paged()
    own = answers(model)
    model.model.layers[1].mlp.down_proj.bias = torch.nn.Parameter(torch.linspace(-2, 2, 64))
    assert computed(model, counted) == 2
    assert answers(model) != own


def test_training_mode_uses_the_model_as_it_is(counted):
    model = paged()
    answers(model)
    model.train()
    assert computed(model, counted) == 0
    model.eval()
    assert computed(model, counted) == 2
    model.model.layers[1].train()
    assert computed(model, counted) == 1


def test_another_dtype_is_noticed(counted):
    model = paged()
    answers(model)
    model.model.layers[1].mlp.double()
    counted.layers = 0
    units = model.engine._native.current_units()
    assert "layer" not in [unit.kind for unit in units if unit.module is model.model.layers[1]]


def test_hidden_states_and_attention_weights_come_from_the_model_as_it_is(counted):
    model = paged()
    answers(model)
    counted.layers = 0
    inputs = torch.tensor(PROMPTS[:1])
    given = model.generate(
        inputs, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_hidden_states=True
    )
    assert counted.layers == 0
    expected = model(input_ids=inputs, output_hidden_states=True, use_cache=False).hidden_states
    assert len(given.hidden_states[0]) == len(expected)
    for mine, theirs in zip(given.hidden_states[0], expected, strict=True):
        torch.testing.assert_close(mine[0, -1], theirs[0, -1], rtol=1e-4, atol=1e-4)
    assert computed(model, counted) == 2  # Transformers' hooks that return hidden states stay


@pytest.mark.parametrize("meanwhile", ["deepcopy", "pickle", "forward"])
def test_another_thread_in_the_middle_of_a_step_sees_a_plain_model(counted, meanwhile):
    model = paged()
    expected = answers(model)
    plain = plain_answers(model)
    seen = []

    def other_thread():
        if meanwhile == "forward":
            seen.append(plain_answers(model))
            return
        copied = copy.deepcopy(model) if meanwhile == "deepcopy" else pickle.loads(pickle.dumps(model))
        assert not any(isinstance(vars(module).get("forward"), Substitute) for module in copied.modules())
        with torch.no_grad():
            model_weights = dict(copied.named_parameters())
            assert all(parameter is not model_weights[name] for name, parameter in model.named_parameters())
        seen.append(plain_answers(copied))
        seen.append(answers(copied))

    run = counted.decoder_layers
    started = threading.Event()

    def slow(*args):
        if not started.is_set():
            started.set()
            thread = threading.Thread(target=other_thread)
            thread.start()
            thread.join(60)
        return run(*args)

    native = model.engine._native
    native.operators = dataclasses.replace(native.operators, decoder_layers=slow)
    model.engine.release()  # a new runner uses these
    assert answers(model) == expected
    assert seen and all(given == plain for given in seen)


def test_substitutes_are_seen_by_one_thread_and_gone_afterwards():
    linear = torch.nn.Linear(2, 2)
    x = torch.ones(1, 2)
    expected, seen = linear(x), []
    substitute = Substitute(linear, lambda module, args, kwargs: "native")
    with pytest.raises(KeyError), substituted([substitute]):
        assert linear(x) == "native"
        thread = threading.Thread(target=lambda: seen.append(linear(x)))
        thread.start()
        thread.join()
        buffer = io.BytesIO()
        torch.save(linear, buffer)
        buffer.seek(0)
        seen += [copy.deepcopy(linear)(x), torch.load(buffer, weights_only=False)(x)]
        raise KeyError("the step failed")
    assert [bool(torch.equal(result, expected)) for result in seen] == [True, True, True]
    assert "forward" not in vars(linear)


def test_what_somebody_sets_meanwhile_stays():
    linear = torch.nn.Linear(2, 2)
    with substituted([Substitute(linear, lambda module, args, kwargs: "native")]):
        linear.forward = lambda x: "theirs"
    assert linear(torch.ones(1, 2)) == "theirs"


def test_a_process_ends_quietly_with_models_alive():
    lines = [
        "import torch, tests.paged_models as models",
        "kept = [models.paged(family) for family in ('llama', 'mixtral')]",
        "torch.kept = kept",  # so that they outlive the modules of the package
    ]
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=root, capture_output=True, text=True)
    assert ended.returncode == 0
    assert "Exception ignored" not in ended.stderr and "Traceback" not in ended.stderr
