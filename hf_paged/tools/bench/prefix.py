"""`hf-paged bench prefix`: requests that begin with the same long prefix (W2), which nobody has seen before."""

from __future__ import annotations

from .comparison import compare_on_workload
from .report import Column, Report, gigabytes_per_second, one_decimal, percent, times, whole
from .session import BENCHMARKS, BenchSession

COLUMNS = (
    Column("system", "system"),
    Column("output_tokens_per_s", "output tokens/s", one_decimal),
    Column("speedup", "hf_paged is faster by", times),
    Column("seconds", "seconds", one_decimal),
    Column("num_cached_tokens", "prompt tokens reused", whole),
    Column("num_prompt_tokens", "prompt tokens", whole),
    Column("kv_waste", "K/V waste", percent),
    Column("read_bandwidth", "memory reads", gigabytes_per_second),
)


@BENCHMARKS.register("prefix")
def prefix(session: BenchSession) -> Report:
    """Measures output tokens per second on W2, cold: each run has another prefix.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    methods = {"one_by_one": 8, "static_batch": None, "generate_batch": None}
    return compare_on_workload(session, "W2", "Shared prefix, cold", COLUMNS, methods)
