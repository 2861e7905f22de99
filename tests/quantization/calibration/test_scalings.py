"""What can be scaled in a layer is found by trying it out, and the dense model stays the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_paged.errors import NotSupportedError
from hf_paged.quantization.calibration.awq import scale_layer
from hf_paged.quantization.calibration.inputs import collect, find_taps
from hf_paged.quantization.calibration.layers import (
    call_in_float32,
    decoder_layers,
    first_states,
    in_float32,
    observe_calls,
)
from hf_paged.quantization.calibration.scalings import find_scalings
from hf_paged.quantization.rounding import Rounding
from tests.families import tiny_model

PROMPT = torch.tensor([[3, 17, 44, 90, 5, 61, 150, 8, 22, 71, 133, 9]])
# What feeds what, by names within a layer.
EXPECTED = {
    "llama": {
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("self_attn.v_proj", ("self_attn.o_proj",)),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.up_proj", ("mlp.down_proj",)),
    },
    "qwen3": {
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("self_attn.v_proj", ("self_attn.o_proj",)),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.up_proj", ("mlp.down_proj",)),
    },
    "gemma2": {
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("self_attn.v_proj", ("self_attn.o_proj",)),
        ("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.up_proj", ("mlp.down_proj",)),
    },
    "phi3": {
        ("input_layernorm", ("self_attn.qkv_proj",)),
        ("self_attn.qkv_proj", ("self_attn.o_proj",)),
        ("post_attention_layernorm", ("mlp.gate_up_proj",)),
        ("mlp.gate_up_proj", ("mlp.down_proj",)),
    },
    # Heads have their queries, keys and values side by side, and GELU is no factor.
    "gpt_neox": {
        ("input_layernorm", ("attention.query_key_value",)),
        ("post_attention_layernorm", ("mlp.dense_h_to_4h",)),
    },
    # ReLU lets positive factors through.
    "opt": {
        ("self_attn_layer_norm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("self_attn.v_proj", ("self_attn.out_proj",)),
        ("final_layer_norm", ("fc1",)),
        ("fc1", ("fc2",)),
    },
    # The norm before the experts feeds the router and the experts too, which are no linears.
    "mixtral": {
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("self_attn.v_proj", ("self_attn.o_proj",)),
    },
}


@pytest.mark.parametrize("family", EXPECTED)
@torch.no_grad()
def test_what_feeds_what_is_found_and_scaling_leaves_the_dense_model_as_it_is(family):
    model = tiny_model(family)
    right = model(PROMPT).logits
    _, layers = decoder_layers(model)
    calls = observe_calls(model, layers, [PROMPT])
    states = first_states(model, layers, [PROMPT])
    changed = []
    for layer, call in zip(layers, calls, strict=True):
        linears = {name: module for name, module in layer.named_modules() if type(module) is nn.Linear}

        def run(layer=layer, call=call, states=states):
            return call.run(layer, states[0])

        taps = find_taps(layer, linears, run)
        scalings = find_scalings(layer, linears, taps, model.config, run, states[0])
        assert {(s.producer.module, s.linears) for s in scalings} == EXPECTED[family]
        hessians = collect(linears, taps, run)
        before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
        dtypes = dict.fromkeys(before, torch.bfloat16)
        scaled, kept = scale_layer(layer, scalings, hessians, Rounding(4, 32, False), dtypes, run, states[0])
        assert kept
        changed += [name for name, parameter in layer.named_parameters() if not torch.equal(parameter, before[name])]
        again = collect(linears, taps, run)
        for one, other in zip(scaled, again, strict=True):
            assert torch.allclose(one.total, other.total, rtol=1e-3, atol=1e-3 * float(other.total.abs().max()))
        states = [run()]
    assert changed, "nothing was scaled"
    assert float((model(PROMPT).logits - right).abs().max() / right.abs().max()) < 1e-4


class Shifted(nn.Module):
    """A layer whose norm feeds something else beside its linear."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(torch.tanh(self.up(normed))) + 0.1 * normed


@torch.no_grad()
def test_what_would_change_a_layer_is_left_alone():
    torch.manual_seed(0)
    layer, x = Shifted(), torch.randn(1, 8, 16)
    linears = {"up": layer.up, "down": layer.down}
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    taps = find_taps(layer, linears, lambda: layer(x))
    assert [(tap.linears, tap.norm) for tap in taps] == [(("up",), "norm"), (("down",), None)]
    assert find_scalings(layer, linears, taps, None, lambda: layer(x), x) == []
    assert all(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())


