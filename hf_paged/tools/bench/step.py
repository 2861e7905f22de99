"""`hf-paged bench step`: what a step costs beside the model, and what a long queue costs the scheduler."""

from __future__ import annotations

import statistics
import time
from typing import Any

from ...cache.block_manager import BlockManager
from ...generation.policies import SCHEDULING_POLICIES
from ...generation.request import Request, RequestGroup
from ...generation.sampling.params import SamplingParams
from ...generation.scheduler import Scheduler, SchedulerConfig
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
    Column("overhead_seconds", "beside the model, ms", milliseconds),
    *(Column(f"{part}_seconds", f"{part}, ms", milliseconds) for part in PARTS),
    Column("read_bandwidth", "memory reads", gigabytes_per_second),
)


@BENCHMARKS.register("step")
def step(session: BenchSession) -> Report:
    """Measures a step of 64 decoding requests with texts, greedy and sampled, and `schedule` with a long queue.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    count = session.options.count or NUM_RUNNING
    rows: list[dict[str, Any]] = []
    for kind, sampling in KINDS.items():
        bandwidth = session.bandwidth()
        session.log(f"{NUM_STEPS} steps of {count} requests, {kind}")
        measured = [measure_steps(session, sampling, count) for _ in range(session.options.runs)]
        best = {name: statistics.median(row[name] for row in measured) for name in measured[0]}
        rows.append({"system": kind, **best, "read_bandwidth": bandwidth})
    seconds = measure_long_queue()
    return Report(
        f"A step of {count} decoding requests (median of {session.options.runs})",
        COLUMNS,
        rows,
        [f"schedule with {NUM_WAITING:,} waiting requests: {seconds * 1e3:.2f} ms"],
        {"schedule_long_queue_seconds": seconds, "num_waiting": NUM_WAITING},
    )


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
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            engine.step()
        seconds = time.perf_counter() - start
        stats = engine.stats()
    finally:
        engine.abort_all()
    parts = {f"{part}_seconds": getattr(stats, f"seconds_{part}") / stats.num_steps for part in PARTS}
    overhead = seconds / NUM_STEPS - parts["model_seconds"]
    return {
        **parts,
        "overhead_seconds": overhead,
        "step_seconds": seconds / NUM_STEPS,
        "num_running": stats.num_generated_tokens / NUM_STEPS,
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
