"""K/V pools and shared prefixes of an engine on Triton's kernels, in the interpreter; a program, see `interpreted.py`.

Prints for each pool whether its blocks were copied and cleared as torch would, and by what; and what engines answered
to requests that begin alike, beside Transformers or another backend.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from hf_paged import SamplingParams
from hf_paged.generation import engine as engine_module
from hf_paged.generation.kv_pool import KVPool
from hf_paged.kernels.quantized_blocks import tensors_of
from hf_paged.kernels.triton import shared_prefix
from hf_paged.kernels.triton.backend import TritonBackend
from hf_paged.modeling.layer_groups import LayerGroup, LayerSpec
from tests.families import greedy, tiny_model
from tests.kernels.triton import interpreter  # noqa: F401 - mends the interpreter's bfloat16
from tests.kernels.triton.meter import Meter
from tests.paged_models import paged_engine

PAIRS = ((0, 5), (3, 7), (1, 2), (0, 9))
NUM_BLOCKS = 12
TINY = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
COMMON = [(7 * i) % 190 + 3 for i in range(256)]
# Heads, Dk and Dv of each layer, the dtype, the block size, and the dtype of codes.
POOLS: dict[str, tuple[list[tuple[int, int, int]], torch.dtype, int, torch.dtype | None]] = {
    "alike": ([(2, 32, 32)] * 3, torch.bfloat16, 16, None),
    "of different heads": ([(2, 32, 48), (1, 16, 16), (3, 8, 8)], torch.float32, 16, None),
    "of codes": ([(2, 32, 48), (1, 16, 16)], torch.bfloat16, 16, torch.float8_e4m3fn),
    "of blocks that no kernel takes": ([(1, 5, 5)] * 2, torch.float16, 1, None),
}


def pool(name: str) -> dict[str, Any]:
    shapes, dtype, block_size, codes = POOLS[name]
    device = torch.device("cpu")
    layers = [
        LayerSpec(i, heads, heads, key_dim, value_dim, dtype, device, None, cache_dtype=codes)
        for i, (heads, key_dim, value_dim) in enumerate(shapes)
    ]
    pool = KVPool(LayerGroup(tuple(layers)), NUM_BLOCKS, block_size)
    tensors = tensors_of(*pool.keys, *pool.values)
    tensors = [tensor.view(torch.int8) if tensor.dtype == codes else tensor for tensor in tensors]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape) * 50)
    expected = [tensor.clone() for tensor in tensors]
    for tensor in expected:
        for source, destination in PAIRS:
            tensor[destination] = tensor[source]
        tensor[[4, 6]] = 0
    pairs = torch.tensor(PAIRS).T.contiguous()
    assert pool.take(range(8), ()) == []
    pool.copy(pairs[:, :1].contiguous())  # the first copy finds out what copies
    with Meter() as meter:
        pool.copy(pairs)
    # Nothing was ever written to block 11, as far as the pool knows.
    pool.clear(torch.tensor(pool.take((), (4, 6, 11))))
    return {
        "name": name,
        "equal": all(map(torch.equal, tensors, expected)),
        "launches": dict(meter.launches),
    }


def engine(branches: int) -> dict[str, Any]:
    """Five requests with 256 tokens in common, found in the prefix cache, or without one as branches of one request."""
    prompts = [COMMON + [20 + i, 30 + 2 * i] for i in range(1 if branches > 1 else 5)]
    params = SamplingParams(temperature=0 if branches == 1 else 1, seed=1, n=branches, max_tokens=2, ignore_eos=True)
    config = {"block_size": 128, "num_blocks": 20, "max_num_seqs": 8, "max_model_len": 384}
    config["enable_prefix_caching"] = branches == 1
    shares, searches = [], []
    prepare, find = TritonBackend.prepare, shared_prefix.SharedPrefixes.find

    class Watched(TritonBackend):
        def prepare(self, metadata: Any, num_kv_heads: int) -> None:
            prepare(self, metadata, num_kv_heads)
            shares.append(metadata.prepared.get(shared_prefix.PREPARED) is not None)

    def searched(*args: Any) -> Any:
        searches.append(args)
        return find(*args)

    def tokens(backend: str) -> list[list[int]]:
        one = paged_engine(overrides=TINY, attn_backend=backend, **config)
        if backend == "triton":
            one.backend.__class__ = Watched
        outputs = []
        for some in (prompts[:1], prompts[1:]):  # the others find what the first has computed
            outputs += one.generate(some, params)
        return [answer.token_ids for output in outputs for answer in output.outputs]

    shared_prefix.SharedPrefixes.find = searched
    result = {"name": "prompts" if branches == 1 else "branches", "tokens": tokens("triton")}
    shared_prefix.SharedPrefixes.find = find
    result["expected"] = greedy(tiny_model("llama", **TINY), prompts, 2) if branches == 1 else tokens("reference")
    return result | {"steps": len(shares), "steps_that_share": sum(shares), "searches": len(searches)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        for case in POOLS:
            torch.manual_seed(2)
            print(json.dumps(pool(case)), flush=True)
    # Neither is looked at here, and in the interpreter each takes long. A CPU's native layers attend by themselves.
    engine_module.check_against_stock = engine_module.native_layers = lambda *args: None
    for count in (1, 5):
        print(json.dumps(engine(count)), flush=True)
