"""Decoding and prefill against SDPA, FlashAttention and FlexAttention, beside what memory and arithmetic allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..problems import PagedProblem, Problem
from ..rivals import RIVALS, RivalUnavailableError
from ..settings import Run
from ..sizes import Sizes, sizes_for
from ..timing import Timing, measure

OURS = "hf_paged"
# What a problem takes at least: its K/V are made, everybody is called once.
SECONDS_PER_PROBLEM = 2.0


def run(run: Run) -> Iterator[dict[str, Any]]:
    """Yields a row for each problem and who attends. Everybody is timed before anything has to be compiled long.

    Args:
        run (`Run`):
            What the part is given.
    """
    sizes = sizes_for(run.dry_run)
    problems = (*sizes.decodes, *sizes.prefills)
    quick = {name: rival for name, rival in RIVALS.items() if rival[1] < 1}
    for problem in problems:
        if not run.deadline.allows(SECONDS_PER_PROBLEM):
            yield {"problem": problem.name, "left_out": "no time was left"}
            continue
        yield from compare(problem, run, sizes, [OURS, *quick])
    for problem in (sizes.decodes[0], sizes.prefills[0]):
        slow = [name for name, rival in RIVALS.items() if name not in quick and run.deadline.allows(rival[1])]
        yield from compare(problem, run, sizes, slow)


def compare(problem: Problem, run: Run, sizes: Sizes, systems: list[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each system on one problem.

    Args:
        problem (`Problem`):
            The problem.
        run (`Run`):
            What the part is given.
        sizes (`Sizes`):
            Of the run.
        systems (`list[str]`):
            Who attends.
    """
    if not systems:
        return
    paged = PagedProblem(problem, run.device, sizes.dtype, run.settings.seed, sizes.cold_bytes)
    for system in systems:
        try:
            calls = paged.paged_calls(paged.backend()) if system == OURS else RIVALS[system][0](paged)
            timing = measure(calls, run.device, sizes.min_seconds)
        except RivalUnavailableError as error:
            yield {"problem": problem.name, "system": system, "unavailable": str(error)}
        except Exception as error:
            if system == OURS:
                raise
            words = " ".join(str(error).split())[:200]
            yield {"problem": problem.name, "system": system, "unavailable": f"{type(error).__name__}: {words}"}
        else:
            yield make_row(problem, system, timing, run, sizes)


def make_row(problem: Problem, system: str, timing: Timing, run: Run, sizes: Sizes) -> dict[str, Any]:
    """Returns the figures of a system on a problem.

    Args:
        problem (`Problem`):
            The problem.
        system (`str`):
            Who attended.
        timing (`Timing`):
            How long it took.
        run (`Run`):
            What the part is given.
        sizes (`Sizes`):
            Of the run.
    """
    bandwidth, peak = run.measured("machine", "copy_bandwidth"), run.measured("machine", "peak_flops")
    rate, flops = problem.num_bytes(sizes.dtype) / timing.seconds, problem.operations / timing.seconds
    row = {
        "problem": problem.name,
        "kind": "decode" if problem.is_decode else "prefill",
        "num_requests": problem.num_requests,
        "context": problem.context,
        "system": system,
        **timing.to_dict(),
        "bytes_per_second": rate,
        "flops": flops,
        "bandwidth_share": rate / bandwidth if bandwidth else None,
        "peak_share": flops / peak if peak else None,
    }
    share, what = (row["bandwidth_share"], "copy") if problem.is_decode else (row["peak_share"], "peak")
    of = "" if share is None else f", {share:.0%} of {what}"
    row["says"] = f"{problem.name}: {system} {timing.seconds * 1e6:,.1f} us{of} ({timing.how})"
    return row
