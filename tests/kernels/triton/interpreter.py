"""Makes Triton's interpreter compute in bfloat16 and float8 what a GPU would; imported for its effect, only by tests.

With `TRITON_INTERPRET=1` a bfloat16 tensor is a numpy array of 16-bit patterns, a float8 tensor one of 8-bit patterns.
Up to Triton 3.9 `dot` and arithmetic work on bfloat16's patterns as if they were whole numbers, and casts to either
type cut bits off or round wrongly. They are replaced here by float32 arithmetic, rounded to nearest even by torch;
float8 saturates, as the hardware's conversions do. Reductions are refused: a kernel has to upcast before it sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder
TensorHandle = interpreter.TensorHandle

# Triton's type: torch's, the integers that torch can view it from, the integers that the interpreter holds it in.
PATTERNS = {
    tl.bfloat16: (torch.bfloat16, np.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8, np.uint8),
}


def widen(patterns: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Returns the float32 numbers that bit patterns stand for; no rounding happens."""
    torch_dtype, viewable, _ = PATTERNS[dtype]
    bits = torch.from_numpy(np.ascontiguousarray(patterns).view(viewable))
    return bits.view(torch_dtype).float().numpy().reshape(patterns.shape)


def narrow(numbers: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Returns the bit patterns of numbers rounded to a narrow type; float8 saturates."""
    torch_dtype, viewable, held = PATTERNS[dtype]
    wide = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    if torch_dtype is not torch.bfloat16:
        largest = torch.finfo(torch_dtype).max
        wide = wide.clamp(-largest, largest)
    bits = wide.to(torch_dtype).view(torch.from_numpy(np.empty(0, viewable)).dtype)
    return bits.numpy().view(held).reshape(np.shape(numbers))


def numbers_of(handle: TensorHandle) -> np.ndarray:
    """Returns what a tensor holds, as numbers that numpy can compute with."""
    dtype = handle.dtype.scalar
    return widen(handle.data, dtype) if dtype in PATTERNS else handle.data


original_convert = interpreter._convert_float
original_cast = Builder.cast_impl
original_binary = Builder.binary_op
original_unary = Builder.unary_op
original_fma = Builder.create_fma
original_reduce = interpreter.ReduceOps.apply_impl


def convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: Any) -> np.ndarray:
    if source not in PATTERNS and target not in PATTERNS:
        return original_convert(data, source, target, rounding_mode)
    held = data.view(interpreter._get_np_dtype(source))
    numbers = widen(held, source) if source in PATTERNS else held
    return narrow(numbers, target) if target in PATTERNS else numbers.astype(interpreter._get_np_dtype(target))


def cast_impl(self: Any, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
    source, target = src.dtype.scalar, dst_type.scalar
    if source == target or tl.bfloat16 not in (source, target):
        return original_cast(self, src, dst_type)
    numbers = numbers_of(src)
    data = narrow(numbers, target) if target in PATTERNS else numbers.astype(interpreter._get_np_dtype(target))
    return TensorHandle(data, target)


def create_dot(
    self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, input_precision: Any, max_num_imprecise_acc: Any
) -> TensorHandle:
    product = np.matmul(numbers_of(a), numbers_of(b), dtype=d.data.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)


def binary_op(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
    dtype = lhs.dtype.scalar
    if dtype not in PATTERNS:
        return original_binary(self, lhs, rhs, op)
    result = op(numbers_of(lhs), numbers_of(rhs))
    if result.dtype == np.bool_:
        return TensorHandle(result, tl.int1)
    return TensorHandle(narrow(result, dtype), dtype)


def unary_op(self: Any, arg: TensorHandle, op: Any) -> TensorHandle:
    dtype = arg.dtype.scalar
    if dtype not in PATTERNS:
        return original_unary(self, arg, op)
    return TensorHandle(narrow(op(numbers_of(arg)), dtype), dtype)


def create_fma(self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    dtype = z.dtype.scalar
    if dtype not in PATTERNS:
        return original_fma(self, x, y, z)
    result = numbers_of(x).astype(np.float64) * numbers_of(y) + numbers_of(z)
    return TensorHandle(narrow(result, dtype), dtype)


def apply_reduction(self: Any, input: tuple[tl.tensor, ...]) -> Any:
    for tensor in input:
        assert tensor.dtype.scalar not in PATTERNS, f"a kernel reduces in {tensor.dtype}: it must upcast before"
    return original_reduce(self, input)


interpreter._convert_float = convert_float
interpreter.ReduceOps.apply_impl = apply_reduction
Builder.cast_impl = cast_impl
Builder.create_dot = create_dot
Builder.binary_op = binary_op
Builder.unary_op = unary_op
Builder.create_fma = create_fma
