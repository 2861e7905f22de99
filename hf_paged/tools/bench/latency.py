"""`hf-paged bench latency`: one user alone (W3)."""

from __future__ import annotations

from .comparison import compare_on_workload
from .report import Column, Report, gigabytes_per_second, milliseconds, one_decimal, percent, times
from .session import BENCHMARKS, BenchSession

COLUMNS = (
    Column("system", "system"),
    Column("first_token_seconds", "first token, ms", milliseconds),
    Column("seconds_per_token", "ms per token", milliseconds),
    Column("output_tokens_per_s", "output tokens/s", one_decimal),
    Column("speedup", "hf_paged is faster by", times),
    Column("floor_seconds_per_token", "memory allows ms per token", milliseconds),
    Column("floor_share", "of that reached", percent),
    Column("read_bandwidth", "memory reads", gigabytes_per_second),
)


@BENCHMARKS.register("latency")
def latency(session: BenchSession) -> Report:
    """Measures the time to the first token and between tokens on W3.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    report = compare_on_workload(session, "W3", "Latency", COLUMNS, {"one_by_one": None, "generate_batch": None})
    ours = report.rows[0]
    ours["floor_seconds_per_token"] = ours["floor_seconds"] / ours["num_steps"]
    return report
