"""Runs whole models on Triton's kernels in the interpreter, recognised as an engine recognises them; a program, see
`interpreted.py`.

Prints what a decode step of a stock model launches and how many bytes that moves, how near its logits are to those
without native layers after its weights have changed, and what an engine answers.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_paged import AutoPagedModelForCausalLM, PagedConfig, SamplingParams
from hf_paged.generation import engine as engine_module
from hf_paged.generation import native_layers
from hf_paged.generation.native_operators import triton_operators
from hf_paged.generation.step import ScheduledRequest, SchedulerOutput
from hf_paged.kernels.triton.operators import TritonLayers
from tests.families import tiny_model
from tests.kernels.triton import interpreter  # noqa: F401 - mends the interpreter's bfloat16
from tests.kernels.triton.meter import Meter

BLOCK_SIZE = 16
NUM_REQUESTS = 4
PROMPTS = [[5, 17, 33, 8, 61, 90, 4, 12, 13, 77, 21], [9, 3, 120]]
# Weights that outweigh activations, as in a model that is worth a GPU.
WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "vocab_size": 512}
make_native_layers = native_layers.native_layers


def on_triton(model: Any, groups: Any, backend: Any, plan: Any) -> Any:
    """What an engine on a GPU does, on a CPU."""
    native_layers.native_operators = lambda: triton_operators(backend)
    return make_native_layers(model, groups, backend, plan)


engine_module.native_layers = on_triton


def paged(family: str, dtype: torch.dtype = torch.float32, num_blocks: int = 24, **overrides: Any) -> Any:
    config = PagedConfig(attn_backend="triton", num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return AutoPagedModelForCausalLM.from_model(tiny_model(family, dtype, **overrides), paged_config=config)


def decoding(context: int) -> SchedulerOutput:
    """Requests that are told of a context which nobody has computed: what is launched does not depend on that."""
    num_blocks = -(-context // BLOCK_SIZE)
    shares = [
        ScheduledRequest(
            str(i),
            context - 1,
            1,
            tuple(range(context)),
            (tuple(range(i * num_blocks, (i + 1) * num_blocks)),),
            is_new=True,
            sample_ids=(str(i),),
        )
        for i in range(NUM_REQUESTS)
    ]
    return SchedulerOutput(0, tuple(shares))


# ------------------------------------------------------------------ launches and bytes


class InLayers:
    """What the operator for layers launches, of all that a meter counts."""

    def __init__(self, meter: Meter):
        self._meter = meter
        self._run: Callable = TritonLayers.__call__
        self.launches = dict[str, int]()

    def __enter__(self) -> InLayers:
        def counted(layers: TritonLayers, *args: Any) -> torch.Tensor:
            before = self._meter.launches.copy()
            result = self._run(layers, *args)
            for name, count in (self._meter.launches - before).items():
                self.launches[name] = self.launches.get(name, 0) + count
            return result

        TritonLayers.__call__ = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        TritonLayers.__call__ = self._run  # type: ignore[method-assign]


def measure(family: str, dtype: torch.dtype, contexts: tuple[int, ...], **overrides: Any) -> list[dict[str, Any]]:
    """Decode steps of some requests, as a runner takes them."""
    num_blocks = NUM_REQUESTS * -(-max(contexts) // BLOCK_SIZE)
    model = paged(family, dtype, num_blocks, **overrides)
    runner = model.engine._make_runner()
    results = []
    for context in contexts:
        inputs = runner.inputs_of(decoding(context))
        with Meter() as meter, InLayers(meter) as layers:
            runner.call(inputs)
        config = model.config
        weights = sum(parameter.nbytes for parameter in model.parameters()) - model.model.embed_tokens.weight.nbytes
        per_token = sum(2 * layer[0].nbytes for pool in runner.pools for layer in pool.keys) // BLOCK_SIZE
        rows = NUM_REQUESTS * (2 * config.hidden_size + config.vocab_size) * dtype.itemsize
        results.append(
            {
                "name": f"{family}, context {context}",
                "native": model.engine.plan.native,
                "layers": layers.launches,
                "num_layers": config.num_hidden_layers,
                "others": dict(meter.launches - type(meter.launches)(layers.launches)),
                "bytes": meter.num_bytes,
                "ideal": weights + NUM_REQUESTS * (context + 1) * per_token + rows,
            }
        )
    return results


# ------------------------------------------------------------------ weights of the moment


def write(layer: Any) -> None:
    layer.mlp.up_proj.weight.mul_(-1)
    layer.self_attn.k_proj.bias.add_(1)


def replace_memory(layer: Any) -> None:
    layer.self_attn.v_proj.weight.data = -layer.self_attn.v_proj.weight.data.clone()


def replace_object(layer: Any) -> None:
    layer.mlp.gate_proj.weight = torch.nn.Parameter(-layer.mlp.gate_proj.weight.detach().clone())


def weights_of_the_moment(model: Any) -> list[dict[str, Any]]:
    """Logits of native steps against those of the same runner without native layers."""
    runner = model.engine._make_runner()
    inputs = runner.inputs_of(decoding(20))
    before, results = runner.call(inputs), []
    for change in (write, replace_memory, replace_object):
        change(model.model.layers[1])
        logits = runner.call(inputs)
        native, runner._forwards = runner._forwards, None
        expected, runner._forwards = runner.call(inputs), native
        results.append(
            {
                "name": f"weights: {change.__name__}",
                "error": float((logits - expected).norm() / expected.norm()),
                "changed": float((logits - before).norm() / before.norm()),
                "native": model.engine.plan.native,
            }
        )
        before = logits
    return results


# ------------------------------------------------------------------ an engine


def answered(model: Any) -> dict[str, Any]:
    """Greedy answers on these operators, and the model's own."""
    new = 3
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    answers = [list(output.outputs[0].token_ids) for output in model.engine.generate(PROMPTS, params)]
    expected = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(new):
                tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    pool = StorageWeakRef(model.engine._loop.ready_runner().pools[0].keys[0].untyped_storage())
    gc.collect()
    gc.disable()
    model.engine.release()
    gc.enable()
    return {
        "name": f"engine {model.config.model_type}",
        "native": model.engine.plan.native,
        "same": answers == expected,
        "is_pool_free": pool.expired(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for result in measure("llama", torch.bfloat16, (90, 300), **WIDE):
        print(json.dumps(result), flush=True)
    llama = paged("llama", attention_bias=True)
    for paged_model in (llama, paged("qwen3")):
        print(json.dumps(answered(paged_model)), flush=True)
    with torch.no_grad():
        for result in weights_of_the_moment(llama):
            print(json.dumps(result), flush=True)
