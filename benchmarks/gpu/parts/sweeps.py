"""Decoding with other block sizes and other numbers of splits than the table gives: is the table right?"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from ..problems import PagedProblem, Problem
from ..settings import Run
from ..sizes import Sizes, sizes_for
from ..timing import measure

SECONDS_PER_POINT = 0.7
# What decides, as the calls find it.
_SPLIT_COUNT = "hf_paged.kernels.triton.attention.split_count"


def run(run: Run) -> Iterator[dict[str, Any]]:
    """Yields a row for each point, block sizes first.

    Args:
        run (`Run`):
            What the part is given.
    """
    sizes = sizes_for(run.dry_run)
    for block_size in sizes.block_sizes:
        for problem in sizes.sweeps:
            if run.deadline.allows(SECONDS_PER_POINT):
                yield point(dataclasses.replace(problem, block_size=block_size), None, run, sizes)
    for splits in sizes.splits:
        for problem in sizes.sweeps:
            if run.deadline.allows(SECONDS_PER_POINT):
                yield point(problem, splits, run, sizes)


def point(problem: Problem, splits: int | None, run: Run, sizes: Sizes) -> dict[str, Any]:
    """Returns the figures of one point.

    Args:
        problem (`Problem`):
            The problem, with its block size.
        splits (`int`, *optional*):
            Number of splits; by default what the table gives.
        run (`Run`):
            What the part is given.
        sizes (`Sizes`):
            Of the run.
    """
    paged = PagedProblem(problem, run.device, sizes.dtype, run.settings.seed, sizes.cold_bytes)
    calls = paged.paged_calls(paged.backend())
    with contextlib.nullcontext() if splits is None else mock.patch(_SPLIT_COUNT, return_value=splits):
        timing = measure(calls, run.device, min(sizes.min_seconds, 0.15))
    bandwidth = run.measured("machine", "copy_bandwidth")
    rate = problem.num_bytes(sizes.dtype) / timing.seconds
    return {
        "problem": problem.name,
        "block_size": problem.block_size,
        "splits": splits,
        **timing.to_dict(),
        "bandwidth_share": rate / bandwidth if bandwidth else None,
    }
