"""`hf-paged bench throughput`: many requests of mixed lengths at once (W1)."""

from __future__ import annotations

from .comparison import compare_on_workload
from .report import Column, Report, gigabytes_per_second, one_decimal, percent, times, whole
from .session import BENCHMARKS, BenchSession

COLUMNS = (
    Column("system", "system"),
    Column("output_tokens_per_s", "output tokens/s", one_decimal),
    Column("speedup", "hf_paged is faster by", times),
    Column("seconds", "seconds", one_decimal),
    Column("kv_waste", "K/V waste", percent),
    Column("num_preemptions", "preemptions", whole),
    Column("floor_tokens_per_s", "memory allows tokens/s", whole),
    Column("read_bandwidth", "memory reads", gigabytes_per_second),
)


@BENCHMARKS.register("throughput")
def throughput(session: BenchSession) -> Report:
    """Measures output tokens per second on W1.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    methods = {"one_by_one": 8, "static_batch": None, "generate_batch": None}
    return compare_on_workload(session, "W1", "Throughput", COLUMNS, methods)
