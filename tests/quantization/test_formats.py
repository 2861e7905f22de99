"""Quantized checkpoints load, mean what their formats say, generate, and are saved as they were."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from hf_paged import AutoPagedModelForCausalLM, PagedConfig
from hf_paged.kernels.cpu import library
from hf_paged.kernels.packed_rows import rounded_tokens
from hf_paged.quantization.linear import QuantizedLinear
from tests.quantization import packers

BLOCK = (32, 32)
CT = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "quantization_status": "compressed"}


def scheme(format: str, activations: dict | None = None, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": {"type": "int", "dynamic": False, **weights}}
    if activations:
        group["input_activations"] = activations
    return {**CT, "format": format, "config_groups": {"group_0": group}}


def gptq_config(bits: int, group_size: int, **fields) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, "sym": False, **fields}


TOKEN = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}
CASES = {
    **{f"gptq, {bits} bits": (gptq_config(bits, 32), packers.gptq(bits, 32)) for bits in (2, 3, 4, 8)},
    "gptq, one group": (gptq_config(4, -1), packers.gptq(4, -1)),
    "gptq, second version": (gptq_config(4, 16, checkpoint_format="gptq_v2"), packers.gptq(4, 16, version=2)),
    "gptq, 3 bits, second version": (gptq_config(3, 32, format="gptq_v2"), packers.gptq(3, 32, version=2)),
    "gptq, symmetric": (gptq_config(4, 32, sym=True), packers.gptq(4, 32, symmetric=True)),
    "gptq, act-order": (gptq_config(4, 16, desc_act=True), packers.gptq(4, 16, act_order=True)),
    "gptq, act-order, one group": (gptq_config(4, -1, desc_act=True), packers.gptq(4, -1, act_order=True)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        packers.awq(32),
    ),
    "awq, one group": ({"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM"}, packers.awq(-1)),
    "packed int4": (scheme("pack-quantized", num_bits=4, strategy="group", group_size=32), packers.packed(4, 32)),
    "packed int4, asymmetric": (
        scheme("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False),
        packers.packed(4, 16, symmetric=False),
    ),
    "packed int4, act-order": (
        scheme("pack-quantized", num_bits=4, strategy="group", group_size=16, actorder="group"),
        packers.packed(4, 16, act_order=True),
    ),
    "packed int8, by channel": (scheme("pack-quantized", num_bits=8, strategy="channel"), packers.packed(8, -1)),
    "int8, by channel": (scheme("int-quantized", TOKEN, num_bits=8, strategy="channel"), packers.int8()),
    "int8, asymmetric": (
        scheme("int-quantized", TOKEN, num_bits=8, strategy="channel", symmetric=False),
        packers.int8(symmetric=False),
    ),
    "int8, one scale": (scheme("int-quantized", TOKEN, num_bits=8, strategy="tensor"), packers.int8(lambda out: (1,))),
    "fp8, one scale": (
        scheme("float-quantized", type="float", num_bits=8, strategy="tensor"),
        packers.float8("weight_scale", lambda out, inputs: (1,)),
    ),
    "fp8, by channel": (
        scheme("float-quantized", type="float", num_bits=8, strategy="channel"),
        packers.float8("weight_scale", lambda out, inputs: (out, 1)),
    ),
    "fp8, by block": (
        scheme("float-quantized", type="float", num_bits=8, strategy="block", block_structure=list(BLOCK)),
        packers.float8("weight_scale", lambda out, inputs: (-(-out // 32), -(-inputs // 32)), BLOCK),
    ),
    "fp8, fine-grained": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]},
        packers.float8("weight_scale_inv", lambda out, inputs: (-(-out // 32), -(-inputs // 32)), BLOCK),
    ),
    "fp8, fine-grained, one scale": (
        {"quant_method": "fp8", "weight_block_size": None, "modules_to_not_convert": ["lm_head"]},
        packers.float8("weight_scale_inv", lambda out, inputs: ()),
    ),
    "fp8 of fbgemm": (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        packers.float8("weight_scale", lambda out, inputs: (out, 1)),
    ),
    **{
        f"fp8, scale of shape {shape}": (
            scheme("float-quantized", type="float", num_bits=8, strategy="tensor"),
            packers.float8("weight_scale", lambda out, inputs, shape=shape: shape),
        )
        for shape in ((), (1,), (1, 1))
    },
}
PROMPT = torch.tensor([[3, 17, 44, 90, 5, 61, 150, 8]])


def relative_error(logits: torch.Tensor, right: torch.Tensor) -> float:
    return float((logits.double() - right).abs().max() / right.abs().max())


def _rounds_inputs(config: dict) -> bool:
    groups = config.get("config_groups", {}).values()
    return any("input_activations" in group and group["weights"].get("symmetric", True) for group in groups)


def _round_inputs_too(dense: torch.nn.Module, model: torch.nn.Module, config: dict) -> None:
    for name, module in dense.named_modules() if _rounds_inputs(config) else ():
        if isinstance(model.get_submodule(name), QuantizedLinear):
            module.register_forward_pre_hook(lambda module, args: (rounded_tokens(args[0].float()).to(args[0]),))


def _limit(config: dict) -> float:
    return 1e-3 if _rounds_inputs(config) else 1e-5  # rounding errors decide where a tie falls


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("case", CASES)
def test_format_means_what_it_says_generates_and_is_saved_bit_for_bit(case, tmp_path):
    config, packer = CASES[case]
    dense = packers.write_checkpoint(tmp_path / "made", config, packer)
    model, info = AutoPagedModelForCausalLM.from_pretrained(
        tmp_path / "made", paged_config=PagedConfig(num_blocks=32), output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    _round_inputs_too(dense, model, config)
    with torch.no_grad():
        assert relative_error(model(PROMPT).logits, dense(PROMPT).logits) < _limit(config)
    right = dense.float().generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=8, do_sample=False), right)
    model.save_pretrained(tmp_path / "saved")
    made, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "saved"))
    assert made.keys() == saved.keys()
    for name, tensor in made.items():
        assert tensor.dtype == saved[name].dtype and torch.equal(bytes_of(tensor), bytes_of(saved[name]))
    assert json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"] == config
    again = AutoPagedModelForCausalLM.from_pretrained(tmp_path / "saved", paged_config=PagedConfig(num_blocks=32))
    assert torch.equal(again.generate(PROMPT, max_new_tokens=8, do_sample=False), right)


EXPERTS = {
    "gptq": (gptq_config(4, 32), packers.gptq(4, 32)),
    "packed int4": (scheme("pack-quantized", num_bits=4, strategy="group", group_size=32), packers.packed(4, 32)),
    "fp8, fine-grained": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head", "gate"]},
        packers.float8("weight_scale_inv", lambda out, inputs: (-(-out // 32), -(-inputs // 32)), BLOCK),
    ),
    "fp8": (
        scheme("float-quantized", type="float", num_bits=8, strategy="channel"),
        packers.float8("weight_scale", lambda out, inputs: (out, 1)),
    ),
}


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_of_mixtures_are_quantized_one_by_one(case: str, family: str, tmp_path):
    config, packer = EXPERTS[case]
    dense = packers.write_checkpoint(tmp_path / "made", config, packer, family=family)
    model, info = AutoPagedModelForCausalLM.from_pretrained(
        tmp_path / "made", paged_config=PagedConfig(num_blocks=32), output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    experts = [module for name, module in model.named_modules() if name.endswith(("experts.0", "experts.3"))]
    assert experts and all(isinstance(linear, QuantizedLinear) for expert in experts for linear in expert.children())
    with torch.no_grad():
        assert relative_error(model(PROMPT).logits, dense(PROMPT).logits) < 1e-5
    right = dense.float().generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=8, do_sample=False), right)
    model.save_pretrained(tmp_path / "saved")
    made, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "saved"))
    assert made.keys() == saved.keys()
    assert all(torch.equal(bytes_of(tensor), bytes_of(saved[name])) for name, tensor in made.items())


@pytest.mark.parametrize("case", ["gptq, 4 bits", "fp8, one scale", "fp8, scale of shape ()", "int8, by channel"])
def test_fused_projections_are_quantized_as_one_vllm_5915(case: str, tmp_path):
    config, packer = CASES[case]
    dense = packers.write_checkpoint(tmp_path, config, packer, family="phi3")
    model = AutoPagedModelForCausalLM.from_pretrained(tmp_path, paged_config=PagedConfig(num_blocks=32))
    _round_inputs_too(dense, model, config)
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, QuantizedLinear)
    assert not library.load() or model.engine.plan.native.startswith("2 of 2 layers in 1 call")
    with torch.no_grad():
        assert relative_error(model(PROMPT).logits, dense(PROMPT).logits) < _limit(config)


def test_both_versions_of_gptq_mean_the_same_weights_vllm_26343(tmp_path):
    config = gptq_config(4, 32)
    first = packers.write_checkpoint(tmp_path / "1", config, packers.gptq(4, 32))
    second = packers.write_checkpoint(
        tmp_path / "2", {**config, "checkpoint_format": "gptq_v2"}, packers.gptq(4, 32, version=2)
    )
    stored = [load_file(tmp_path / version / "model.safetensors") for version in "12"]
    name = "model.layers.0.mlp.up_proj"
    assert not torch.equal(stored[0][f"{name}.qzeros"], stored[1][f"{name}.qzeros"])
    models = [
        AutoPagedModelForCausalLM.from_pretrained(tmp_path / v, paged_config=PagedConfig(num_blocks=32)) for v in "12"
    ]
    weights = [model.get_submodule(name).dequantize() for model in models]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(first.get_submodule(name).weight, second.get_submodule(name).weight)


@pytest.mark.parametrize("dtype", ["auto", "float32", torch.bfloat16])
def test_what_is_computed_in_is_chosen_at_load(dtype: str | torch.dtype, tmp_path):
    config, packer = CASES["gptq, 4 bits"]
    packers.write_checkpoint(tmp_path, config, packer, dtype=torch.float16)
    model = AutoPagedModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, paged_config=PagedConfig(num_blocks=32))
    right = {"auto": torch.float16, "float32": torch.float32}.get(dtype, dtype)
    assert model.dtype == right and model(PROMPT).logits.dtype == right
    assert model.model.layers[0].mlp.up_proj.scales.dtype == torch.float16, "scales are those of the checkpoint"
