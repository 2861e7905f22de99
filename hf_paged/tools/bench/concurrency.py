"""`hf-paged bench concurrency`: output tokens per second with 1, 2, 4 ... 64 requests at a time."""

from __future__ import annotations

from typing import Any

from .comparison import METHOD_TITLES, OURS, Peer, measure_ours
from .report import Column, Report, gigabytes_per_second, median_row, one_decimal, times, whole
from .session import BENCHMARKS, BenchSession
from .step import powers_of_two

LARGEST = 64
METHODS = ("static_batch", "generate_batch")
PEER_BUDGET_SECONDS = 15.0  # at each concurrency; what is left is extrapolated

COLUMNS = (
    Column("system", "system"),
    Column("concurrency", "requests at a time", whole),
    Column("output_tokens_per_s", "output tokens/s", one_decimal),
    Column("speedup", "hf_paged is faster by", times),
    Column("seconds", "seconds", one_decimal),
    Column("floor_tokens_per_s", "memory allows tokens/s", whole),
    Column("read_bandwidth", "memory reads", gigabytes_per_second),
)


@BENCHMARKS.register("concurrency")
def concurrency(session: BenchSession) -> Report:
    """Measures W1 and parts of it: so many of its requests, of all lengths, are started together.

    At each concurrency ours comes first and the peer's methods after it, on the same requests.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    options, whole_workload = session.options, session.workload("W1")
    peer = Peer()
    samples: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number in range(1, options.runs + 1):
        for level in powers_of_two(len(whole_workload)):
            workload = session.workload("W1").sample(level)
            about = {"concurrency": level, "num_output_tokens": workload.num_output_tokens}
            session.log(f"run {number} of {options.runs}: {OURS}, {workload.describe()}")
            samples.setdefault((OURS, level), []).append(about | measure_ours(session, workload))
            for method in peer.left(dict.fromkeys(METHODS)) if options.compare else ():
                session.log(f"run {number} of {options.runs}: {METHOD_TITLES[method]}, {level} at a time")
                row = peer.measure(session, workload, method, None, PEER_BUDGET_SECONDS)
                if row is None:
                    continue
                del row["requests"]
                samples.setdefault((METHOD_TITLES[method], level), []).append(about | row)
    medians = {key: {"system": key[0], **median_row(rows)} for key, rows in samples.items()}
    for (system, level), row in medians.items():
        if system != OURS:
            row["speedup"] = medians[OURS, level]["output_tokens_per_s"] / row["output_tokens_per_s"]
    systems = list(dict.fromkeys(system for system, _ in medians))
    ordered = [row for name in systems for (system, _), row in medians.items() if system == name]
    notes = [
        f"{row['system']}, {row['concurrency']} at a time: {row['how']}, extrapolated"
        for row in ordered
        if row["extrapolated"]
    ] + peer.notes
    every_run = {
        name: [row for (system, _), rows in samples.items() if system == name for row in rows] for name in systems
    }
    title = f"Requests at a time ({whole_workload.describe()}, or some of them; median of {options.runs})"
    return Report(title, COLUMNS, ordered, notes, {"workload": whole_workload.describe(), "every_run": every_run})
