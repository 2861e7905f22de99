"""One model from end to end: decode steps, the GPU's busy share, loads, and stock Transformers on the same loads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from hf_paged.tools.bench.engine_run import forced, run_workload
from hf_paged.tools.bench.workloads import Workload

from .busy import busy_share, prepare_profiler
from .engines import graphs_of, num_replays, paged, read_bytes, time_of_replay, timed_captures
from .models import random_load, random_prompts
from .settings import Run
from .shared_prompt import shared_prompt_rows
from .sizes import Sizes, sizes_for
from .stock import STOCK

OURS = "hf_paged"
BUSY_TOKENS = 32
# Of what is left when stock Transformers' turn comes, for each of its runs in their order.
STOCK_SHARES = (0.3, 0.4, 0.5)
# Of our loads, what stock Transformers is compared on; others are run if so much time is left after them.
NEEDED_LOADS = 2
SPARE_SECONDS = 20.0
# Kept for the engine without graphs, after stock Transformers.
EAGER_SECONDS = 8.0


def measure_model(
    model: Any, name: str, run: Run, shares_prompts: bool = False, **changed: Any
) -> Iterator[dict[str, Any]]:
    """Yields everything about a model, ours first and the largest load first.

    Args:
        model (`PreTrainedModel`):
            A stock model.
        name (`str`):
            For people.
        run (`Run`):
            What the part is given.
        shares_prompts (`bool`, defaults to `False`):
            Whether requests with a long prefix in common are measured as well.
        changed (`Any`):
            Settings of the engine other than usual.
    """
    sizes = sizes_for(run.dry_run)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    loads = [
        random_load(count, vocab_size, sizes.max_prompt, sizes.max_output, run.settings.seed)
        for count in sorted(sizes.loads, reverse=True)
    ]
    prepare_profiler(run.device)
    begin = time.perf_counter()
    with timed_captures(run.device) as captures, paged(model, run, **changed) as ours:
        yield start_row(ours, name, time.perf_counter() - begin, captures)
        for count, prompt in sizes.steps:
            yield step_row(ours, name, run, (count, prompt), sizes.step_tokens)
        yield busy_row(ours, name, run, sizes)
        for number, load in enumerate(loads):
            if number >= NEEDED_LOADS and not run.deadline.allows(SPARE_SECONDS):
                yield {"model": name, "system": OURS, "requests": len(load), "left_out": "no time was left"}
                continue
            before = num_replays(ours)
            done, _ = run_workload(ours, load)
            counts = {"steps": done.stats.num_steps, "replays": num_replays(ours) - before}
            found = {"output_tokens_per_s": done.output_tokens_per_s, "how": f"all, {counts}", **counts}
            yield make_row(name, OURS, load, found)
        if shares_prompts and run.deadline.allows(SPARE_SECONDS):
            yield from shared_prompt_rows(ours, name, run, sizes)
    yield from measure_stock(model, name, loads, run)
    if run.deadline.allows(EAGER_SECONDS / 2):
        yield from measure_eager(model, name, run, sizes)


def start_row(ours: Any, name: str, seconds: float, captures: list[float]) -> dict[str, Any]:
    """Returns what an engine took to start, and its graphs.

    Args:
        ours (`PagedGenerationMixin`):
            The model.
        name (`str`):
            For people.
        seconds (`float`):
            What it took until it had run once.
        captures (`list[float]`):
            What of that it took to capture graphs.
    """
    plan, graphs = ours.engine.plan, graphs_of(ours.engine)
    row: dict[str, Any] = {"model": name, "start_seconds": seconds, "plan": plan.describe(), "notes": list(plan.notes)}
    told = "no graphs"
    if graphs is not None:
        row |= {
            "graphs": len(graphs.shapes),
            "wanted_graphs": len(graphs.settings.shapes.all()),
            "graph_bytes": graphs.num_bytes,
            "graph_budget": graphs.settings.budget,
            "capture_seconds": captures[-1] if captures else None,
        }
        told = (
            f"{row['graphs']} of {row['wanted_graphs']} graphs in {sum(captures):.1f} s, {row['graph_bytes'] >> 20} MiB"
        )
    told += "".join(f"; {note}" for note in plan.notes)
    return row | {"says": f"{name}: starts in {seconds:.1f} s; native: {plan.native}; {told}"}


def step_row(ours: Any, name: str, run: Run, step: tuple[int, int], tokens: int) -> dict[str, Any]:
    """Returns the time of a step in which requests decode together, beside what memory allows.

    Args:
        ours (`PagedGenerationMixin`):
            The model.
        name (`str`):
            For people.
        run (`Run`):
            What the part is given.
        step (`tuple[int, int]`):
            Requests, and the tokens of their prompts.
        tokens (`int`):
            Tokens that each of them decodes.
    """
    count, length = step
    plan, bandwidth = ours.engine.plan, run.measured("machine", "copy_bandwidth")
    prompts = random_prompts([length] * count, ours.config.vocab_size, run.settings.seed + count + length)
    ours.engine.generate(prompts, [forced(1)] * count)  # then prompts are cached, and all begin in one step
    before = num_replays(ours)
    done, _ = run_workload(ours, Workload(f"step of {count}", prompts, [tokens] * count))
    replays = num_replays(ours) - before
    num_bytes = read_bytes(ours) + count * (length + tokens / 2) * plan.bytes_per_block / plan.block_size
    floor = num_bytes / bandwidth if bandwidth else None
    seconds = done.seconds_per_token
    over = seconds / floor if floor and seconds else None
    said = "" if over is None else f", {over:.2f}x what memory allows"
    replay = time_of_replay(ours.engine, prompts, run.device)
    if replay is not None:
        said += f"; {replays} replays, of {replay.seconds * 1e3:.2f} ms on the device"
    return {
        "model": name,
        "mode": "eager" if graphs_of(ours.engine) is None else "graphs",
        "step_requests": count,
        "prompt_tokens": length,
        "step_seconds": seconds,
        "floor_seconds": floor,
        "over_floor": over,
        "replays": replays,
        "replay_seconds": None if replay is None else replay.seconds,
        "says": f"{name}: a step of {count} with {length} tokens and more takes {(seconds or 0) * 1e3:.2f} ms{said}",
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
    count, prompt = max(sizes.steps)
    length = min(BUSY_TOKENS, sizes.step_tokens)
    prompts = random_prompts([min(prompt, 32)] * count, ours.config.vocab_size, run.settings.seed + 1000)
    share = busy_share(lambda: ours.engine.generate(prompts, [forced(length)] * count), run.device)
    said = "unknown" if share is None else f"{share:.1%}"
    mode = "eager" if graphs_of(ours.engine) is None else "graphs"
    says = f"{name}: GPU busy {said} with {count} requests ({mode})"
    return {"model": name, "mode": mode, "busy_share": share, "says": says}


def measure_eager(model: Any, name: str, run: Run, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yields decode steps and the GPU's busy share without graphs.

    Args:
        model (`PreTrainedModel`):
            A stock model.
        name (`str`):
            For people.
        run (`Run`):
            What the part is given.
        sizes (`Sizes`):
            Of the run.
    """
    with paged(model, run, enforce_eager=True) as ours:
        for step in sorted({sizes.steps[0], sizes.steps[len(sizes.steps) // 2]}):
            yield step_row(ours, f"{name}, eager", run, step, sizes.step_tokens // 2)
        yield busy_row(ours, f"{name}, eager", run, sizes)


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
        budget = (run.deadline.left() - EAGER_SECONDS) * share
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
