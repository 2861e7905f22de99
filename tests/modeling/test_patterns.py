"""Decoder layers of many families are recognised by what they contain and compute, and traps are not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from hf_paged import AutoPagedModelForCausalLM, PagedConfig
from hf_paged.generation.native_inspection import inspect
from hf_paged.generation.native_operators import REFERENCE
from hf_paged.generation.native_units import Inspection
from hf_paged.modeling.patterns.mlp import activation_kind
from hf_paged.modeling.patterns.norm import find_norm
from hf_paged.modeling.patterns.plain import NotRecognizedError, check_one_device, is_plain_linear
from hf_paged.modeling.patterns.recipe import Activation, NormKind, ResidualFlow, RopeLayout
from tests.families import _COMMON, FAMILIES, tiny_model

WHOLE = "2 of 2 layers in 1 call, 1 norm, 1 linear"
PARTS = {
    "mixtral": "5 norms, 2 attentions, 1 linear",
    "olmoe": "5 norms, 2 attentions, 1 linear",
    "gpt_oss": "5 norms, 2 attentions, 1 linear",
    "qwen2_moe": "5 norms, 2 attentions, 2 mlps, 3 linears",
    "gpt2": "5 norms, 1 linear",
    "deepseek_v3": "9 norms, 2 mlps, 11 linears",
}
# Families that the engine's tests do not run, for what is special about each of them.
OTHERS = {
    "CohereConfig": {"residual_flow": ResidualFlow.PARALLEL_ONE_NORM, "norm_kind": NormKind.LAYER, "cos_step": 2},
    "PhiConfig": {"residual_flow": ResidualFlow.PARALLEL_ONE_NORM, "gated": 0, "activation": Activation.GELU_TANH},
    "GraniteConfig": {"residual_multiplier": 0.22},
    "Olmo2Config": {"qk_norm_kind": 2, "residual_flow": ResidualFlow.SEQUENTIAL},
    "OlmoConfig": {"bare_norms": 1, "norm_kind": NormKind.LAYER},
    "NemotronConfig": {"norm_kind": NormKind.LAYER, "norm_offset": 1.0, "activation": Activation.RELU2},
    "GPTBigCodeConfig": {"num_kv_heads": 1, "rope_layout": RopeLayout.NONE},
    "HeliumConfig": {"rope_layout": RopeLayout.INTERLEAVED},
}


def inspected(model, operators=REFERENCE, **config) -> Inspection:
    paged = AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(**config))
    engine = paged.engine
    return inspect(paged, engine._groups, engine.backend, 16, engine.plan.max_model_len, operators)


def shape_of(inspection: Inspection):
    """The numbers of the first unit that is a layer or a part of one."""
    return next(unit.recipe.shape for unit in inspection.units if unit.recipe is not None)


@pytest.fixture(autouse=True)
def _engines_without_native_layers(monkeypatch):
    monkeypatch.setattr("hf_paged.generation.native_layers.native_operators", lambda: None)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_family_is_recognised_as_far_as_the_patterns_go(family):
    assert inspected(tiny_model(family)).describe() == PARTS.get(family, WHOLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gemma3", "phi3"])
def test_rounding_hides_nothing(family, dtype):
    assert inspected(tiny_model(family, dtype)).describe() == WHOLE


def test_float64_is_left_to_torch():
    assert inspected(tiny_model("llama", torch.float64)).describe() == "off"


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_is_special_about_a_family_is_found(name):
    config = getattr(transformers, name)(**{**_COMMON, "head_dim": 16, "residual_multiplier": 0.22, "clip_qkv": None})
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
    inspection = inspected(model, max_model_len=200)
    assert inspection.describe().startswith("2 of 2 layers in 1 call")
    shape = dataclasses.asdict(shape_of(inspection))
    assert {field: shape[field] for field in OTHERS[name]} == OTHERS[name]


def test_sandwich_norms_windows_and_caps_are_found():
    shape = shape_of(inspected(tiny_model("gemma2")))
    assert (shape.norm_offset, shape.window, shape.softcap, shape.scale) == (1.0, 9, 1.0, 0.25)
    inspection = inspected(tiny_model("gemma2"))
    assert {"post_attention_norm_weight", "post_mlp_norm_weight"} <= inspection.units[0].recipe.sources.keys()


def test_tensors_are_views_of_the_model():
    model = tiny_model("gpt_neox")
    tensors = inspected(model).units[0].recipe.sources
    fused = model.gpt_neox.layers[0].attention.query_key_value
    for part, name in enumerate("qkv"):
        view = tensors[f"{name}_weight"].fetch()
        assert view.shape == (4, 16, 64)
        assert view.data_ptr() == fused.weight[16 * part :].data_ptr()


def test_norms_of_equal_weights_are_told_apart():
    model = tiny_model("gpt_neox")
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            layer.post_attention_layernorm.load_state_dict(layer.input_layernorm.state_dict())
    sources = inspected(model).units[0].recipe.sources
    layer = model.gpt_neox.layers[0]
    assert sources["norm1_weight"].parameters is layer.input_layernorm._parameters
    assert sources["norm2_weight"].parameters is layer.post_attention_layernorm._parameters


def test_projections_of_equal_weights_are_told_apart():
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.copy_(attention.k_proj.weight)
    sources = inspected(model).units[0].recipe.sources
    assert sources["v_weight"].parameters is attention.v_proj._parameters
    assert sources["k_weight"].parameters is attention.k_proj._parameters


class Spy(torch.nn.Module):
    """Changes what an MLP computes in some way that small numbers do not show."""

    def __init__(self, mlp, change):
        super().__init__()
        self.mlp, self.change = mlp, change

    def forward(self, x):
        return self.change(self.mlp(x))


def trapped(kind: str):
    model = tiny_model("llama")
    layer = model.model.layers[0]
    if kind == "clamped MLP":
        layer.mlp = Spy(layer.mlp, lambda y: y.clamp(-500, 500))
    elif kind == "subclass of a linear":
        old = layer.self_attn.q_proj
        layer.self_attn.q_proj = type("Odd", (torch.nn.Linear,), {})(64, 64, bias=False)
        layer.self_attn.q_proj.load_state_dict(old.state_dict())
    elif kind == "hook":
        layer.mlp.register_forward_hook(lambda module, args, output: output)
    elif kind == "parametrized":
        torch.nn.utils.parametrizations.weight_norm(layer.mlp.down_proj)
    return model


@pytest.mark.parametrize("kind", ["clamped MLP", "subclass of a linear", "hook", "parametrized"])
def test_a_layer_with_a_trap_is_not_recognised(kind):
    inspection = inspected(trapped(kind))
    assert inspection.describe().startswith("1 of 2 layers")
    assert any(reason.startswith("layer (LlamaDecoderLayer)") for reason in inspection.reasons)


def test_a_clamp_of_the_residual_is_noticed():
    model = tiny_model("llama")
    cls = type(model.model.layers[0])

    def clamped(self, *args, **kwargs):
        return cls.forward(self, *args, **kwargs).clamp(-5000, 5000)

    clamping = type(cls.__name__, (cls,), {"forward": clamped, "__module__": cls.__module__})
    for layer in model.model.layers:
        layer.__class__ = clamping
    assert "layer" not in inspected(model).describe()


class Clamp(torch.nn.Module):
    def __init__(self, limit: float):
        super().__init__()
        self.limit = limit

    def forward(self, x):
        return x.clamp(-self.limit, self.limit)


@pytest.mark.parametrize("kind", ["functions", "modules"])
def test_a_trap_in_one_layer_is_found_behind_another_layer_of_its_class_that_has_none(kind):
    model = tiny_model("llama")
    for layer, limit in zip(model.model.layers, (1e9, 500.0), strict=True):
        layer.mlp = Spy(layer.mlp, Clamp(limit) if kind == "modules" else Clamp(limit).forward).eval()
    assert inspected(model).describe().startswith("1 of 2 layers")


def test_clamped_projections_are_noticed_though_small_inputs_do_not_reach_the_clamp():
    free, clamped = (tiny_model("olmoe", clip_qkv=clip) for clip in (None, 100.0))
    assert "2 attentions" in inspected(free).describe()
    inspection = inspected(clamped)
    assert "attention" not in inspection.describe()
    assert any("large inputs" in reason for reason in inspection.reasons)


def test_a_factor_that_depends_on_the_position_is_noticed():
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    forward = type(attention).forward

    def far(self, hidden_states, **kwargs):
        positions = kwargs["position_ids"][..., None]
        return forward(self, hidden_states * torch.where(positions < 300, 1.0, 1.5), **kwargs)

    cls = type(attention)
    attention.__class__ = type(cls.__name__, (cls,), {"forward": far, "__module__": cls.__module__})
    assert inspected(model).describe().startswith("1 of 2 layers")
    assert inspected(model, max_model_len=300).describe() == WHOLE


class OddNorm(torch.nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(32))
        self.eps = 1e-3
        self.compute = compute

    def forward(self, x):
        return self.compute(x, self.weight)


def test_weights_where_no_operators_run_are_left_to_torch():
    assert is_plain_linear(torch.nn.Linear(4, 4))
    assert not is_plain_linear(torch.nn.Linear(4, 4, device="meta"))


def test_weights_that_are_not_where_their_input_is_are_left_to_torch():
    here, elsewhere = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, device="meta")
    check_one_device(here.parameters(), torch.device("cpu"))
    with pytest.raises(NotRecognizedError, match="its input is on cpu, but weights are on meta"):
        check_one_device([here.weight, elsewhere.weight], torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_process_does_not_matter(dtype):
    model = tiny_model("gpt_neox")
    torch.set_default_dtype(dtype)
    try:
        assert inspected(model).describe() == WHOLE
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_norm_without_effect_is_told_apart_all_the_same(name):
    norm = torch.nn.LayerNorm(32)
    torch.nn.init.zeros_(norm.get_parameter(name))
    assert find_norm(norm, 32).kind == NormKind.LAYER


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("llama", "q_proj"),
        ("glm", ""),
        ("gpt_neox", "query_key_value"),
        ("phi3", "o_proj"),
        ("gemma2", "down_proj"),
        ("llama", "up_proj"),
    ],
)
def test_weights_that_are_zero_tell_nothing(family, part):
    """Any layout of rotary embeddings, any activation, any multiplier fit zeros; other weights are loaded later."""
    model = tiny_model(family)
    for name, parameter in model.named_parameters():
        if part in name:
            torch.nn.init.zeros_(parameter)
    inspection = inspected(model)
    assert not any(unit.kind == "layer" for unit in inspection.units)
    assert any("zero" in reason for reason in inspection.reasons)


def test_a_multiplier_near_one_is_found_in_half_precision():
    config = transformers.GraniteConfig(**_COMMON, residual_multiplier=0.98, attention_multiplier=0.3)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert shape_of(inspected(model)).residual_multiplier == 0.98


class Scaled(torch.nn.Module):
    """An MLP times a parameter that is one."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.gamma = mlp, torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        return self.mlp(x) * self.gamma


