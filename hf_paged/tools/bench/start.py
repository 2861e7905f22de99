"""`hf-paged bench start`: from `from_pretrained` to the first token, in fresh processes, beside stock Transformers."""

from __future__ import annotations

from typing import Any

from ...kernels.cpu import library
from .comparison import OURS
from .fresh_process import measure_in_fresh_process
from .report import Column, Report, median_row
from .session import BENCHMARKS, BenchSession

PROMPT_TOKENS = 128


def two_decimals(seconds: float) -> str:
    """Returns seconds with two decimals.

    Args:
        seconds (`float`):
            The time.
    """
    return f"{seconds:.2f}"


COLUMNS = (
    Column("system", "system"),
    Column("load_seconds", "from_pretrained, s", two_decimals),
    Column("first_token_seconds", "first token, s", two_decimals),
    Column("seconds", "together, s", two_decimals),
    Column("cpu_seconds", "of processors, s", two_decimals),
)


@BENCHMARKS.register("start")
def start(session: BenchSession) -> Report:
    """Measures starts in turns; the native operators are built before.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    library.load()
    options = session.options
    settings = {"model": session.path, "dtype": options.dtype, "prompt": session.text.cut(PROMPT_TOKENS)}
    samples: dict[str, list[dict[str, Any]]] = {OURS: [], "transformers": []}
    for number in range(1, options.runs + 1):
        for system, measured in samples.items():
            session.log(f"run {number} of {options.runs}: {system}")
            measured.append(measure_in_fresh_process("start_process", settings | {"system": system}))
    bandwidth = session.bandwidth()
    rows = [
        {"system": system, **median_row(measured), "read_bandwidth": bandwidth} for system, measured in samples.items()
    ]
    added = rows[0]["seconds"] - rows[1]["seconds"]
    return Report(
        f"Start, a prompt of {PROMPT_TOKENS} tokens (median of {options.runs})",
        COLUMNS,
        rows,
        [f"hf_paged takes {added:+.2f} s"],
        {"added_seconds": added, "every_run": samples},
    )