@torch.no_grad()
def test_a_scaling_that_does_not_hold_for_a_layer_is_taken_back(caplog):
    """Found in one layer and used in another that looks alike, where it does not hold."""
    torch.manual_seed(0)
    model = tiny_model("llama")
    _, layers = decoder_layers(model)
    call, states = observe_calls(model, layers, [PROMPT])[0], first_states(model, layers, [PROMPT])
    layer = layers[0]
    linears = {name: module for name, module in layer.named_modules() if type(module) is nn.Linear}
    taps = find_taps(layer, linears, lambda: call.run(layer, states[0]))
    scalings = find_scalings(layer, linears, taps, model.config, lambda: call.run(layer, states[0]), states[0])
    hessians = collect(linears, taps, lambda: call.run(layer, states[0]))
    layer.mlp.act_fn, linear = nn.Tanh(), layer.mlp.up_proj
    layer.mlp.forward = lambda x: layer.mlp.down_proj(torch.tanh(layer.mlp.up_proj(x)))
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    dtypes = dict.fromkeys(before, torch.float32)

    def run():
        return call.run(layer, states[0])

    same, kept = scale_layer(layer, scalings, hessians, Rounding(4, 32, False), dtypes, run, states[0])
    assert not kept and [one.total.data_ptr() for one in same] == [one.total.data_ptr() for one in hessians]
    assert all(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())
    assert linear.weight.shape == before["mlp.up_proj.weight"].shape


# ------------------------------------------------------------------ layers one after the other


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "glm", "opt", "deepseek_v3", "falcon"])
@torch.no_grad()
def test_layers_called_one_after_the_other_give_what_the_model_gives(family):
    model = tiny_model(family)
    windows = [PROMPT, PROMPT.flip(1), PROMPT + 1]
    _, layers = decoder_layers(model)
    calls = [call_in_float32(call) for call in observe_calls(model, layers, windows)]
    states = first_states(model, layers, windows)
    for call, layer in zip(calls, layers, strict=True):
        states = [call.run(layer, state) for state in states]
    right: list[torch.Tensor] = []
    hook = layers[-1].register_forward_hook(
        lambda module, args, output: right.append(output if isinstance(output, torch.Tensor) else output[0])
    )
    for window in windows:
        model(window)
    hook.remove()
    for state, expected in zip(states, right, strict=True):
        assert torch.allclose(state, expected, atol=1e-5)


def test_something_between_two_layers_is_noticed(monkeypatch):
    model = tiny_model("llama")
    _, layers = decoder_layers(model)
    forward = model.model.forward

    def shifting(*args, **kwargs):
        hook = layers[1].register_forward_pre_hook(lambda module, given: (given[0] + 1.0, *given[1:]), prepend=True)
        try:
            return forward(*args, **kwargs)
        finally:
            hook.remove()

    monkeypatch.setattr(model.model, "forward", shifting)
    with pytest.raises(NotSupportedError, match="before its layer 1.*`rtn` needs no calibration"):
        observe_calls(model, layers, [PROMPT])


def test_a_layer_that_is_told_more_of_a_text_is_noticed(monkeypatch):
    model = tiny_model("llama")
    _, layers = decoder_layers(model)
    forward = model.model.forward

    def telling(input_ids, *args, **kwargs):
        extra = input_ids.float()
        hook = layers[1].register_forward_pre_hook(
            lambda module, given, words: (given, {**words, "extra": extra}), with_kwargs=True, prepend=True
        )
        try:
            return forward(input_ids, *args, **kwargs)
        finally:
            hook.remove()

    monkeypatch.setattr(model.model, "forward", telling)
    with pytest.raises(NotSupportedError, match="Layer 1 of LlamaForCausalLM is told more"):
        observe_calls(model, layers, [PROMPT, PROMPT + 1])


def test_a_layer_in_float32_is_in_its_own_dtypes_again():
    model = tiny_model("llama", torch.bfloat16)
    _, layers = decoder_layers(model)
    before = {name: tensor.clone() for name, tensor in layers[0].state_dict().items()}
    with in_float32(layers[0]) as dtypes:
        assert set(dtypes.values()) == {torch.bfloat16}
        assert {parameter.dtype for parameter in layers[0].parameters()} == {torch.float32}
    for name, tensor in layers[0].state_dict().items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, before[name])
