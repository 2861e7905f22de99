"""The kernels for the matrix unit (AMX) in a library of their own, emulated or not, called with NumPy arrays.

bf16 arrays are uint16 arrays of their bits. Nothing here imports torch: a subprocess that may crash starts quickly.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from pathlib import Path

import numpy as np

_POINTERS = (
    "query key_cache value_cache output lse partials sinks alibi_slopes tokens positions block_table first_parts"
)
_INTEGERS = (
    "num_query_heads num_kv_heads key_dim value_dim block_size query_is_float window num_tokens first_head num_heads "
    "kv_head first_key end_key part"
)
MAX_WIDTH = 64  # tokens of a packed block


def to_bf16(numbers: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def guarded(array: np.ndarray) -> np.ndarray:
    """Returns a copy that ends where readable memory ends: reading one byte more is a segmentation fault."""
    page, size = mmap.PAGESIZE, array.nbytes
    pages = -(-size // page)
    region = mmap.mmap(-1, (pages + 1) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(address + pages * page), ctypes.c_size_t(page), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = np.frombuffer(region, dtype=array.dtype, count=array.size, offset=pages * page - size).reshape(array.shape)
    copy[...] = array
    return copy


class _AttentionCall(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS.split()]
        + [(name, ctypes.c_int64) for name in _INTEGERS.split()]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float)]
    )


@dataclasses.dataclass
class AttentionCase:
    """Some rows (tokens x heads of one K/V head) of a call, and where their keys lie."""

    query: np.ndarray  # [tokens, query heads, Dk], float32 or bf16
    key_cache: np.ndarray  # [blocks, kv heads, block size, Dk], bf16
    value_cache: np.ndarray
    block_table: np.ndarray  # int32
    positions: np.ndarray  # int32, by token of the call
    tokens: np.ndarray  # int32, of the item
    kv_head: int
    end_key: int
    first_key: int = 0
    scale: float = 0.125
    window: int = 0
    softcap: float = 0.0
    sinks: np.ndarray | None = None
    alibi_slopes: np.ndarray | None = None

    @property
    def heads(self) -> range:
        group = self.query.shape[1] // self.key_cache.shape[1]
        return range(self.kv_head * group, (self.kv_head + 1) * group)


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


class AmxLibrary:
    """The entry points of amx_kernels.cpp.

    Args:
        path (`Path`):
            What `build` made.
    """

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))
        self._library.attention_scratch.restype = ctypes.c_int64
        self.columns = self._library.columns_of_item()
        if hasattr(self._library, "start_trap"):
            self._library.start_trap()

    def close(self) -> None:
        """Leaves the process's handling of unknown instructions as it was."""
        if hasattr(self._library, "end_trap"):
            self._library.end_trap()

    def multiply_tiles(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, configured: bool = True) -> np.ndarray:
        out = np.array(c, dtype=np.float32)
        self._library.multiply_tiles(*(ctypes.c_void_p(x.ctypes.data) for x in (a, b, out)), int(configured))
        return out

    def linear(self, rows: list[np.ndarray], row_stride: int, packed: np.ndarray, k: int, width: int) -> np.ndarray:
        """Returns [width, columns of an item] for weight rows of k bf16 numbers and a packed block."""
        pointers = (ctypes.c_void_p * len(rows))(*(row.ctypes.data for row in rows))
        out = np.full((self.columns, MAX_WIDTH), np.nan, dtype=np.float32)
        scratch, margin = _scratch(self.columns * (-(-k // 32) * 32) + 16 * 1024)
        self._library.linear_many(
            pointers,
            len(rows),
            ctypes.c_int64(row_stride),
            ctypes.c_int64(k),
            ctypes.c_void_p(packed.ctypes.data),
            width,
            ctypes.c_void_p(out.ctypes.data),
            ctypes.c_void_p(scratch.ctypes.data),
        )
        assert np.isnan(margin).all(), "the kernel wrote beyond its scratch memory"
        return out[:, :width].T

    def attend(self, case: AttentionCase) -> tuple[np.ndarray, np.ndarray]:
        """Returns output [tokens, query heads, Dv] and log-sum-exp; NaN for rows that are not the item's."""
        output, lse = self._outputs(case)
        self._run(self._call(case, output, lse))
        return output, lse

    def attend_in_parts(self, case: AttentionCase, cuts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Like `attend`, with the keys in several pieces that are merged."""
        output, lse = self._outputs(case)
        num_tokens, num_heads, _ = case.query.shape
        value_dim, parts = case.value_cache.shape[3], len(cuts) + 1
        partials = np.full((num_tokens * parts, num_heads, value_dim + 2), np.nan, dtype=np.float32)
        first_parts = np.arange(num_tokens, dtype=np.int32) * parts
        edges = [case.first_key, *cuts, case.end_key]
        for part in range(parts):
            call = self._call(dataclasses.replace(case, first_key=edges[part], end_key=edges[part + 1]), output, lse)
            call.partials, call.first_parts, call.part = _address(partials), _address(first_parts), part
            self._run(call)
        for token in case.tokens:
            self._library.attention_merge(ctypes.byref(call), ctypes.c_int64(parts), ctypes.c_int64(int(token)))
        return output, lse

    def _run(self, call: _AttentionCall) -> None:
        scratch, margin = _scratch(self._library.attention_scratch(ctypes.byref(call)))
        self._library.attention_many_rows(ctypes.byref(call), ctypes.c_void_p(scratch.ctypes.data))
        assert np.isnan(margin).all(), "the kernel wrote beyond its scratch memory"

    def _outputs(self, case: AttentionCase) -> tuple[np.ndarray, np.ndarray]:
        num_tokens, num_heads, _ = case.query.shape
        output = np.full((num_tokens, num_heads, case.value_cache.shape[3]), np.nan, dtype=np.float32)
        if case.query.dtype != np.float32:
            output = to_bf16(output)
        return output, np.full((num_tokens, num_heads), np.nan, dtype=np.float32)

    def _call(self, case: AttentionCase, output: np.ndarray, lse: np.ndarray) -> _AttentionCall:
        arrays = {name: getattr(case, name, None) for name in _POINTERS.split()} | {"output": output, "lse": lse}
        _, num_kv_heads, block_size, key_dim = case.key_cache.shape
        return _AttentionCall(
            **{name: _address(array) for name, array in arrays.items()},
            num_query_heads=case.query.shape[1],
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=case.value_cache.shape[3],
            block_size=block_size,
            query_is_float=case.query.dtype == np.float32,
            window=case.window,
            num_tokens=len(case.tokens),
            first_head=case.heads[0],
            num_heads=len(case.heads),
            kv_head=case.kv_head,
            first_key=case.first_key,
            end_key=case.end_key,
            scale=case.scale,
            softcap=case.softcap,
        )


def _scratch(size: int, margin: int = 16 * 1024) -> tuple[np.ndarray, np.ndarray]:
    """float32 memory, NaN, on a 64-byte boundary, and what lies behind it."""
    memory = np.full(size + 16 + margin, np.nan, dtype=np.float32)
    memory = memory[-memory.ctypes.data % 64 // 4 :]
    return memory[:size], memory[size:]
