"""Checkpoints that are made here mean, read by hand, what the model in memory computes with, and load as any other."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_paged import AutoPagedModelForCausalLM, ConfigurationError, NotSupportedError, PagedConfig
from hf_paged.quantization.linear import QuantizedLinear
from hf_paged.quantization.making import choose_linears, quantize_with
from hf_paged.quantization.recipes import BITS, Recipe
from hf_paged.tools.english import calibration_texts, evaluation_texts, token_windows
from tests.families import tiny_model
from tests.quantization.dense import dense_model
from tests.quantization.packers import numbers_of
from tests.quantization.test_formats import PROMPT, relative_error

RECIPES = [
    Recipe("rtn", 4),
    Recipe("rtn", 4, 16, symmetric=False),
    Recipe("rtn", 8),
    Recipe("rtn", 8, symmetric=False),
    Recipe("fp8", 8),
    Recipe("gptq", 4),
    Recipe("gptq", 4, 16, symmetric=True),
    Recipe("gptq", 3, -1),
    Recipe("gptq", 2, 32),
    Recipe("gptq", 8, 32),
    Recipe("awq", 4),
    Recipe("awq", 4, -1),
]
FAMILIES = ("gemma2", "gpt_neox", "opt", "phi3", "qwen2_moe")


def texts(count: int = 6, length: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 199, (1, length), generator=generator) for _ in range(count)]


def made(folder, recipe: Recipe, family: str = "llama", **overrides):
    model = tiny_model(family, **overrides)
    result = quantize_with(model, recipe, texts())
    model.save_pretrained(folder)
    return model, result


def by_hand(tensors: dict[str, torch.Tensor], recipe: Recipe, out: int, inputs: int) -> np.ndarray:
    """The weight that a linear's tensors stand for, by the description of their layout."""
    held = {name: tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
            for name, tensor in tensors.items()}  # fmt: skip
    if recipe.method == "fp8":
        return held["weight"] * held["weight_scale"]
    group = np.arange(inputs) // (inputs if recipe.group_size == -1 else recipe.group_size)
    if recipe.method == "rtn":
        numbers = numbers_of(held["weight_packed"], recipe.bits, inputs)
        zeros = np.full_like(held["weight_scale"], 1 << (recipe.bits - 1))
        if not recipe.is_symmetric:
            zeros = numbers_of(held["weight_zero_point"].T.copy(), recipe.bits, out).T
        return (numbers - zeros[:, group]) * held["weight_scale"][:, group]
    if recipe.method == "gptq":
        assert held["g_idx"].tolist() == group.tolist()
        numbers = numbers_of(held["qweight"].T.copy(), recipe.bits, inputs)
        zeros = numbers_of(held["qzeros"], recipe.bits, out).T + 1
        assert zeros.max() < 1 << recipe.bits, "nobody has to take it modulo the codes"
        return (numbers - zeros[:, group]) * held["scales"].T[:, group]
    place = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7 within a word
    numbers, zeros = (
        numbers_of(held[name], 4, out).reshape(-1, out // 8, 8)[:, :, place].reshape(-1, out).T
        for name in ("qweight", "qzeros")
    )
    return (numbers - zeros[:, group]) * held["scales"].T[:, group]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_checkpoint_says_by_hand_what_the_model_computes_with(recipe, tmp_path):
    model, result = made(tmp_path, recipe)
    stored = load_file(tmp_path / "model.safetensors")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert set(linears) == set(result.linears) and len(linears) == 14
    for name, module in linears.items():
        tensors = {key.removeprefix(f"{name}."): stored[key] for key in stored if key.startswith(f"{name}.")}
        right = by_hand(tensors, result.recipe, module.out_features, module.in_features)
        assert np.allclose(module.dequantize().numpy(), right, rtol=1e-6, atol=1e-7)
    loaded = AutoPagedModelForCausalLM.from_pretrained(tmp_path, paged_config=PagedConfig(num_blocks=32))
    dense = dense_model(loaded, "llama")
    with torch.no_grad():
        expected = dense(PROMPT).logits
        assert relative_error(loaded(PROMPT).logits, expected) < 1e-5
        assert relative_error(model(PROMPT).logits, expected) < 1e-5
    answer = loaded.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert torch.equal(answer, dense.generate(PROMPT, max_new_tokens=6, do_sample=False))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_other_families_load_and_compute_what_their_codes_say(method, family, tmp_path):
    _, result = made(tmp_path, Recipe(method, 4, 16), family)
    assert ("model.layers.0.mlp.shared_expert_gate" in result.dense) == (family == "qwen2_moe" and method != "rtn")
    loaded = AutoPagedModelForCausalLM.from_pretrained(tmp_path, paged_config=PagedConfig(num_blocks=32))
    assert sum(isinstance(module, QuantizedLinear) for module in loaded.modules()) == len(result.linears)
    dense = dense_model(loaded, family).float()  # experts are not multiplied in float64
    with torch.no_grad():
        assert relative_error(loaded(PROMPT).logits, dense(PROMPT).logits) < 1e-5


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_model_errs_less_than_with_rounding_to_the_nearest(method):
    recipe = Recipe(method, 4, 32)
    model, dense, plain = (tiny_model("llama") for _ in range(3))
    windows = texts(40)
    result = quantize_with(model, recipe, windows)
    quantize_with(plain, Recipe("rtn", 4, 32, symmetric=False), ())
    with torch.no_grad():
        right = torch.cat([dense(window).logits for window in windows])
        made_error, plain_error = (
            float((torch.cat([each(window).logits for window in windows]) - right).square().sum())
            for each in (model, plain)
        )
    assert made_error < plain_error
    assert set(result.errors) == set(result.linears) and all(0 < error < 0.1 for error in result.errors.values())
    assert result.scaled == (8 if method == "awq" else 0)


def test_a_model_in_bfloat16_keeps_its_dtype_and_the_norms_that_were_scaled(tmp_path):
    model = tiny_model("llama", torch.bfloat16)
    quantize_with(model, Recipe("awq", 4), texts())
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for name, tensor in stored.items() if "norm" in name or "embed" in name} == {torch.bfloat16}
    assert stored["model.layers.0.mlp.up_proj.scales"].dtype == torch.float16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoPagedModelForCausalLM.from_pretrained(tmp_path, paged_config=PagedConfig(num_blocks=32))
    assert loaded.model.norm.weight.dtype == torch.bfloat16


