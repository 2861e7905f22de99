from __future__ import annotations

import importlib.util

import pytest

from tests.kernels.triton.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ARITHMETIC = """
from tests.kernels.triton import interpreter
import torch, triton, triton.language as tl

@triton.jit
def kernel(x_ptr, y_ptr, sum_ptr, product_ptr, negative_ptr):
    offsets = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    tl.store(sum_ptr + offsets, x + y)
    tl.store(product_ptr + offsets, tl.dot(x, y).to(tl.bfloat16))
    tl.store(negative_ptr + offsets, -x)

torch.manual_seed(0)
x, y = torch.randn(2, 16, 16).bfloat16()
total, product, negative = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
kernel[(1,)](x, y, total, product, negative)
assert torch.equal(total, x + y)
assert torch.equal(negative, -x)
torch.testing.assert_close(product, (x.double() @ y.double()).bfloat16(), rtol=2**-7, atol=1e-6)
assert (product == (x.double() @ y.double()).bfloat16()).float().mean() > 0.98
"""
CASTS = """
from tests.kernels.triton import interpreter
import torch, triton, triton.language as tl

@triton.jit
def kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets).to(y_ptr.dtype.element_ty))

torch.manual_seed(0)
wide = torch.cat([torch.randn(200), torch.randn(200) * 1e-3, torch.randn(100) * 400, torch.zeros(12)])
types = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
for source in types:
    for target in types:
        if source is not target:
            x = wide.to(source)
            y = torch.zeros(512, dtype=target)
            kernel[(1,)](x, y, 512)
            expected = x.float()
            if target.itemsize == 1:
                expected = expected.clamp(-torch.finfo(target).max, torch.finfo(target).max)
            assert torch.equal(y.float(), expected.to(target).float()), (source, target)
"""
REDUCTION = """
from tests.kernels.triton import interpreter
import torch, triton, triton.language as tl

@triton.jit
def kernel(x_ptr, y_ptr):
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 16)), 0))

kernel[(1,)](torch.ones(16).bfloat16(), torch.zeros(1).bfloat16())
"""


@pytest.mark.parametrize("program", [ARITHMETIC, CASTS], ids=["arithmetic", "casts"])
def test_narrow_types_in_the_interpreter_round_as_hardware_does(tmp_path, program):
    # Triton reads a kernel's source, so that it must be in a file.
    path = tmp_path / "program.py"
    path.write_text(program)
    run_interpreted(path)


def test_a_reduction_in_bfloat16_is_refused(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(REDUCTION)
    with pytest.raises(AssertionError, match="must upcast before"):
        run_interpreted(path)
