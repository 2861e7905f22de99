"""What compiled kernels must be like; each violation is one line that says what, where and how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .architectures import ARCHITECTURES

# More or fewer instructions than recorded by this share: something else is compiled than was looked at.
MAX_CHANGE = 0.15


def violations(row: dict[str, Any], recorded: int | None) -> Iterator[str]:
    """Yields what is wrong with a compiled kernel.

    Args:
        row (`dict[str, Any]`):
            From `worker.py`: what was compiled, and its figures or why there are none.
        recorded (`int`, *optional*):
            Instructions in the baseline; by default they are not compared.
    """
    if "error" in row:
        yield f"does not compile: {row['error']}"
        return
    figures = row["figures"]
    if figures["stack"]:
        yield f"uses {figures['stack']} bytes of stack or local memory a thread"
    if figures["spills"]:
        yield f"spills registers ({figures['spills']} loads and stores of local memory)"
    if row["has_dot"] and not figures["tensor_core"]:
        yield "multiplies matrices without tensor cores"
    if row["wide_loads"] and not figures["wide_loads"]:
        yield "has no load of 128 bits"
    limit = ARCHITECTURES[row["target"]].shared_limit
    if figures["shared"] > limit:
        yield f"takes {figures['shared']:,} bytes of shared memory, where {limit:,} is the most"
    if recorded is not None and abs(figures["instructions"] - recorded) > MAX_CHANGE * recorded:
        change = figures["instructions"] / recorded - 1
        yield f"has {figures['instructions']:,} instructions where {recorded:,} are recorded ({change:+.0%})"
