"""The kernel cases of the tests, as calls that say how far a kernel is from float64 and how far it may be."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

Result = dict[str, Any]
# Of errors that an attention case names beside the output's, such as that of the log-sum-exp.
SMALL = 1e-4
# It hands addresses to its kernel, so its tensors must be on the device from the first.
_BY_ADDRESS = "copies of blocks"


def kernel_cases(device: str) -> dict[str, Callable[[], Result]]:
    """Returns all cases, by name. On a GPU their launches must be brought there (`hardware.py`).

    Args:
        device (`str`):
            `"cuda"`; or `"cpu"`, where the interpreter runs them.
    """
    return dict([*_attention(), *_operators(device), *_sampling(), *_layers()])


def _attention() -> Iterator[tuple[str, Callable[[], Result]]]:
    from tests.kernels.triton import run_attention_cases as cases

    def run(name: str) -> Result:
        found: Result = cases.run(name)
        others = [error for key, error in found.items() if key.endswith("_error")]
        return found | {"passed": all(error <= SMALL for error in others)}

    for name in cases.CASES:
        yield f"attention: {name}", functools.partial(run, name)


def _operators(device: str) -> Iterator[tuple[str, Callable[[], Result]]]:
    from tests.kernels.triton import run_operator_cases as cases

    def run(name: str, case: Callable[[], tuple[float, float]]) -> Result:
        torch.manual_seed(0)
        with torch.device(device) if name == _BY_ADDRESS else contextlib.nullcontext():
            error, allowed = case()
        return {"error": error, "allowed": allowed}

    for kernel, group in cases.CASES.items():
        for name, case in group.items():
            yield f"{kernel}: {name}", functools.partial(run, name, case)


def _sampling() -> Iterator[tuple[str, Callable[[], Result]]]:
    from tests.kernels.triton import run_sampling_cases as cases

    def run(case: Callable[[], tuple[int, int]]) -> Result:
        wrong, rows = case()
        return {"error": wrong, "allowed": 0, "rows": rows}

    for name, case in cases.CASES.items():
        yield f"sampling: {name}", functools.partial(run, case)


def _layers() -> Iterator[tuple[str, Callable[[], Result]]]:
    from tests.kernels.triton import run_layer_cases as cases

    def run(name: str) -> Result:
        torch.manual_seed(1)
        with torch.inference_mode():
            found: Result = cases.compare(name, torch.float32)
        return found

    for name in cases.CASES:
        yield f"layers: {name}", functools.partial(run, name)
