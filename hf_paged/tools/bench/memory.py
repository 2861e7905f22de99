"""`hf-paged bench memory`: how much K/V memory W1 takes, and how much of it holds something."""

from __future__ import annotations

from .comparison import compare_on_workload
from .machine import resident_bytes
from .report import Column, Report, mebibytes, percent, whole
from .session import BENCHMARKS, BenchSession

COLUMNS = (
    Column("system", "system"),
    Column("kv_waste", "K/V waste (mean over steps)", percent),
    Column("peak_blocks_held", "blocks held at the peak", whole),
    Column("kv_bytes_held", "K/V held at the peak", mebibytes),
    Column("kv_bytes_used", "of that used", mebibytes),
    Column("kv_bytes_pool", "K/V pool", mebibytes),
    Column("resident_bytes", "memory of the process", mebibytes),
    Column("huge_page_bytes", "on huge pages", mebibytes),
)


@BENCHMARKS.register("memory")
def memory(session: BenchSession) -> Report:
    """Measures memory on W1; waste is 1 - tokens stored / slots in blocks held by live requests.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    before = resident_bytes()
    methods = {"one_by_one": 2, "static_batch": None, "generate_batch": None}
    report = compare_on_workload(session, "W1", "K/V memory", COLUMNS, methods)
    report.details["resident_bytes_before_loading"] = before
    return report
