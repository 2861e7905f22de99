"""A process that runs its share of the kernel cases and tells each as a line of JSON; `parts/cases.py` starts several.

Each case compiles its kernels, so that they are found compiled afterwards, and a wrong pointer costs one process.

    python -m benchmarks.gpu.case_worker SETTINGS NUMBER OF_HOW_MANY
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from .hardware import launches_on
from .kernel_cases import kernel_cases
from .models import random_model
from .parity import check_tokens
from .problems import PagedProblem, Problem
from .rivals import sdpa
from .settings import Deadline, Run, Settings
from .sizes import ModelSize, Sizes, sizes_for

# Both sides round what they multiply to the same dtype, but in another order.
ALLOWED = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SHARED_TOKENS = 600
# Each specialisation of a kernel is compiled: for one request, and for multiples of 16.
GRAPH_SIZES = (1, 8, 64, 256)
Job = tuple[str, Callable[[], dict[str, Any]]]


def all_jobs(settings: Settings) -> list[Job]:
    """Returns the kernel cases of the tests, and the attention problems that are timed later.

    Args:
        settings (`Settings`):
            What the command line decided.
    """
    sizes = sizes_for(settings.dry_run)
    # First what later parts need compiled, and the longest of all.
    jobs: list[Job] = [
        (f"engine, {size.name}", _engine(size, settings, sizes)) for size in (sizes.large_model, sizes.small_model)
    ]
    shared = 32 if settings.dry_run else SHARED_TOKENS
    jobs.append(("engine, shared prefix", lambda: check_engine(sizes.large_model, settings, sizes.dtype, shared)))
    jobs += [(problem.name, _problem(problem, settings, sizes)) for problem in (*sizes.decodes, *sizes.prefills)]
    cases = list(kernel_cases(settings.device).items())
    return jobs + cases[:: sizes.case_stride]


def _engine(size: ModelSize, settings: Settings, sizes: Sizes) -> Callable[[], dict[str, Any]]:
    return lambda: check_engine(size, settings, sizes.dtype)


def check_engine(size: ModelSize, settings: Settings, dtype: torch.dtype, num_shared: int = 0) -> dict[str, Any]:
    """Returns how far an engine's tokens are from stock Transformers' choice, on one layer of a model measured later.

    Args:
        size (`ModelSize`):
            Its shape.
        settings (`Settings`):
            What the command line decided.
        dtype (`torch.dtype`):
            Of its weights.
        num_shared (`int`, defaults to 0):
            Tokens that all prompts have in common; their requests run without graphs then.
    """
    model = random_model(dataclasses.replace(size, num_layers=1), settings.device, dtype, settings.seed)
    # Others use the device at the same time.
    limits: dict[str, Any] = {"num_blocks": 64 if settings.dry_run else 4096, "cuda_graph_sizes": GRAPH_SIZES}
    if num_shared:
        limits["enforce_eager"] = True
    found = check_tokens(model, size.name, Run(settings, Deadline(60.0), {}), num_shared, **limits)
    return {"error": found["worst_regret"], "allowed": found["allowed_regret"]}


def _problem(problem: Problem, settings: Settings, sizes: Sizes) -> Callable[[], dict[str, Any]]:
    return lambda: check_problem(problem, settings, sizes.dtype)


def check_problem(problem: Problem, settings: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """Returns how far our attention is from torch's on a problem that is timed later.

    Args:
        problem (`Problem`):
            The problem.
        settings (`Settings`):
            What the command line decided.
        dtype (`torch.dtype`):
            Of everything.
    """
    paged = PagedProblem(problem, settings.device, dtype, settings.seed, max_sets=1)
    ours = paged.paged_calls(paged.backend())[0]()
    ours = ours.view(problem.num_requests, problem.query_len, problem.num_heads, problem.head_dim).transpose(1, 2)
    error = (ours.float() - sdpa(paged)[0]().float()).abs().nan_to_num(nan=1e9).max().item()
    return {"error": error, "allowed": ALLOWED[dtype]}


def judge(name: str, job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what a case found, and whether it passed.

    Args:
        name (`str`):
            The case.
        job (`Callable[[], dict[str, Any]]`):
            Runs it.
    """
    begin = time.monotonic()
    try:
        found = job()
    except Exception as error:
        traceback.print_exc()
        return {"case": name, "passed": False, "why": f"{type(error).__name__}: {str(error)[-300:]}"}
    near = found.get("error", 0.0) <= found.get("allowed", 0.0)
    return {**found, "case": name, "passed": near and found.get("passed", True), "seconds": time.monotonic() - begin}


def main() -> None:
    """Runs the share that the command line names."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = Settings.from_json(sys.argv[1])
    number, count = int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if settings.dry_run:
        importlib.import_module("tests.kernels.triton.interpreter")  # mends bfloat16 in the interpreter
    jobs = all_jobs(settings)
    print(json.dumps({"jobs": [name for name, _ in jobs[number::count]]}), file=answers, flush=True)
    with contextlib.nullcontext() if settings.dry_run else launches_on(settings.device):
        for name, job in jobs[number::count]:
            print(json.dumps(judge(name, job), default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
