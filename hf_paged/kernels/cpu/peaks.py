"""What the processor does at most: the yardstick of operators that are bound by arithmetic."""

from __future__ import annotations

from typing import Literal

import torch

from ...errors import NotSupportedError, UnknownNameError
from . import library

Instruction = Literal["fma", "bf16_dot", "amx"]


def peak_instructions() -> tuple[str, ...]:
    """Returns the multiply-accumulate instructions of the level in use; none without the native library.

    Names are `"fma"` (float32), `"bf16_dot"` (pairs of bfloat16, AVX-512) and `"amx"` (tiles of bfloat16).
    """
    return tuple(torch.ops.hf_paged.peak_instructions()) if library.load() else ()


def peak_flops(instruction: str) -> float:
    """Measures the operations per second of one instruction on all of torch's threads, in 20 ms.

    Each thread times short bursts of independent instructions on registers and counts its shortest, so that a busy
    machine shows what it would do alone. A multiplication and an addition are two operations.

    Args:
        instruction (`str`):
            A name of `peak_instructions`.

    Raises:
        NotSupportedError: If there is no native library here.
        UnknownNameError: If the level in use has no such instruction.
    """
    known = peak_instructions()
    if not known:
        raise NotSupportedError(f"Peaks are measured by native operators, and {library.status().describe()}.")
    if instruction not in known:
        raise UnknownNameError(f"Unknown `instruction` {instruction!r}; the level in use has {', '.join(known)}.")
    return torch.ops.hf_paged.peak_flops(instruction) * 1e9


def used_instruction(dtype: torch.dtype) -> str:
    """Returns the instruction that linears and attention use where they are bound by arithmetic.

    Args:
        dtype (`torch.dtype`):
            Dtype of the weights, or of K/V.

    Raises:
        NotSupportedError: If there is no native library here.
    """
    known = peak_instructions()
    if not known:
        raise NotSupportedError(f"There are no native operators: {library.status().describe()}.")
    if dtype is not torch.bfloat16:
        return "fma"
    if "amx" in known:
        return "amx"
    return "bf16_dot" if torch.ops.hf_paged.prefers_bf16_dot() else "fma"
