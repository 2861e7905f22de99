"""What was promised of the device's memory and what is used of it; sleep and wake-up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from hf_paged import SamplingParams
from hf_paged.cache import memory
from hf_paged.tools.bench.engine_run import forced, weight_bytes

from ..engines import paged
from ..models import random_model, random_prompts
from ..settings import Run
from ..sizes import sizes_for
from ..stand_ins import counted_memory
from ..timing import synchronize

_GIB = 1 << 30
DRY_TOTAL = 64 << 20
SIZES = (1, 8, 32, 128, 512)
# What takes most memory of all that can be asked of the sampler.
PARAMS = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1, logprobs=1, seed=3, max_tokens=4, ignore_eos=True
)


def run(run: Run) -> Iterator[dict[str, Any]]:
    """Yields what is used after the first step and after the largest ones, and what sleeping frees.

    Args:
        run (`Run`):
            What the part is given.
    """
    size = sizes_for(run.dry_run).memory_model
    with counted_memory(run.settings, DRY_TOTAL):
        model = random_model(size, run.device, sizes_for(run.dry_run).dtype, run.settings.seed)
        # So many that the pool has use for all memory.
        limits: dict[str, Any] = {"max_num_seqs": 512, "cuda_graph_sizes": SIZES}
        if run.dry_run:
            limits = {"max_num_seqs": 8, "num_blocks": None, "enforce_eager": True, "attn_backend": "torch_sdpa"}
        with paged(model, run, **limits) as ours:
            watch = ours.engine.memory_watch
            assert watch is not None and watch.used is not None, "an accelerator's memory is watched"
            yield usage_row(ours, run, watch.used, "after the first step")
            fill(ours, run)
            device = torch.device(run.device)
            used = memory.total_memory(device) - memory.free_memory(device)
            yield usage_row(ours, run, used, "after the largest steps")
            yield sleep_row(ours, run)


def fill(ours: Any, run: Run) -> None:
    """Runs steps of all kinds at the limits: short prompts in all seats, a long one, all seats decoding.

    Args:
        ours (`PagedGenerationMixin`):
            The model.
        run (`Run`):
            What the part is given.
    """
    plan = ours.engine.plan
    longest = min(plan.max_num_batched_tokens, plan.max_model_len) - 8
    lengths = [16] * plan.max_num_seqs + [longest] + [40] * 8
    prompts = random_prompts(lengths, ours.config.vocab_size, run.settings.seed)
    ours.engine.generate(prompts, PARAMS)
    synchronize(run.device)


def usage_row(ours: Any, run: Run, used: int, when: str) -> dict[str, Any]:
    """Returns what is used beside what was planned.

    Args:
        ours (`PagedGenerationMixin`):
            The model.
        run (`Run`):
            What the part is given.
        used (`int`):
            Bytes.
        when (`str`):
            In words.
    """
    plan = ours.engine.plan.memory
    share = (used - min(plan.planned, plan.limit)) / plan.total
    name = "first_step_share" if when == "after the first step" else "memory_share"
    return {
        "when": when,
        "used_bytes": used,
        "planned_bytes": plan.planned,
        "limit_bytes": plan.limit,
        "total_bytes": plan.total,
        name: share,
        "plan": plan.describe(),
        "says": f"{when} {used / _GIB:.2f} GiB are used, {share:+.2%} of all memory beside the plan: {plan.describe()}",
    }


def sleep_row(ours: Any, run: Run) -> dict[str, Any]:
    """Returns how long it takes to sleep, to wake up, and to answer again, and what is free meanwhile.

    Args:
        ours (`PagedGenerationMixin`):
            The model.
        run (`Run`):
            What the part is given.
    """
    engine, device = ours.engine, torch.device(run.device)
    prompt = random_prompts([33], ours.config.vocab_size, run.settings.seed + 5)

    def answer() -> list[int]:
        return list(engine.generate(prompt, [forced(8)])[0].outputs[0].token_ids)

    engine.weights_changed()  # forgets what is cached: both answers are computed in the same steps
    before = answer()
    free = memory.free_memory(device)
    times = [time.perf_counter()]
    engine.sleep()
    freed = memory.free_memory(device) - free
    times.append(time.perf_counter())
    engine.wake_up()
    synchronize(run.device)
    times.append(time.perf_counter())
    after = answer()
    times.append(time.perf_counter())
    asleep, awake, again = (later - earlier for earlier, later in zip(times, times[1:], strict=False))
    wanted = engine.plan.pool_bytes + weight_bytes(ours)
    same = before == after
    return {
        "sleep_seconds": asleep,
        "wake_seconds": awake,
        "first_answer_seconds": again,
        "freed_bytes": freed,
        "pool_and_weights_bytes": wanted,
        "same_tokens": same,
        "sleep_failures": int(not same or freed < wanted),
        "says": f"sleeps in {asleep:.2f} s, which frees {freed / _GIB:.2f} GiB (pool and weights {wanted / _GIB:.2f}), "
        f"wakes up in {awake:.2f} s, answers after {again:.2f} s {'the same' if same else 'OTHER TOKENS'}",
    }
