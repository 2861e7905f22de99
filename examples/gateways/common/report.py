"""The table that people read, and the same as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hf_paged.tools.bench.report import Column, Report, milliseconds

from .checks import Findings, Phase
from .load import ANSWERED, LOST, REFUSED


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns the smallest value that at least this share of sorted values does not exceed.

    Args:
        values (`Sequence[float]`):
            Sorted.
        share (`float`):
            From 0 to 1.
    """
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else None


def _row(phase: Phase) -> dict[str, Any]:
    refusals = [outcome for outcome in phase.outcomes if outcome.kind == REFUSED]
    return {
        "system": phase.name,
        "sent": len(phase.outcomes),
        **{kind: phase.count(kind) for kind in (ANSWERED, REFUSED, LOST)},
        "with_retry_after": sum(outcome.has_retry_after for outcome in refusals),
        "p50": percentile(phase.latencies, 0.5),
        "p99": percentile(phase.latencies, 0.99),
        "details": dict(Counter(outcome.detail[:120] for outcome in phase.outcomes if outcome.detail).most_common(5)),
    }


COLUMNS = (
    Column("system", "load"),
    Column("sent", "sent"),
    Column("answered", "answered"),
    Column("refused", "refused"),
    Column("with_retry_after", "with Retry-After"),
    Column("lost", "lost"),
    Column("p50", "p50 ms", milliseconds),
    Column("p99", "p99 ms", milliseconds),
)


def make_report(title: str, found: Findings, setting: str) -> Report:
    """Returns what was found, for the console and for JSON.

    Args:
        title (`str`):
            The gateway's name and version.
        found (`Findings`):
            What was found.
        setting (`str`):
            Machine and load, in a line.
    """
    first, problems = found.seconds_to_first_success, found.problems()
    after = "no answer" if first is None else f"first answer {first:.2f} s later"
    notes = [
        setting,
        f"after the spike: {after}, {found.refused_before} refused before it",
        f"clients that left a stream: {found.left_streams[1]} of {found.left_streams[0]} noticed by the engine",
        f"clients that left before their answer: {found.left_answers[1]} of {found.left_answers[0]} noticed",
        f"all blocks free afterwards: {'yes' if found.blocks_free else 'NO'}",
        "mistakes: " + ", ".join(f"{what}: {status}" for what, status in found.mistakes.items()),
        *(f"PROBLEM: {problem}" for problem in problems),
        "NOT FIT: see above" if problems else "nothing lost, no blackout",
    ]
    details = {
        "setting": setting,
        "seconds_to_first_success": first,
        "refused_before": found.refused_before,
        "left_streams": found.left_streams,
        "left_answers": found.left_answers,
        "blocks_free": found.blocks_free,
        "mistakes": found.mistakes,
        "problems": problems,
    }
    return Report(title, COLUMNS, [_row(phase) for phase in (*found.phases, found.after_mistakes)], notes, details)
