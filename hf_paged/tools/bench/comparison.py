"""hf_paged, and stock Transformers if asked for, on the same workload in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .baseline_process import NoAnswerError
from .baselines import BUDGET_SECONDS
from .engine_run import floor_seconds, run_workload
from .report import Column, Report, median_row
from .run_watch import RunWatch
from .session import BenchSession
from .systems import METHOD_TITLES, OURS
from .workloads import Workload


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
    peer = Peer()
    timeline: dict[str, Any] = {}  # of the first run
    requests: dict[str, dict[str, list[Any]]] = {}  # of all runs
    for number in range(1, session.options.runs + 1):
        workload = session.workload(name)
        session.log(f"run {number} of {session.options.runs}: {OURS}, {workload.describe()}")
        watch = RunWatch(session.model.engine)
        samples.setdefault(OURS, []).append(measure_ours(session, workload, watch))
        timeline = timeline or watch.timeline
        _collect(requests, OURS, watch.requests)
        for method, sample in peer.left(methods).items() if session.options.compare else ():
            session.log(f"run {number} of {session.options.runs}: {METHOD_TITLES[method]}")
            row = peer.measure(session, workload, method, sample)
            if row is None:
                continue
            _collect(requests, METHOD_TITLES[method], row.pop("requests"))
            samples.setdefault(METHOD_TITLES[method], []).append(row)
    rows = [{"system": system, **median_row(measured)} for system, measured in samples.items()]
    for row in rows[1:]:
        row["speedup"] = rows[0]["output_tokens_per_s"] / row["output_tokens_per_s"]
    notes = [f"{row['system']}: {row['how']}, extrapolated" for row in rows if row.get("extrapolated")]
    notes += peer.notes
    heading = f"{title} ({workload.describe()}; median of {session.options.runs})"
    details = {"workload": workload.describe(), "timeline": timeline, "requests": requests, "every_run": samples}
    return Report(heading, columns, rows, notes, details)


class Peer:
    """Stock Transformers, without the methods that it was given up on."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._given_up: set[str] = set()

    def left(self, methods: Mapping[str, int | None]) -> dict[str, int | None]:
        """Returns the methods that answered so far.

        Args:
            methods (`Mapping[str, int | None]`):
                All, and how many requests stand for all.
        """
        return {method: sample for method, sample in methods.items() if method not in self._given_up}

    def measure(
        self,
        session: BenchSession,
        workload: Workload,
        method: str,
        sample: int | None,
        budget: float = BUDGET_SECONDS,
    ) -> dict[str, Any] | None:
        """Returns a row as `measure_stock` does, or `None` if a method takes too long: it is given up, and noted.

        Args:
            session (`BenchSession`):
                Models and texts.
            workload (`Workload`):
                The requests.
            method (`str`):
                Which of the peer's methods.
            sample (`int`, *optional*):
                Requests that stand for all.
            budget (`float`, defaults to 40.0):
                Seconds after which it stops and is extrapolated.
        """
        try:
            return measure_stock(session, workload, method, sample, budget)
        except NoAnswerError as error:
            session.drop_stock()
            self._given_up.add(method)
            self.notes.append(f"{METHOD_TITLES[method]}: left out with {len(workload)} requests or more. {error}")
            session.log(self.notes[-1])
            return None


def _collect(requests: dict[str, dict[str, list[Any]]], system: str, found: dict[str, list[Any]]) -> None:
    kept = requests.setdefault(system, {name: [] for name in found})
    for name, values in found.items():
        kept[name] += values


def measure_ours(session: BenchSession, workload: Workload, watch: RunWatch | None = None) -> dict[str, Any]:
    """Returns a row of what hf_paged does, with the memory's speed just before and what it would allow at best.

    Args:
        session (`BenchSession`):
            Models and texts.
        workload (`Workload`):
            The requests.
        watch (`RunWatch`, *optional*):
            Looks at the engine between its steps.
    """
    model = session.model
    bandwidth = session.bandwidth()
    run, _ = run_workload(model, workload, watch=watch)
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


def measure_stock(
    session: BenchSession, workload: Workload, method: str, sample: int | None, budget: float = BUDGET_SECONDS
) -> dict[str, Any]:
    """Returns a row of what stock Transformers does, with the memory's speed just before, and times of requests.

    Args:
        session (`BenchSession`):
            Models and texts.
        workload (`Workload`):
            The requests.
        method (`str`):
            Which of the peer's methods.
        sample (`int`, *optional*):
            Requests that stand for all.
        budget (`float`, defaults to 40.0):
            Seconds after which it stops and is extrapolated.
    """
    stock = session.stock
    bandwidth = session.bandwidth()
    result = stock.measure(method, workload, sample=sample, budget=budget)
    return result.row() | {"read_bandwidth": bandwidth, "requests": result.requests}
