"""How a Triton kernel is compiled in one of its uses, without Triton: who compiles ahead of time reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class KernelVariant:
    """A kernel with the types and constants of one use.

    A module with kernels lists them in a function `all_configurations`, without arguments, which returns a list of
    these. Types and constants together name every argument of the kernel once.

    Args:
        name (`str`):
            Its name, unique and lasting: what was recorded about it is found by it.
        kernel (`str`):
            `"package.module:function"`, imported only by who compiles.
        signature (`Mapping[str, str]`):
            Arguments that are no constants, and their types in Triton's words: `"*bf16"`, `"*i32"`, `"i32"`, `"fp32"`.
        constexprs (`Mapping[str, Any]`):
            Constants, among them pointers that are `None` in this use.
        num_warps (`int`, defaults to 4):
            Warps of a program.
        num_stages (`int`, defaults to 3):
            Depth of the pipeline that loads ahead.
        max_registers (`int`, *optional*):
            Registers of a thread at most, where the compiler can be told (NVIDIA's). By default it looks for a number
            with which more programs fit, and spills what is too much for it.
        divisible (`frozenset[str]`, *optional*, defaults to none):
            Arguments that are multiples of 16: pointers (in bytes), strides. Without them no wide loads are made.
        has_dot (`bool`, defaults to `True`):
            Whether tensor cores must be used.
        wide_loads (`bool`, defaults to `True`):
            Whether loads of 128 bits must be used.
        targets (`frozenset[str]`, *optional*):
            Architectures that use it (`"sm_80"`, `"gfx942"`, ...); by default all.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    divisible: frozenset[str] = frozenset()
    has_dot: bool = True
    wide_loads: bool = True
    targets: frozenset[str] | None = None

    def is_for(self, target: str) -> bool:
        """Returns whether an architecture uses it.

        Args:
            target (`str`):
                Such as `"sm_90"`.
        """
        return self.targets is None or target in self.targets
