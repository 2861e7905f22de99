"""The architectures that kernels are compiled for, and how many programs of a kernel fit on one of their processors."""

from __future__ import annotations

import dataclasses

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a multiprocessor (a compute unit at AMD's) offers.

    Args:
        name (`str`):
            Such as `"sm_90"`.
        backend (`str`):
            Triton's word: `"cuda"` or `"hip"`.
        arch (`int` or `str`):
            Triton's number or name of it.
        warp_size (`int`):
            Threads of a warp.
        shared_limit (`int`):
            Bytes of shared memory that one program may take.
        shared_total (`int`):
            Bytes of shared memory of all programs.
        shared_reserved (`int`):
            Bytes that each program takes beside its own.
        registers (`int`):
            Registers of a thread's width, times threads: what all warps share. At AMD's, of one SIMD unit.
        max_warps (`int`):
            Warps at most.
        simd_units (`int`, defaults to 1):
            Units among which the warps are divided, each with its own registers.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    shared_total: int
    shared_reserved: int
    registers: int
    max_warps: int
    simd_units: int = 1

    def occupancy(self, registers: int, shared: int, num_warps: int) -> float:
        """Returns the share of the possible warps that can be present at once.

        Args:
            registers (`int`):
                Registers of a thread.
            shared (`int`):
                Bytes of shared memory of a program.
            num_warps (`int`):
                Warps of a program.
        """
        # Registers are handed out to whole warps, eight to a thread at a time.
        per_warp = max(-(-registers // 8) * 8, 8) * self.warp_size
        warps = min(self.registers // per_warp * self.simd_units, self.max_warps)
        programs = warps // num_warps
        if shared:
            programs = min(programs, self.shared_total // (shared + self.shared_reserved))
        return programs * num_warps / self.max_warps


def _cuda(capability: int, shared_limit: int, shared_total: int, max_warps: int) -> Architecture:
    name = f"sm_{capability}"
    return Architecture(name, "cuda", capability, 32, shared_limit * KIB, shared_total * KIB, KIB, 65536, max_warps)


# From the tables of NVIDIA's CUDA programming guide, and of AMD's CDNA 3 instruction set reference.
ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        _cuda(80, 163, 164, 64),
        _cuda(89, 99, 100, 48),
        _cuda(90, 227, 228, 64),
        _cuda(100, 227, 228, 64),
        _cuda(120, 99, 100, 48),
        Architecture("gfx942", "hip", "gfx942", 64, 64 * KIB, 64 * KIB, 0, 512 * 64, 32, simd_units=4),
    )
}
