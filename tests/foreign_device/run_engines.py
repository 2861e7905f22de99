"""Runs engines on the foreign device; a program: the library, then families. Prints a line of JSON for each."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from hf_paged import AutoPagedModelForCausalLM, PagedConfig, SamplingParams
from hf_paged.generation import engine as engine_module
from hf_paged.generation.native_layers import NativeLayers
from hf_paged.generation.native_operators import REFERENCE
from hf_paged.kernels.reference import ReferenceBackend
from hf_paged.modeling.patterns import plain
from tests.families import tiny_model
from tests.foreign_device.building import NAME, load

PROMPTS = [[5, 17, 33, 8, 61, 90, 4, 12, 13, 77, 21], [9, 3, 120]]
NEW = 5


def as_on_a_gpu(model: Any, groups: Any, backend: Any, plan: Any) -> NativeLayers:
    """Native layers of the kind that a GPU has, with operators in plain torch."""
    operators = dataclasses.replace(REFERENCE, joins_linears=True)
    sizes = {"block_size": plan.block_size, "max_position": plan.max_model_len}
    return NativeLayers(model, groups, backend, operators=operators, **sizes)


def open_the_package_to_it() -> None:
    engine_module.native_layers = as_on_a_gpu
    plain.DEVICE_TYPES = plain.DEVICE_TYPES | {NAME}
    capable = ReferenceBackend.capabilities
    device_types = capable.device_types | {NAME}
    ReferenceBackend.capabilities = dataclasses.replace(capable, device_types=device_types)


def run(family: str, counter: Any, is_async: bool) -> dict[str, Any]:
    config = PagedConfig(
        attn_backend="reference", num_blocks=32, max_num_batched_tokens=32, max_num_seqs=4, async_scheduling=is_async
    )
    model = AutoPagedModelForCausalLM.from_model(tiny_model(family).to(NAME), paged_config=config)
    engine, counts = model.engine, []
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    states = [engine.add_request(prompt, params) for prompt in PROMPTS]
    while engine.has_unfinished:
        before = counter.counts()
        engine.step()
        counts.append([after - first for first, after in zip(before, counter.counts(), strict=True)])
    expected = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(NEW):
                ids = torch.tensor([tokens], device=NAME)
                tokens.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    return {
        "name": f"{family}{' ahead' * is_async}",
        "native": engine.plan.native,
        "device": str(engine.plan.device),
        "same": [list(state.output().outputs[0].token_ids) for state in states] == expected,
        "counts": counts,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    device = load(Path(sys.argv[1]))
    open_the_package_to_it()
    for name in sys.argv[2:]:
        print(json.dumps(run(name, device, is_async=False)), flush=True)
    print(json.dumps(run(sys.argv[2], device, is_async=True)), flush=True)
