"""What the machine can do right now: `python -m benchmarks.cpu.probe CACHE` prints one JSON object.

Read bandwidth on ordinary and on huge pages; the peak rate of float32 FMA and of bf16 products from registers (a small
C++ program, compiled once); the rate of torch's own large products, which need no compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_paged.tools.bench.machine import available_cores, huge_page_bytes, machine_info, measure_bandwidth

SOURCE = Path(__file__).with_name("peak.cpp")
GEMM_SIZE = 1536


def main() -> None:
    """Prints what was measured."""
    torch.set_num_threads(available_cores())
    print(json.dumps(probe(Path(sys.argv[1]))))


def probe(cache: Path) -> dict[str, Any]:
    """Returns bandwidths (bytes per second) and rates (operations per second) of all cores together.

    Args:
        cache (`Path`):
            Where the compiled program is kept.
    """
    bandwidth = measure_bandwidth()
    peaks = register_peaks(cache, torch.get_num_threads())
    return {
        "processor": machine_info().describe(),
        "load_average": os.getloadavg()[0],
        "read_bandwidth": bandwidth.best,
        "read_bandwidth_ordinary_pages": bandwidth.ordinary_pages,
        "read_bandwidth_huge_pages": bandwidth.huge_pages,
        "huge_pages_granted": bool(huge_page_bytes()),
        **peaks,
        "torch_float32_gemm": torch_gemm(torch.float32),
        "torch_bfloat16_gemm": torch_gemm(torch.bfloat16),
    }


def register_peaks(cache: Path, threads: int) -> dict[str, Any]:
    """Returns the peak rates of the instructions that products are made of; `None` where they cannot be measured.

    Args:
        cache (`Path`):
            Where the compiled program is kept.
        threads (`int`):
            Threads that work at the same time.
    """
    none: dict[str, Any] = {"fma_peak": None, "bf16_peak": None, "bf16_unit": None}
    program = compiled(cache)
    if program is None:
        return none
    done = subprocess.run([str(program), str(threads)], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else none


def compiled(cache: Path) -> Path | None:
    """Returns the compiled program, or `None` without a compiler or for another processor.

    Args:
        cache (`Path`):
            Where it is kept.
    """
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    source = SOURCE.read_bytes()
    program = cache / f"peak-{hashlib.sha256(source).hexdigest()[:12]}"
    if program.exists() or compiler is None:
        return program if program.exists() else None
    cache.mkdir(parents=True, exist_ok=True)
    temporary = program.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O2", "-std=c++17", "-pthread", str(SOURCE), "-o", str(temporary)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        return None
    os.replace(temporary, program)
    return program


def torch_gemm(dtype: torch.dtype) -> float:
    """Returns the rate of torch's product of two large matrices: the best of a few.

    Args:
        dtype (`torch.dtype`):
            Dtype of the matrices.
    """
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype) for _ in range(2))
    seconds = min(_time(lambda: left @ right) for _ in range(6))
    return 2 * GEMM_SIZE**3 / seconds


def _time(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
