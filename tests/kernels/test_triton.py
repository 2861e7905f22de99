from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

BFLOAT16_PROGRAM = """
import interpreter
import torch, triton, triton.language as tl

@triton.jit
def kernel(x_ptr, y_ptr, sum_ptr, product_ptr):
    offsets = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    tl.store(sum_ptr + offsets, x + y)
    tl.store(product_ptr + offsets, tl.dot(x, y).to(tl.bfloat16))

torch.manual_seed(0)
x, y = torch.randn(2, 16, 16).bfloat16()
total, product = torch.empty_like(x), torch.empty_like(x)
kernel[(1,)](x, y, total, product)
assert torch.equal(total, x + y)
torch.testing.assert_close(product, (x.double() @ y.double()).bfloat16(), rtol=2**-7, atol=1e-6)
assert (product == (x.double() @ y.double()).bfloat16()).float().mean() > 0.98
"""


def run_interpreted(program: Path) -> str:
    """Runs a program under Triton's interpreter and returns what it printed."""
    folders = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": folders}
    finished = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def test_the_kernel_agrees_with_the_reference_in_the_interpreter():
    printed = run_interpreted(Path(__file__).with_name("triton_cases.py"))
    results = [json.loads(line) for line in printed.splitlines()]
    assert len(results) > 20
    wrong = [r for r in results if r["error"] > r["allowed"] or r.get("lse_error", 0) > 1e-5]
    assert not wrong


def test_bfloat16_in_the_interpreter_rounds_as_hardware_does(tmp_path):
    # Triton reads a kernel's source, so that it must be in a file.
    program = tmp_path / "program.py"
    program.write_text(BFLOAT16_PROGRAM)
    run_interpreted(program)
