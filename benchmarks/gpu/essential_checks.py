"""What must be right before anything is worth being timed: one check a process, told as a line of JSON.

    python -m benchmarks.gpu.essential_checks SETTINGS NAME

They are those of the tests that need a GPU, on small seeded models in float32. In a dry run the kernels run in Triton's
interpreter, and graphs are the tests' recorder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from hf_paged import AutoPagedModelForCausalLM, SamplingParams

from .case_worker import judge
from .engines import settings_of
from .models import random_model, random_prompts
from .settings import Deadline, Run, Settings
from .sizes import sizes_for
from .stand_ins import as_on_a_gpu

VOCAB_SIZE = 199
LENGTHS = (3, 40, 130, 5, 260, 17, 90)
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 40}
Found = dict[str, Any]
_LEAST = "hf_paged.kernels.triton.shared_prefix.MIN_KEYS_PER_SPLIT"
_PREPARED = "hf_paged.kernels.triton.backend.prepared_prefixes"


def small_model(settings: Settings) -> Any:
    """Returns a stock model of few layers with the small model's heads, in float32.

    Args:
        settings (`Settings`):
            What the command line decided.
    """
    size = sizes_for(settings.dry_run).small_model
    num_layers = 1 if settings.dry_run else 2
    size = dataclasses.replace(size, num_layers=num_layers, vocab_size=VOCAB_SIZE, tied=False)
    return random_model(size, settings.device, torch.float32, settings.seed)


def paged_model(settings: Settings, model: Any = None, **changed: Any) -> Any:
    """Returns a model with an engine on Triton's kernels.

    Args:
        settings (`Settings`):
            What the command line decided.
        model (`PreTrainedModel`, *optional*):
            A stock model; by default `small_model`.
        changed (`Any`):
            Settings of the engine other than usual.
    """
    limits: dict[str, Any] = {"max_num_seqs": 12, "num_blocks": 200, "max_model_len": 512, "attn_backend": "triton"}
    if settings.dry_run:
        limits |= {"max_num_seqs": 2, "num_blocks": 30, "max_model_len": 80}
    run = Run(settings, Deadline(0.0), {})
    model = small_model(settings) if model is None else model
    return AutoPagedModelForCausalLM.from_model(model, paged_config=settings_of(run, **limits | changed))


def answers(model: Any, settings: Settings, wishes: dict[str, Any]) -> list[list[int]]:
    """Returns the tokens that an engine gives for some prompts.

    Args:
        model (`PagedGenerationMixin`):
            The model.
        settings (`Settings`):
            What the command line decided.
        wishes (`dict[str, Any]`):
            Of the sampling parameters.
    """
    prompts = random_prompts([3, 12] if settings.dry_run else list(LENGTHS), VOCAB_SIZE, settings.seed)
    counts = [2, 3] if settings.dry_run else [30 + i for i in range(len(prompts))]
    params = [SamplingParams(max_tokens=count, seed=i, ignore_eos=True, **wishes) for i, count in enumerate(counts)]
    return [list(output.outputs[0].token_ids) for output in model.engine.generate(prompts, params)]


def graphs(settings: Settings, ahead: bool = False) -> Found:
    """Steps that are replayed give the tokens of others, also after a weight was written.

    Args:
        settings (`Settings`):
            What the command line decided.
        ahead (`bool`, defaults to `False`):
            Whether steps are put together while the one before is running.
    """
    model = paged_model(settings, async_scheduling=ahead)
    answers(model, settings, GREEDY)  # makes the runner
    runner, same = model.engine._loop.runner, []
    taken = runner.graphs
    for wishes in (GREEDY, SAMPLED):
        with torch.no_grad():
            model.model.layers[-1].self_attn.o_proj.weight.mul_(-2)
        runner.graphs = taken
        replayed = answers(model, settings, wishes)
        runner.graphs = None
        same.append(answers(model, settings, wishes) == replayed)
    return {
        "passed": all(same) and taken.num_replays > 1,
        "same_tokens": same,
        "replays": taken.num_replays,
        "graphs": len(taken.shapes),
        "notes": list(model.engine.plan.notes),
    }


def steps_ahead(settings: Settings) -> Found:
    """The same with steps that overlap.

    Args:
        settings (`Settings`):
            What the command line decided.
    """
    return graphs(settings, ahead=True)


def native_layers(settings: Settings) -> Found:
    """Layers are recognised, their weights laid side by side without a change, and the tokens are stock's choice.

    Args:
        settings (`Settings`):
            What the command line decided.
    """
    from hf_paged.kernels.triton.fused_weights import joined

    model = small_model(settings)
    count = len(model.model.layers)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ours = paged_model(settings, model)
    native = ours.engine.plan.native
    unchanged = all(torch.equal(tensor, weights[name]) for name, tensor in ours.state_dict().items())
    attention = ours.model.layers[0].self_attn
    together = joined([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
    prompts = random_prompts([11, 3], VOCAB_SIZE, settings.seed)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)
    error = 0.0
    for prompt, output in zip(prompts, ours.engine.generate(prompts, params), strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt], device=settings.device)
            expected = ours(input_ids=ids, use_cache=False).logits[0, -1].float().log_softmax(-1)
        (found,) = output.outputs[0].logprobs
        error = max(error, *(abs(one.logprob - float(expected[token])) for token, one in found.items()))
    return {
        "passed": native.startswith(f"{count} of {count} layers in 1 call") and unchanged and together,
        "native": native,
        "weights_unchanged": unchanged,
        "weights_together": together,
        "error": error,
        "allowed": 1e-3,
    }


def sleeping(settings: Settings) -> Found:
    """After sleep and wake-up parameters are the same objects with the same numbers, and tokens the same.

    Args:
        settings (`Settings`):
            What the command line decided.
    """
    model = paged_model(settings)
    engine, parameters = model.engine, list(model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    tokens, devices = answers(model, settings, GREEDY), []
    same = []
    for _ in range(1 if settings.dry_run else 2):
        engine.sleep()
        devices.append(parameters[0].device.type)
        engine.wake_up()
        same.append(answers(model, settings, GREEDY) == tokens)
    kept = all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    unchanged = all(map(torch.equal, before, parameters))
    return {
        "passed": all(same) and kept and unchanged and set(devices) == {"cpu"},
        "same_tokens": same,
        "same_parameters": kept,
        "weights_unchanged": unchanged,
    }


def shared_prefix(settings: Settings) -> Found:
    """Keys that requests share are read once, and the tokens are those of reading them for each.

    Args:
        settings (`Settings`):
            What the command line decided.
    """
    count, length, tokens = (4, 48, 2) if settings.dry_run else (8, 700, 16)
    prefix, *rest = random_prompts([length] + [5] * count, VOCAB_SIZE, settings.seed)
    prompts = [prefix + own for own in rest]
    params = [SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)] * count
    blocks = length // 16 + 4 * count
    config = {"max_num_seqs": count, "num_blocks": blocks, "max_model_len": length + 64, "enforce_eager": True}
    ours = paged_model(settings, **config)
    found = []
    from hf_paged.kernels.triton.backend import prepared_prefixes

    def look(metadata: Any) -> Any:
        found.append(prepared_prefixes(metadata))
        return found[-1]

    def tokens_of() -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in ours.engine.generate(prompts, params)]

    ours.engine.generate([prefix], params[:1])  # leaves the prefix in the cache
    # In the interpreter long prefixes take long.
    least = mock.patch(_LEAST, 32) if settings.dry_run else contextlib.nullcontext()
    with mock.patch(_PREPARED, look), least:
        once = tokens_of()
    with mock.patch(_PREPARED, lambda metadata: None):
        each = tokens_of()
    shared = sum(prefixes is not None for prefixes in found)
    return {"passed": once == each and shared > 0, "same_tokens": once == each, "steps_that_share": shared}


def refused_captures(settings: Settings) -> Found:
    """A call that waits for the device is not captured, and leaves the device as it was.

    Args:
        settings (`Settings`):
            What the command line decided.
    """
    from hf_paged.generation.graphs import settings as graph_settings
    from hf_paged.generation.graphs.capture import NotCapturableError

    maker = graph_settings.CudaGraphs(torch.device(settings.device))
    x = torch.ones(3, device=settings.device)
    calls: list[Callable[[], Any]] = [lambda: x * x.sum().item(), lambda: x[x > 0]]
    if not settings.dry_run:
        calls += [lambda: x.cpu(), lambda: x + torch.ones(3).to(settings.device)]
    refused = 0
    for call in calls:
        for use in (maker.warm_up, maker.capture):
            try:
                use(call)
            except NotCapturableError:
                refused += 1
    target = torch.zeros(3, device=settings.device)
    maker.warm_up(lambda: target.copy_(x * 2))
    replay = maker.capture(lambda: target.copy_(x * 2))
    x.fill_(5)
    replay()
    right = target.tolist() == [10.0] * 3 and bool(torch.rand(3, device=settings.device).isfinite().all())
    return {"passed": right and refused == 2 * len(calls), "refused": refused, "of": 2 * len(calls), "replayed": right}


CHECKS: dict[str, Callable[[Settings], Found]] = {
    "graphs": graphs,
    "native_layers": native_layers,
    "sleeping": sleeping,
    "steps_ahead": steps_ahead,
    "shared_prefix": shared_prefix,
    "refused_captures": refused_captures,
}


def main() -> None:
    """Runs the check that the command line names."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings, name = Settings.from_json(sys.argv[1]), sys.argv[2]
    if settings.dry_run:
        torch.set_num_threads(1)
        importlib.import_module("tests.kernels.triton.interpreter")  # mends bfloat16 in the interpreter
    with as_on_a_gpu(settings):
        print(json.dumps(judge(name, lambda: CHECKS[name](settings)), default=str), file=answer, flush=True)


if __name__ == "__main__":
    main()
