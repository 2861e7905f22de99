"""hf_paged, and stock Transformers if asked for, on the same workload in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .engine_run import floor_seconds, run_workload
from .report import Column, Report, median_row
from .session import BenchSession
from .workloads import Workload

OURS = "hf_paged"
METHOD_TITLES = {
    "one_by_one": "Transformers, one by one",
    "static_batch": "Transformers, static padded batch",
    "generate_batch": "Transformers, generate_batch",
}


def compare_on_workload(
    session: BenchSession, name: str, title: str, columns: Sequence[Column], methods: Mapping[str, int | None]
) -> Report:
    """Measures a workload, in each run ours first and then each method of the peer, all on the same requests.

    Args:
        session (`BenchSession`):
            Models and texts.
        name (`str`):
            The workload.
        title (`str`):
            What is measured.
        columns (`Sequence[Column]`):
            What the table shows.
        methods (`Mapping[str, int | None]`):
            The peer's methods, and how many requests stand for all; None means all.
    """
    samples: dict[str, list[dict[str, Any]]] = {}
    for number in range(1, session.options.runs + 1):
        workload = session.workload(name)
        session.log(f"run {number} of {session.options.runs}: {OURS}, {workload.describe()}")
        samples.setdefault(OURS, []).append(measure_ours(session, workload))
        for method, sample in methods.items() if session.options.compare else ():
            session.log(f"run {number} of {session.options.runs}: {METHOD_TITLES[method]}")
            samples.setdefault(METHOD_TITLES[method], []).append(measure_stock(session, workload, method, sample))
    rows = [{"system": system, **median_row(measured)} for system, measured in samples.items()]
    for row in rows[1:]:
        row["speedup"] = rows[0]["output_tokens_per_s"] / row["output_tokens_per_s"]
    notes = [f"{row['system']}: {row['how']}, extrapolated" for row in rows if row.get("extrapolated")]
    heading = f"{title} ({workload.describe()}; median of {session.options.runs})"
    return Report(heading, columns, rows, notes, {"workload": workload.describe(), "every_run": samples})


def measure_ours(session: BenchSession, workload: Workload) -> dict[str, Any]:
    """Returns a row of what hf_paged does, with the memory's speed just before and what it would allow at best.

    Args:
        session (`BenchSession`):
            Models and texts.
        workload (`Workload`):
            The requests.
    """
    model = session.model
    bandwidth = session.bandwidth()
    run, _ = run_workload(model, workload)
    floor = floor_seconds(model, workload, run.stats.num_steps, bandwidth)
    row = {name: value for name, value in dataclasses.asdict(run).items() if name != "stats"}
    return row | {
        "how": f"all {len(workload)} requests",
        "extrapolated": False,
        "read_bandwidth": bandwidth,
        "floor_seconds": floor,
        "floor_tokens_per_s": workload.num_output_tokens / floor,
        "floor_share": floor / run.seconds,
        "num_steps": run.stats.num_steps,
        "num_preemptions": run.stats.num_preemptions,
        "num_cached_tokens": run.stats.num_cached_tokens,
        "num_prompt_tokens": run.stats.num_prompt_tokens,
        "peak_blocks_held": run.stats.peak_blocks_held,
    }


def measure_stock(session: BenchSession, workload: Workload, method: str, sample: int | None) -> dict[str, Any]:
    """Returns a row of what stock Transformers does, with the memory's speed just before.

    Args:
        session (`BenchSession`):
            Models and texts.
        workload (`Workload`):
            The requests.
        method (`str`):
            Which of the peer's methods.
        sample (`int`, *optional*):
            Requests that stand for all.
    """
    stock = session.stock
    bandwidth = session.bandwidth()
    result = stock.measure(method, workload, sample=sample)
    return dataclasses.asdict(result) | {"read_bandwidth": bandwidth}
