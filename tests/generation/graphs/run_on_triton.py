"""Replays decoding steps of Triton's kernels, in its interpreter; a program, see `interpreted.py`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from hf_paged.kernels.triton import configs

configs.MIN_KEYS_PER_SPLIT = 32  # read by the kernel when it is made: short contexts are divided too

from hf_paged import SamplingParams  # noqa: E402
from hf_paged.generation.graphs import sizes  # noqa: E402
from tests.generation.graphs.engines import graphs_of, set_up_triton  # noqa: E402
from tests.kernels.triton import interpreter  # noqa: E402, F401 - mends the interpreter's bfloat16

LIMITS: dict[str, Any] = {
    "attn_backend": "triton",
    "max_num_seqs": 2,
    "num_blocks": 30,
    "block_size": 16,
    "max_model_len": 80,
}
# Contexts of up to 32 tokens and of up to 80: the second request grows from the one into the other.
PROMPTS = [[5, 17, 33], [(7 * i + 3) % 190 for i in range(30)]]


def answers_of(engine: Any, **wishes: Any) -> list[list[int]]:
    params = [SamplingParams(ignore_eos=True, max_tokens=count, seed=count, **wishes) for count in (2, 5)]
    return [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, params)]


def compare(family: str, native: bool, sizes_wanted: tuple[int, ...], **limits: Any) -> dict[str, Any]:
    """The same requests with graphs and without, after a weight was written in place."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sizes, "SMALLEST_CONTEXT", 32)
        monkeypatch.setattr(sizes, "CONTEXT_FACTOR", 2)
        setup = set_up_triton(monkeypatch, native)
        model = setup.model(family, cuda_graph_sizes=sizes_wanted, **LIMITS | limits)
        engine, graphs, same = model.engine, graphs_of(model.engine), []
        for wishes in ({"temperature": 0}, {"temperature": 1.0, "top_k": 30}):
            with torch.no_grad():
                model.model.layers[1].self_attn.o_proj.weight.mul_(-2)
            engine._loop.runner.graphs = graphs
            replayed = answers_of(engine, **wishes)
            engine._loop.runner.graphs = None
            same.append(replayed == answers_of(engine, **wishes))
        return {
            "name": f"{family}{', native' * native}",
            "same": same,
            "replays": graphs.num_replays,
            "shapes": graphs.shapes,
            "native": engine.plan.native,
            "kernels": dict(Counter(name for name in setup.makers[-1].graphs[0].names if name.endswith("_kernel"))),
            "notes": engine.plan.notes,
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(compare("llama", True, (2,))), flush=True)
    if "--all" in sys.argv:
        print(json.dumps(compare("qwen3", True, (1, 2), async_scheduling=True)), flush=True)
        print(json.dumps(compare("mistral", False, (2,))), flush=True)
