"""`quantize=`: dense checkpoints become quantized models that compute what their rounded weights say."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from hf_paged import LLM, AutoPagedModelForCausalLM, ConfigurationError, NotSupportedError, PagedConfig
from hf_paged.kernels.cpu import library
from hf_paged.quantization.embedding import PackedEmbedding, TiedHead
from hf_paged.quantization.linear import QuantizedLinear
from hf_paged.quantization.on_load import SCHEMES, quantize_model
from tests.families import tiny_model
from tests.quantization import packers
from tests.quantization.dense import dense_model
from tests.quantization.test_formats import CASES, PROMPT, relative_error
from tests.tokenizers_for_tests import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
FAMILIES = ("llama", "gemma2", "gpt_neox", "opt", "phi3", "qwen3", "olmoe")


def saved(tmp_path, family: str = "llama", dtype: torch.dtype = torch.float32, **overrides):
    tiny_model(family, dtype, **overrides).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def load(folder, **options):
    return AutoPagedModelForCausalLM.from_pretrained(folder, paged_config=PagedConfig(num_blocks=32), **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_model_computes_what_its_rounded_weights_say(scheme: str, family: str, tmp_path):
    model = load(saved(tmp_path, family), quantize=scheme)
    dense = dense_model(model, family)
    with torch.no_grad():
        assert relative_error(model(PROMPT).logits, dense(PROMPT).logits) < (1e-3 if scheme == "w8a8" else 1e-5)
    answer = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(answer, dense.generate(PROMPT, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_are_still_computed_natively(scheme: str, tmp_path):
    model = load(saved(tmp_path), quantize=scheme)
    assert not library.load() or model.engine.plan.native.startswith("2 of 2 layers in 1 call")


def test_weights_are_rounded_to_the_nearest(tmp_path):
    dense = tiny_model("llama")
    for scheme, steps in (("int8", 127), ("int4", 7.5), ("w8a8", 127)):
        model = load(saved(tmp_path), quantize=scheme)
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                weight = dense.get_submodule(name).weight
                half_a_step = weight.abs().amax(1, keepdim=True) / steps / 2
                assert bool(((module.dequantize() - weight).abs() <= half_a_step * 1.02).all())


def test_a_tied_embedding_is_kept_once_and_saved_dense(tmp_path):
    model = load(saved(tmp_path, tie_word_embeddings=True), quantize="int4")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, PackedEmbedding) and isinstance(head, TiedHead) and head.weight is embedding.weight
    dense = dense_model(model, "llama", tie_word_embeddings=True)
    with torch.no_grad():
        assert relative_error(model(PROMPT).logits, dense(PROMPT).logits) < 1e-5
    model.save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved/model.safetensors")
    assert "lm_head.weight" not in tensors and tensors["model.embed_tokens.weight"].dtype == torch.float32
    again = load(tmp_path / "saved")
    right = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(again.generate(PROMPT, max_new_tokens=8, do_sample=False), right)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_saved_is_a_checkpoint_of_compressed_tensors(scheme: str, tmp_path):
    model = load(saved(tmp_path, dtype=torch.bfloat16), quantize=scheme)
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["ignore"] == ["lm_head"]
    again = load(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(PROMPT).logits, model(PROMPT).logits)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            assert torch.equal(again.get_submodule(name).weight, module.weight)


def test_a_quantized_model_takes_no_more_room_than_its_codes(tmp_path):
    dense = saved(tmp_path, dtype=torch.bfloat16, hidden_size=128, intermediate_size=512, num_attention_heads=4)
    weights = lambda model: sum(p.nbytes for n, p in model.named_parameters() if "proj" in n)  # noqa: E731
    before = weights(load(dense))
    assert weights(load(dense, quantize="int4")) <= 0.29 * before  # 4.5 bits of 16
    assert weights(load(dense, quantize="int8")) <= 0.54 * before


def test_conversions_change_what_is_computed_in_and_not_the_codes(tmp_path):
    model = load(saved(tmp_path, tie_word_embeddings=True), quantize="fp8")
    rows = {name: p.clone() for name, p in model.named_parameters() if "proj" in name or "embed" in name}
    model.to(torch.bfloat16)
    with torch.no_grad():
        assert model(PROMPT).logits.dtype == torch.bfloat16
    for name, before in rows.items():
        assert torch.equal(model.get_parameter(name), before)


def test_gradients_reach_inputs_through_quantized_linears(tmp_path):
    model = load(saved(tmp_path), quantize="int8")
    embeds = model.get_input_embeddings()(PROMPT).detach().requires_grad_()
    model(inputs_embeds=embeds).logits.square().mean().backward()
    dense = dense_model(model, "llama")
    same = embeds.detach().double().requires_grad_()
    dense(inputs_embeds=same).logits.square().mean().backward()
    assert relative_error(embeds.grad, same.grad) < 1e-4


def test_unknown_schemes_and_quantized_checkpoints_are_refused(tmp_path):
    folder = saved(tmp_path)
    with pytest.raises(ConfigurationError, match="`quantize` must be one of 'int8', 'int4', 'fp8', 'w8a8', got 'int3'"):
        load(folder, quantize="int3")
    model = load(folder, quantize="int8")
    with pytest.raises(NotSupportedError, match="quantized already"):
        quantize_model(model, "int8")
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(NotSupportedError, match="quantized already"):
        load(tmp_path / "saved", quantize="int4")


def test_llm_takes_the_names_of_vllm(tmp_path):
    folder = saved(tmp_path)
    llm = LLM(str(folder), tokenizer=TOKENIZER, quantization="int8", num_blocks=32)
    assert isinstance(llm.model.model.layers[0].mlp.up_proj, QuantizedLinear)
    llm.close()
    packers.write_checkpoint(tmp_path / "gptq", *CASES["gptq, 4 bits"])
    for name in ("gptq", "gptq_marlin"):
        LLM(str(tmp_path / "gptq"), tokenizer=TOKENIZER, quantization=name, num_blocks=32).close()
    for path, name, words in (
        (folder, "awq", "is not quantized. Leave it out, or quantize it at load: 'int8'"),
        (tmp_path / "gptq", "awq", "is quantized by 'gptq': leave it out"),
        (tmp_path / "gptq", "int8", "is quantized by 'gptq': leave it out"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            LLM(str(path), tokenizer=TOKENIZER, quantization=name)
