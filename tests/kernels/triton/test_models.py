"""Stock models whose layers are recognised and run on Triton's kernels: launches, bytes, answers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from hf_paged import AutoPagedModelForCausalLM, PagedConfig, SamplingParams
from hf_paged.kernels.triton.fused_weights import joined
from tests.families import tiny_model
from tests.kernels.triton.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# What waits for the device, or copies to it or from it, one by one.
WAITING = {"_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero", "masked_select", "unique", "lift_fresh"}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """What the cases came to, in one process."""
    return {result["name"]: result for result in run_interpreted("-m", "tests.kernels.triton.run_models")}


@pytest.mark.parametrize(("context", "launches"), [(90, 9), (300, 10)])
def test_a_layer_of_a_decode_step_takes_at_most_ten_launches(results, context, launches):
    result = results[f"llama, context {context}"]
    assert result["native"] == "2 of 2 layers in 1 call, 1 norm"
    in_layers, num_layers = result["layers"], result["num_layers"]
    per_layer = {name: count // num_layers for name, count in in_layers.items()}
    # q, k, v | rope and store | attention | o | sum and norm | gate, up | activation | down | sum and norm
    expected = {"linear": 4, "norm_kernel": 2, "rope_store_kernel": 1, "paged_attention_kernel": 1}
    expected["activation_kernel"] = 1
    if context == 300:
        expected["merge_parts_kernel"] = 1  # of what is split of a long context
    assert per_layer == expected and sum(per_layer.values()) == launches
    # The last sum is the layers', too.
    assert sum(in_layers.values()) == num_layers * launches + 1


def test_around_its_layers_a_step_launches_no_more_than_the_model_does(results):
    result = results["llama, context 90"]
    others = result["others"]
    assert (others["embedding"], others["norm_kernel"], others["index"], others["linear"]) == (1, 1, 1, 1)
    assert sum(others.values()) <= 14  # ten make the angles of the positions
    assert not WAITING & {*others, *result["layers"]}


@pytest.mark.parametrize("context", [90, 300])
def test_a_step_moves_hardly_more_bytes_than_it_must(results, context):
    result = results[f"llama, context {context}"]
    assert result["ideal"] <= result["bytes"] <= 1.10 * result["ideal"]


@pytest.mark.parametrize("change", ["write", "replace_memory", "replace_object"])
def test_weights_are_those_of_the_moment(results, change):
    result = results[f"weights: {change}"]
    assert result["error"] < 1e-5 < result["changed"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_engine_on_these_operators_answers_what_the_model_does(results, family):
    result = results[f"engine {family}"]
    assert result["native"].startswith("2 of 2 layers in 1 call")
    assert result["same"]
    assert result["is_pool_free"]  # at once, when the engine is released


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt_neox"])
def test_a_model_on_a_gpu_is_recognised_and_answers_as_alone(family, dtype):
    model = tiny_model(family, dtype).cuda()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(num_blocks=64))
    engine = model.engine
    assert engine.plan.native.startswith("2 of 2 layers in 1 call")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    if family == "llama":
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        for linears in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
            assert joined([linear.weight for linear in linears]) is not None
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
    for prompt in ([5, 17, 33, 8, 61, 90, 4, 12, 13, 77, 21], [9, 3, 120]):
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([prompt], device="cuda"), use_cache=False).logits[0, -1]
        expected = alone.float().log_softmax(-1)
        (output,) = engine.generate([prompt], params)
        for token, found in output.outputs[0].logprobs[0].items():
            assert abs(found.logprob - float(expected[token])) < (1e-3 if dtype == torch.float32 else 0.3)