def test_what_cannot_be_quantized_is_said():
    model = tiny_model("llama")
    with pytest.raises(ConfigurationError, match="`group_size` 40 does not divide the 64 inputs.*is 32, -1"):
        quantize_with(model, Recipe("rtn", 4, 40))
    quantize_with(model, Recipe("rtn", 4))
    with pytest.raises(NotSupportedError, match="is quantized already"):
        quantize_with(model, Recipe("rtn", 4))
    with pytest.raises(NotSupportedError, match="no `nn.Linear` in its layers"):
        choose_linears(tiny_model("gpt2"), Recipe("rtn"))
    with pytest.raises(NotSupportedError, match="AWQ's layout cannot say so"):
        Recipe("awq", 4, 32).config(["a.gate"], ["a.gate_proj"])


@pytest.mark.parametrize("method", BITS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8, 16])
def test_bits_that_a_method_has_not_are_refused(method, bits):
    if bits in BITS[method]:
        assert Recipe(method, bits).bits == bits
        return
    with pytest.raises(ConfigurationError, match=f"`bits` {bits} is not built for `{method}`"):
        Recipe(method, bits)


def test_impossible_recipes_are_refused():
    with pytest.raises(ConfigurationError, match="`method` must be one of rtn, fp8, gptq, awq"):
        Recipe("best")
    for size in (0, -2, 7, 36):
        with pytest.raises(ConfigurationError, match=f"multiple of 8, or -1 for whole rows, got {size}"):
            Recipe("rtn", 4, size)
    with pytest.raises(ConfigurationError, match="float8 weights have one scale a row"):
        Recipe("fp8", 8, 128)
    with pytest.raises(ConfigurationError, match="float8 weights have no zero points"):
        Recipe("fp8", 8, symmetric=False)


def test_group_sizes_are_chosen_to_divide_all_rows():
    assert Recipe("gptq").for_rows([256, 1024]).group_size == 128
    assert Recipe("gptq").for_rows([576, 1536]).group_size == 64
    assert Recipe("awq").for_rows([96]).group_size == 32
    assert Recipe("rtn").for_rows([72]).group_size == -1
    assert Recipe("rtn", 8).for_rows([128]).group_size == -1
    assert Recipe("rtn", 8, 64).for_rows([128]).group_size == 64


@pytest.mark.slow
def test_layers_of_a_real_model_err_less_on_text_that_was_not_looked_at(real_model_path, real_tokenizer):
    """The first two layers; their weights carry noise, since they were 4-bit once."""
    calibration = token_windows(real_tokenizer, calibration_texts(), 128, 8)
    windows = [torch.tensor([window]) for window in token_windows(real_tokenizer, evaluation_texts(), 128, 4)]

    def layers(recipe: Recipe | None) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(real_model_path, dtype=torch.float32)
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.model.layers.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(1 + 0.01 * torch.randn(parameter.shape, generator=generator))
        if recipe is not None:
            texts = [torch.tensor([window]) for window in calibration] if recipe.is_calibrated else ()
            quantize_with(model, recipe, texts)
        with torch.no_grad():
            return [model.model(window).last_hidden_state for window in windows]

    dense = layers(None)
    errors = {
        method: sum(
            float((found - right).square().sum())
            for found, right in zip(layers(Recipe(method, 4, 64, symmetric=False)), dense, strict=True)
        )
        for method in ("rtn", "gptq", "awq")
    }
    assert errors["gptq"] < 0.6 * errors["rtn"] and errors["awq"] < 0.8 * errors["rtn"], errors
