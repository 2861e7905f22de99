"""`hf-paged bench long`: a few long prompts with short answers (W4)."""

from __future__ import annotations

from .comparison import compare_on_workload
from .report import Column, Report, gigabytes_per_second, milliseconds, one_decimal, percent, times
from .session import BENCHMARKS, BenchSession

COLUMNS = (
    Column("system", "system"),
    Column("output_tokens_per_s", "output tokens/s", one_decimal),
    Column("speedup", "hf_paged is faster by", times),
    Column("seconds", "seconds", one_decimal),
    Column("first_token_seconds", "first token, ms", milliseconds),
    Column("seconds_per_token", "ms per token", milliseconds),
    Column("kv_waste", "K/V waste", percent),
    Column("read_bandwidth", "memory reads", gigabytes_per_second),
)


@BENCHMARKS.register("long")
def long_context(session: BenchSession) -> Report:
    """Measures W4; the prompts dominate.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    methods = {"one_by_one": 2, "static_batch": None, "generate_batch": None}
    return compare_on_workload(session, "W4", "Long prompts", COLUMNS, methods)
