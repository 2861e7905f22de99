"""Makes Triton's interpreter compute in bfloat16 what a GPU would; imported for its effect, only by tests.

With `TRITON_INTERPRET=1` a bfloat16 tensor is a numpy array of 16-bit patterns. Up to Triton 3.9 its `dot` and its
arithmetic work on those patterns as if they were whole numbers, and its casts to bfloat16 cut bits off instead of
rounding. The three are replaced here by their float32 equivalents, rounded to nearest even by torch.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder
TensorHandle = interpreter.TensorHandle


def widen(patterns: np.ndarray) -> np.ndarray:
    """Returns bfloat16 bit patterns as float32 numbers: the same bits with sixteen zeros behind them."""
    return (patterns.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow(numbers: np.ndarray) -> np.ndarray:
    """Returns float32 numbers rounded to bfloat16, as bit patterns."""
    rounded = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def is_bfloat16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar is tl.bfloat16


def numbers_of(handle: TensorHandle) -> np.ndarray:
    return widen(handle.data) if is_bfloat16(handle) else handle.data


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(numbers_of(a), numbers_of(b), dtype=d.data.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)


original_cast = Builder.cast_impl
original_binary_op = Builder.binary_op


def cast_impl(self, src, dst_type):
    source, target = src.dtype.scalar, dst_type.scalar
    if source is target or tl.bfloat16 not in (source, target):
        return original_cast(self, src, dst_type)
    if target is tl.bfloat16:
        return TensorHandle(narrow(src.data), tl.bfloat16)
    wide = TensorHandle(widen(src.data), tl.float32)
    return wide if target is tl.float32 else original_cast(self, wide, dst_type)


def binary_op(self, lhs, rhs, op):
    if not is_bfloat16(lhs):
        return original_binary_op(self, lhs, rhs, op)
    result = op(widen(lhs.data), widen(rhs.data))
    if result.dtype == np.bool_:
        return TensorHandle(result, tl.int1)
    return TensorHandle(narrow(result), tl.bfloat16)


Builder.create_dot = create_dot
Builder.cast_impl = cast_impl
Builder.binary_op = binary_op
