"""`hf-paged bench memory`: how much K/V memory W1 takes, how much of it holds something, and what else is taken."""

from __future__ import annotations

from typing import Any

from ...configuration import PagedConfig
from ...kernels.cpu import library
from .comparison import compare_on_workload
from .fresh_process import measure_in_fresh_process
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

    A second process answers the same requests and is compared with itself when it had only imported everything.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    session.log("memory of a process that only serves")
    served = measure_served(session)
    methods = {"one_by_one": 2, "static_batch": None, "generate_batch": None}
    report = compare_on_workload(session, "W1", "K/V memory", COLUMNS, methods)
    report.notes += describe_served(served)
    report.details["served"] = served
    return report


def measure_served(session: BenchSession) -> dict[str, Any]:
    """Returns what a process takes that loads the model and answers W1.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    library.load()  # so that the process does not build it
    workload = session.workload("W1")
    settings = {
        "model": session.path,
        "dtype": session.options.dtype,
        "config": (session.options.config or PagedConfig()).to_dict(),
        "prompts": workload.prompts,
        "output_lengths": workload.output_lengths,
    }
    return measure_in_fresh_process("memory_process", settings)


def describe_served(served: dict[str, Any]) -> list[str]:
    """Returns lines for people; none where the system does not tell how much memory a process has.

    Args:
        served (`dict[str, Any]`):
            From `measure_served`.
    """
    if served["other_bytes"] is None:
        return []
    text = {name: mebibytes(value) for name, value in served.items() if value is not None}
    lines = [
        f"a process that serves: {text['served_bytes']} = {text['imported_bytes']} after imports + "
        f"{text['weight_bytes']} weights + {text['touched_pool_bytes']} of the pool in use + "
        f"{text['other_bytes']} for everything else",
    ]
    peaks = f"its peaks: {text['peak_loading_bytes']} while loading"
    if "peak_serving_bytes" in text:
        peaks += f", {text['peak_serving_bytes']} while serving"
    return [*lines, f"{peaks}; {text.get('huge_page_bytes', 'nothing')} on huge pages"]
