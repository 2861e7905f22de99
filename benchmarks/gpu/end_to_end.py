"""One model from end to end: a decode step, the GPU's busy share, loads, and stock Transformers on the same loads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from hf_paged.tools.bench.engine_run import forced, run_workload
from hf_paged.tools.bench.workloads import Workload

from .busy import busy_share, prepare_profiler
from .engines import paged, read_bytes, settings_of
from .models import random_load, random_prompts
from .settings import Run
from .sizes import Sizes, sizes_for
from .stock import STOCK

OURS = "hf_paged"
STEP_PROMPT = 32
BUSY_TOKENS = 32
# Of what is left when stock Transformers' turn comes, for each of its runs in their order.
STOCK_SHARES = (0.3, 0.4, 0.5)


def measure_model(model: Any, name: str, run: Run) -> Iterator[dict[str, Any]]:
    """Yields everything about a model, ours first and the largest load first.

    Args:
        model (`PreTrainedModel`):
            A stock model.
        name (`str`):
            For people.
        run (`Run`):
            What the part is given.
    """
    sizes = sizes_for(run.dry_run)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    loads = [
        random_load(count, vocab_size, sizes.max_prompt, sizes.max_output, run.settings.seed)
        for count in sorted(sizes.loads, reverse=True)
    ]
    prepare_profiler(run.device)
    begin = time.perf_counter()
    with paged(model, settings_of(run)) as ours:
        seconds = time.perf_counter() - begin
        plan = ours.engine.plan
        yield {"model": name, "start_seconds": seconds, "plan": plan.describe()}
        yield from decode_steps(ours, name, run, sizes)
        yield busy_row(ours, name, run, sizes)
        for load in loads:
            done, _ = run_workload(ours, load)
            yield make_row(name, OURS, load, {"output_tokens_per_s": done.output_tokens_per_s, "how": "all"})
    yield from measure_stock(model, name, loads, run)


def decode_steps(ours: Any, name: str, run: Run, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yields the time of a step in which requests decode together, beside what memory allows.

    Args:
        ours (`PagedGenerationMixin`):
            The model.
        name (`str`):
            For people.
        run (`Run`):
            What the part is given.
        sizes (`Sizes`):
            Of the run.
    """
    plan, bandwidth = ours.engine.plan, run.measured("machine", "copy_bandwidth")
    for count in sizes.step_requests:
        prompts = random_prompts([STEP_PROMPT] * count, ours.config.vocab_size, run.settings.seed + count)
        done, _ = run_workload(ours, Workload(f"step of {count}", prompts, [sizes.step_tokens] * count))
        context = STEP_PROMPT + sizes.step_tokens / 2
        num_bytes = read_bytes(ours) + count * context * plan.bytes_per_block / plan.block_size
        floor = num_bytes / bandwidth if bandwidth else None
        seconds = done.seconds_per_token
        over = seconds / floor if floor and seconds else None
        said = "" if over is None else f", {over:.2f}x what memory allows"
        yield {
            "model": name,
            "step_requests": count,
            "step_seconds": seconds,
            "floor_seconds": floor,
            "over_floor": over,
            "says": f"{name}: a step of {count} takes {(seconds or 0) * 1e3:.2f} ms{said}",
        }


def busy_row(ours: Any, name: str, run: Run, sizes: Sizes) -> dict[str, Any]:
    """Returns the share of time in which the GPU did something while requests decode.

    Args:
        ours (`PagedGenerationMixin`):
            The model.
        name (`str`):
            For people.
        run (`Run`):
            What the part is given.
        sizes (`Sizes`):
            Of the run.
    """
    count, length = sizes.step_requests[-1], min(BUSY_TOKENS, sizes.step_tokens)
    prompts = random_prompts([STEP_PROMPT] * count, ours.config.vocab_size, run.settings.seed + 1000)
    share = busy_share(lambda: ours.engine.generate(prompts, [forced(length)] * count), run.device)
    said = "unknown" if share is None else f"{share:.1%}"
    return {"model": name, "busy_share": share, "says": f"{name}: GPU busy {said} with {count} requests"}


def measure_stock(model: Any, name: str, loads: list[Workload], run: Run) -> Iterator[dict[str, Any]]:
    """Yields what stock Transformers does: all its ways on the largest load, batches on the next one.

    Args:
        model (`PreTrainedModel`):
            A stock model.
        name (`str`):
            For people.
        loads (`list[Workload]`):
            The largest first.
        run (`Run`):
            What the part is given.
    """
    plans = [(method, loads[0], share) for method, share in zip(STOCK, STOCK_SHARES, strict=True)]
    plans += [(method, loads[1], 0.5) for method in ("generate, static batch", "generate_batch")]
    for method, load, share in plans:
        budget = run.deadline.left() * share
        if budget < (0.2 if run.dry_run else 1.5):
            yield {"model": name, "system": method, "requests": len(load), "left_out": "no time was left"}
            continue
        try:
            found = STOCK[method](model, load, budget, run.dry_run)
        except Exception as error:
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            said = f"{name}, {len(load)} requests: {method} failed: {words}"
            yield {"model": name, "system": method, "requests": len(load), "unavailable": words, "says": said}
        else:
            yield make_row(name, method, load, found)


def make_row(name: str, system: str, load: Workload, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a system on a load.

    Args:
        name (`str`):
            The model.
        system (`str`):
            Who answered.
        load (`Workload`):
            The requests.
        found (`dict[str, Any]`):
            What it did.
    """
    rate = found["output_tokens_per_s"]
    said = f"{name}, {len(load)} requests: {system} {rate:,.0f} tok/s ({found['how']})"
    return {"model": name, "system": system, "requests": len(load), **found, "says": said}
