"""Weights, packed activations and paged requests for the kernels of amx_library.py, among NaN that nobody may use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from .amx_library import AmxLibrary, AttentionCase, from_bf16, guarded, to_bf16

NAN = 0x7FC0  # in bf16


def packed_block(x: np.ndarray, width: int) -> np.ndarray:
    """[tokens, k] -> [ceil(k / 2), width, 2], bf16, followed by NaN."""
    tokens, k = x.shape
    padded = np.zeros((width, k + k % 2), dtype=np.float32)
    padded[:tokens, :k] = x
    pairs = to_bf16(padded.reshape(width, -1, 2).transpose(1, 0, 2))
    return np.concatenate([pairs, np.full((2, width, 2), NAN, np.uint16)])


def weight_rows(random: np.random.Generator, num_rows: int, k: int, layout: str) -> tuple[list[np.ndarray], int]:
    """Rows of k bf16 numbers between NaN, and the distance that is the same between them (0: none is)."""
    stride = k if layout == "dense" else k + 24
    memory = np.full(num_rows * stride + 64, NAN, dtype=np.uint16)
    places = np.arange(num_rows) * stride
    if layout == "two parts" and num_rows > 5:
        places[5:] = places[5:][::-1]
    rows = [memory[place : place + k] for place in places]
    for row in rows:
        row[...] = to_bf16(random.standard_normal(k))
    return rows, stride if layout != "two parts" else 0


def make_case(
    random: np.random.Generator,
    *,
    context: int,
    new: int,
    heads: int = 3,
    kv_heads: int = 2,
    dims: tuple[int, int] = (64, 64),
    block_size: int = 16,
    as_float: bool = True,
    **features: Any,
) -> AttentionCase:
    """A request whose last `new` tokens ask, on shuffled blocks with NaN in every slot that is not theirs."""
    count = -(-context // block_size)
    table = random.permutation(count + 2)[:count].astype(np.int32)
    caches = []
    for dim in dims:
        cache = np.full((count + 2, kv_heads, block_size, dim), NAN, dtype=np.uint16)
        for position in range(context):
            slot = cache[table[position // block_size], :, position % block_size]
            slot[...] = to_bf16(random.standard_normal((kv_heads, dim)))
        caches.append(cache)
    query = to_bf16(random.standard_normal((new, heads * kv_heads, dims[0])) * 2)
    return AttentionCase(
        query=from_bf16(query) if as_float else query,
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        positions=np.arange(context - new, context, dtype=np.int32),
        tokens=np.arange(new, dtype=np.int32),
        kv_head=kv_heads - 1,
        end_key=context,
        **features,
    )


def check_that_only_given_memory_is_read(path: Path) -> None:
    """Runs in a process of its own: reading one byte too many ends it."""
    library, random = AmxLibrary(path), np.random.default_rng(0)
    for num_rows, k, tokens in [(48, 64, 64), (48, 77, 33), (5, 95, 16), (33, 576, 20)]:
        memory = guarded(to_bf16(random.standard_normal((num_rows, k))))
        packed = guarded(packed_block(random.standard_normal((tokens, k)), -(-tokens // 16) * 16)[:-2])
        library.linear(list(memory), k, packed, k, packed.shape[1])
    for dims, block_size, context in [((64, 64), 16, 33), ((80, 40), 8, 50), ((36, 5), 24, 200)]:
        case = make_case(random, context=context, new=9, dims=dims, block_size=block_size, as_float=False)
        used = int(case.block_table.max()) + 1
        keys, values = guarded(case.key_cache[:used]), guarded(case.value_cache[:used])
        library.attend(dataclasses.replace(case, key_cache=keys, value_cache=values, query=guarded(case.query)))
