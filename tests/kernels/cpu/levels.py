"""Running a test at each instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

LEVELS = ("avx512", "avx2")


def at_level(level: str, load: Callable[[], bool]) -> Iterator[str]:
    """Uses one instruction set until resumed; skips the test where the machine or the library lacks it.

    Args:
        level (`str`):
            One of `LEVELS`.
        load (`Callable`):
            The `load` of a family of operators.
    """
    if not load():
        pytest.skip("no native library on this machine")
    if level not in torch.ops.hf_paged.available_isas():
        pytest.skip(f"this machine has no {level}")
    before = torch.ops.hf_paged.isa()
    torch.ops.hf_paged.set_isa(level)
    yield level
    torch.ops.hf_paged.set_isa(before)