def test_a_parameter_without_effect_may_get_one():
    model = tiny_model("llama")
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    inspection = inspected(model)
    assert inspection.describe().startswith("1 of 2 layers")
    assert any("`gamma`" in reason for reason in inspection.reasons)


def test_norms_are_told_apart_by_what_they_compute():
    functional = torch.nn.functional
    kinds = {
        (NormKind.RMS, 0.0): lambda x, w: functional.rms_norm(x, (32,), w, 1e-3),
        (NormKind.RMS, 1.0): lambda x, w: functional.rms_norm(x, (32,), w + 1, 1e-3),
        (NormKind.LAYER, 0.0): lambda x, w: functional.layer_norm(x, (32,), w, None, 1e-3),
        (NormKind.LAYER, 1.0): lambda x, w: functional.layer_norm(x, (32,), w + 1, None, 1e-3),
    }
    for expected, compute in kinds.items():
        norm = find_norm(OddNorm(compute).to(torch.bfloat16), 32)
        assert norm is not None and (norm.kind, norm.offset) == expected
        assert norm.eps == 1e-3
    for compute in (
        lambda x, w: functional.rms_norm(x, (32,), w, 1e-2),
        lambda x, w: functional.rms_norm(x, (32,), w, 1e-3) * 1.01,
        lambda x, w: x * w,
        lambda x, w: x[..., :16],
    ):
        assert find_norm(OddNorm(compute), 32) is None
    assert find_norm(torch.nn.Dropout(), 32) is None


def test_activations_are_told_apart_by_what_they_compute():
    act = transformers.activations.ACT2FN
    names = {
        "silu": Activation.SILU,
        "gelu": Activation.GELU,
        "gelu_new": Activation.GELU_TANH,
        "gelu_fast": Activation.GELU_TANH,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "quick_gelu": Activation.QUICK_GELU,
        "relu": Activation.RELU,
        "relu2": Activation.RELU2,
        "mish": None,
        "gelu_10": None,
        "leaky_relu": None,
    }
    assert {name: activation_kind(act[name]) for name in names} == names
    assert activation_kind(torch.nn.functional.silu) == Activation.SILU
    assert activation_kind(len) is None
