"""`hf-paged bench step`: what a step costs, part by part, and what a long queue costs the scheduler."""

from __future__ import annotations

import statistics
import time
from typing import Any

from ...cache.block_manager import BlockManager
from ...generation.policies import SCHEDULING_POLICIES
from ...generation.request import Request, RequestGroup
from ...generation.sampling.params import SamplingParams
from ...generation.scheduler import Scheduler, SchedulerConfig
from ...kernels.cpu import library, peaks
from .engine_run import weight_bytes
from .report import Column, Report, gigabytes_per_second, milliseconds, whole
from .session import BENCHMARKS, BenchSession

NUM_RUNNING = 64
NUM_STEPS = 40
NUM_WAITING = 100_000
PARTS = ("schedule", "inputs", "model", "sample", "collect")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1},
}
COLUMNS = (
    Column("system", "sampling"),
    Column("num_running", "running", whole),
    Column("step_seconds", "step, ms", milliseconds),
    Column("floor_seconds", "floor, ms", milliseconds),
    Column("overhead_seconds", "beside the model, ms", milliseconds),
    *(Column(f"{part}_seconds", f"{part}, ms", milliseconds) for part in PARTS),
    Column("read_bandwidth", "memory reads", gigabytes_per_second),
)


@BENCHMARKS.register("step")
def step(session: BenchSession) -> Report:
    """Measures steps of 1, 2, 4 ... 64 requests with texts, of 64 sampled ones, and `schedule` with a long queue.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    largest = session.options.count or NUM_RUNNING
    sizes = powers_of_two(largest)
    rows: list[dict[str, Any]] = []
    for kind, count in [*(("greedy", size) for size in sizes), *((kind, largest) for kind in list(KINDS)[1:])]:
        bandwidth = session.bandwidth()
        session.log(f"{NUM_STEPS} steps of {count} requests, {kind}")
        measured = [measure_steps(session, KINDS[kind], count) for _ in range(session.options.runs)]
        medians = {name: statistics.median(row[name] for row in measured) for name in measured[0]}
        rows.append({"system": kind, **medians, "read_bandwidth": bandwidth})
    best = max(row["read_bandwidth"] for row in rows)  # somebody else's load can only make it look smaller
    for row in rows:
        row |= step_floors(session.model, row["num_running"], row["tokens_stored"], best)
    seconds = measure_long_queue()
    return Report(
        f"A step of decoding requests (median of {session.options.runs})",
        COLUMNS,
        rows,
        [f"schedule with {NUM_WAITING:,} waiting requests: {seconds * 1e3:.2f} ms"],
        {"schedule_long_queue_seconds": seconds, "num_waiting": NUM_WAITING},
    )


def powers_of_two(largest: int) -> list[int]:
    """Returns 1, 2, 4 ... below a number, and the number.

    Args:
        largest (`int`):
            The number.
    """
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def step_floors(model: Any, count: float, num_tokens: float, bytes_per_second: float) -> dict[str, float | None]:
    """Returns the least seconds of a step: memory gives weights and K/V once; a weight is multiplied by each row.

    Args:
        model (`PagedGenerationMixin`):
            The model.
        count (`float`):
            Requests that decode.
        num_tokens (`float`):
            Tokens stored.
        bytes_per_second (`float`):
            Measured read bandwidth.
    """
    plan = model.engine.plan
    memory = (weight_bytes(model) + num_tokens * plan.bytes_per_block / plan.block_size) / bytes_per_second
    arithmetic = None
    if model.device.type == "cpu" and library.load():
        operations = 2 * count * sum(parameter.numel() for parameter in model.parameters())
        arithmetic = operations / peaks.peak_flops(peaks.used_instruction(model.dtype))
    return {
        "memory_floor_seconds": memory,
        "arithmetic_floor_seconds": arithmetic,
        "floor_seconds": max(memory, arithmetic or 0.0),
    }


def measure_steps(session: BenchSession, sampling: dict[str, Any], count: int) -> dict[str, float]:
    """Returns the mean seconds of a step and of its parts, once all requests decode.

    Args:
        session (`BenchSession`):
            Models and texts.
        sampling (`dict[str, Any]`):
            Sampling parameters.
        count (`int`):
            Requests that run.
    """
    engine = session.model.engine
    params = SamplingParams(max_tokens=4 * NUM_STEPS + count, ignore_eos=True, **sampling)
    prompts = [session.text.cut(64 + index) for index in range(count)]
    states = [engine.add_request(prompt, params, tokenizer=session.tokenizer) for prompt in prompts]
    try:
        while any(not state.output().outputs[0].token_ids for state in states):
            engine.step()
        engine.reset_stats()
        stored_before = engine.live.block_manager.num_tokens_stored
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            engine.step()
        seconds = time.perf_counter() - start
        stats = engine.stats()
        stored = (stored_before + engine.live.block_manager.num_tokens_stored) / 2
    finally:
        engine.abort_all()
    parts = {f"{part}_seconds": getattr(stats, f"seconds_{part}") / stats.num_steps for part in PARTS}
    overhead = seconds / NUM_STEPS - parts["model_seconds"]
    return {
        **parts,
        "overhead_seconds": overhead,
        "step_seconds": seconds / NUM_STEPS,
        "num_running": stats.num_generated_tokens / NUM_STEPS,
        "tokens_stored": stored,
    }


def measure_long_queue(num_waiting: int = NUM_WAITING, repeats: int = 20) -> float:
    """Returns the median seconds of `schedule` for 64 decoding requests with many more waiting behind them.

    Args:
        num_waiting (`int`, defaults to 100,000):
            Requests that wait.
        repeats (`int`, defaults to 20):
            Steps of which the median is taken.
    """
    blocks = BlockManager([4096], 16, True)
    config = SchedulerConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=2048, max_model_len=4096)
    scheduler = Scheduler(config, blocks, SCHEDULING_POLICIES.get("fcfs")())
    params = SamplingParams(temperature=0, max_tokens=1024)
    for index in range(NUM_RUNNING + num_waiting):
        name = str(index)
        request = Request(name, [index % 1000 + offset for offset in range(16)], params, max_tokens=1024)
        scheduler.add(RequestGroup(name, [request]))
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        output = scheduler.schedule()
        seconds.append(time.perf_counter() - start)
        scheduler.update_from_output(output, {i: 1 for share in output.scheduled for i in share.sample_ids})
    return statistics.median(seconds[1:])
