"""What a compiled kernel needs and contains, read from the machine code that Triton made."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Instructions of tensor cores: half precision, eight bits, and those of Blackwell's tensor memory.
_TENSOR_CORES = re.compile(r"\b(?:HMMA|HGMMA|QMMA|QGMMA|IMMA|IGMMA|OMMA|UTC\w*MMA)\b")
_WIDE_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.[\w.]*?(?:128|256)\b|\bUTMALDG\b|\bUBLKCP\b")
_LOCAL = re.compile(r"\b(?:LDL|STL)\b")
# nvdisasm -c:   /*00a0*/   @P0 LDG.E.128 R4, desc[UR4][R2.64] ;
_SASS_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(\S.*?)\s*;", re.MULTILINE)
_AMD_LINE = re.compile(r"^\s+(?:s|v|ds|global|buffer|flat|scratch)_\w+", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclasses.dataclass(frozen=True)
class CodeFigures:
    """What is known of a compiled kernel.

    Args:
        instructions (`int`):
            Instructions, padding apart.
        registers (`int`):
            Registers of a thread.
        shared (`int`):
            Bytes of shared memory of a program.
        stack (`int`):
            Bytes of stack and local memory of a thread.
        spills (`int`):
            Instructions that reach local memory; at AMD's, registers kept there.
        tensor_core (`int`):
            Instructions of tensor cores.
        wide_loads (`int`):
            Loads of 128 bits and more.
    """

    instructions: int
    registers: int
    shared: int
    stack: int
    spills: int
    tensor_core: int
    wide_loads: int

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return dataclasses.asdict(self)


def read_figures(compiled: Any, tools: Path) -> CodeFigures:
    """Returns what is known of a compiled kernel.

    Args:
        compiled (`triton.compiler.CompiledKernel`):
            What `triton.compile` returned.
        tools (`Path`):
            Folder of `cuobjdump` and `nvdisasm`.
    """
    shared = compiled.metadata.shared
    if "cubin" not in compiled.asm:
        return figures_of_amdgcn(compiled.asm["amdgcn"], shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output([str(tools / "cuobjdump"), "-res-usage", file.name])
        # -ndf: without the analysis that names branches' targets, which takes a fifth of the time.
        sass = _output([str(tools / "nvdisasm"), "-c", "-ndf", file.name])
    return figures_of_sass(sass, usage, shared)


def figures_of_sass(sass: str, usage: str, shared: int) -> CodeFigures:
    """Returns what NVIDIA's tools say of a kernel.

    Args:
        sass (`str`):
            Printed by `nvdisasm -c`.
        usage (`str`):
            Printed by `cuobjdump -res-usage`.
        shared (`int`):
            Bytes of shared memory, as Triton has it.
    """
    found = _USAGE.search(usage)
    assert found is not None, f"cuobjdump -res-usage printed something else: {usage[:200]}"
    lines = [line for line in _SASS_LINE.findall(sass) if line != "NOP"]
    assert lines, f"nvdisasm printed something else: {sass[:200]}"
    return CodeFigures(
        instructions=len(lines),
        registers=int(found[1]),
        shared=shared,
        stack=int(found[2]) + int(found[3]),
        spills=_count(_LOCAL, lines),
        tensor_core=_count(_TENSOR_CORES, lines),
        wide_loads=_count(_WIDE_LOAD, lines),
    )


def figures_of_amdgcn(assembly: str, shared: int) -> CodeFigures:
    """Returns what an AMD kernel's assembly says of itself.

    Args:
        assembly (`str`):
            As Triton has it.
        shared (`int`):
            Bytes of shared memory, as Triton has it.
    """

    def noted(name: str) -> int:
        # The notes behind the code: "    .vgpr_count:     118"
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        return int(found[1]) if found else 0

    lines = _AMD_LINE.findall(assembly)
    assert lines, f"the assembly contains no instructions: {assembly[:200]}"
    return CodeFigures(
        instructions=len(lines),
        registers=noted("vgpr_count"),  # accumulation registers included
        shared=shared,
        stack=noted("private_segment_fixed_size"),
        # Scalar registers are kept in unused lanes of a vector register, not in memory; where there are none left, on
        # the stack.
        spills=noted("vgpr_spill_count"),
        tensor_core=_count(re.compile(r"\bv_(?:s?mfma|wmma)_"), lines),
        wide_loads=_count(re.compile(r"\b(?:global|buffer|flat)_load_(?:dwordx4|b128|lds_dwordx4)\b"), lines),
    )


def _count(pattern: re.Pattern[str], lines: Sequence[str]) -> int:
    return sum(pattern.search(line) is not None for line in lines)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command[0]} failed: {done.stderr[-300:]}"
    return done.stdout + done.stderr
