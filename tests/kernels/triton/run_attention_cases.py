"""Runs the Triton attention kernels in Triton's interpreter against float64; a program, see `interpreted.py`.

Prints for each case its largest errors beside what is allowed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_paged.kernels import PagedAttentionMetadata, select_backend
from hf_paged.kernels.triton.attention import Scoring, paged_attention
from hf_paged.kernels.triton.layer_cache import LayerCache
from hf_paged.kernels.triton.shared_prefix import PREPARED, SharedPrefixes
from tests.kernels.attention_calls import Call, make_call
from tests.kernels.triton import interpreter  # noqa: F401 - mends the interpreter's bfloat16
from tests.kernels.triton.attention_cases import CASES, TOLERANCE, Case

Result = tuple[torch.Tensor, torch.Tensor | None]


def prepare(case: Case) -> tuple[Call, dict[str, Any]]:
    """Returns a case's call, with NaN in all slots that hold no token, and its features."""
    call = make_call(case.lengths, **case.call)
    for request, (_, seq_len) in enumerate(case.lengths):
        if used := seq_len % call.metadata.block_size:
            block = call.metadata.block_tables[request, seq_len // call.metadata.block_size]
            call.key_cache[block, :, used:] = call.value_cache[block, :, used:] = math.nan
    features = dict(case.features)
    num_heads = call.spec.num_query_heads
    if "sinks" in features:
        # Strong enough to take most of the softmax for some heads and nothing for others.
        features["sinks"] = torch.linspace(-5.0, 5.0, num_heads)
    if "alibi_slopes" in features:
        features["alibi_slopes"] = 2.0 ** -torch.linspace(0.5, 8.0, num_heads)
    return call, features


def oracle(call: Call, features: dict[str, Any]) -> Result:
    wide = dataclasses.replace(call.spec, dtype=torch.float64)
    return select_backend(wide, "reference").attend(
        call.query.double(),
        call.key_cache.double(),
        call.value_cache.double(),
        call.metadata,
        scale=call.spec.key_dim**-0.5,
        **{**features, "return_lse": True},
    )


def attend(call: Call, features: dict[str, Any], metadata: PagedAttentionMetadata | None = None) -> Result:
    found = select_backend(call.spec, "triton").attend(
        call.query,
        call.key_cache,
        call.value_cache,
        metadata or call.metadata,
        scale=call.spec.key_dim**-0.5,
        **features,
    )
    return found if isinstance(found, tuple) else (found, None)


def plain(call: Call, features: dict[str, Any]) -> tuple[Result, Result]:
    return attend(call, features), oracle(call, features)


def last_dimensions(call: Call, features: dict[str, Any]) -> tuple[Result, Result]:
    call.query[..., :-8] = 0
    call.query[..., -8:] *= 4
    return plain(call, features)


def strided(call: Call, features: dict[str, Any]) -> tuple[Result, Result]:
    num_tokens, num_heads, key_dim = call.query.shape
    wide = torch.full((num_tokens, num_heads + 6, key_dim), math.nan, dtype=call.query.dtype)
    wide[:, 2 : num_heads + 2] = call.query
    return plain(dataclasses.replace(call, query=wide[:, 2 : num_heads + 2]), features)


def padded(call: Call, features: dict[str, Any]) -> tuple[Result, Result]:
    """Two requests more: one of length 0 with a token, one without tokens, both with a table that is no table."""
    expected, expected_lse = oracle(call, features)
    data = call.metadata
    nobodys = torch.full((2, data.block_tables.shape[1]), 1_000_000_000, dtype=torch.int32)
    end = data.cu_seqlens_q[-1:]
    metadata = dataclasses.replace(
        data,
        block_tables=torch.cat([data.block_tables, nobodys]),
        cu_seqlens_q=torch.cat([data.cu_seqlens_q, end + 1, end + 1]),
        seq_lens=torch.cat([data.seq_lens, data.seq_lens.new_zeros(2)]),
        query_lens_host=np.append(data.query_lens_host, [1, 0]),
        seq_lens_host=np.append(data.seq_lens_host, [0, 0]),
        num_decodes=data.num_decodes + 2,
    )
    more = torch.cat([call.query, torch.full_like(call.query[:2], math.nan)])
    output, lse = attend(dataclasses.replace(call, query=more), features, metadata)
    assert not output[-2].any(), "a request of length 0 gets zeros"
    if lse is not None:
        assert (lse[-2] == -math.inf).all(), "and saw nothing"
        lse = lse[:-2]
    return (output[:-2], lse), (expected, expected_lse)


def replayed(call: Call, features: dict[str, Any]) -> tuple[Result, Result]:
    """Lengths on the host as a graph is captured with them: most splits find nothing to do."""
    longest = np.full_like(call.metadata.seq_lens_host, 3000)
    return attend(call, features, dataclasses.replace(call.metadata, seq_lens_host=longest)), oracle(call, features)


def quantized(dtype: torch.dtype, largest: float) -> Callable[[Call, dict[str, Any]], tuple[Result, Result]]:
    def run(call: Call, features: dict[str, Any]) -> tuple[Result, Result]:
        tensors, wide = [], []
        for cache in (call.key_cache, call.value_cache):
            # Scales of slots that hold no token are NaN, as what they hold.
            scales = (cache.float().abs().amax(-1) / largest).half()
            numbers = (cache.float() / scales[..., None].float()).nan_to_num(nan=-7.0)
            stored = numbers.round().to(dtype) if dtype is torch.int8 else numbers.clamp(-largest, largest).to(dtype)
            tensors += [stored, scales]
            wide.append(stored.double() * scales.double()[..., None])
        keys, key_scales, values, value_scales = tensors
        scoring = Scoring(call.spec.key_dim**-0.5, *(features.get(name) for name in FEATURES))
        cache = LayerCache(keys, values, key_scales, value_scales)
        actual = paged_attention(call.query, cache, call.metadata, scoring)
        return actual, oracle(dataclasses.replace(call, key_cache=wide[0], value_cache=wide[1]), features)

    return run


FEATURES = ("window", "softcap", "sinks", "alibi_slopes")


def shared(call: Call, features: dict[str, Any], read_once: bool = True) -> tuple[Result, Result]:
    """The first five requests share 256 keys, which only the first one's table leads to when attention runs."""
    data = call.metadata
    num_blocks = 256 // data.block_size
    data.block_tables[1:5, :num_blocks] = data.block_tables[0, :num_blocks]
    expected = oracle(call, features)
    decodes = slice(0, data.num_decodes)
    found = SharedPrefixes.find(
        data.block_tables[decodes].numpy(), data.seq_lens_host[decodes], data.block_size, data.block_tables
    )
    assert found is not None and found.lengths.tolist() == [256, 0], found
    data.prepared[PREPARED] = found
    if read_once:
        data.block_tables[1:5, :num_blocks] = data.block_tables[0, -1]  # a block of NaN
    return attend(call, features), expected


VARIANTS: dict[str, Callable[[Call, dict[str, Any]], tuple[Result, Result]]] = {
    "plain": plain,
    "energy only in the last dimensions": last_dimensions,
    "strided": strided,
    "padded": padded,
    "replayed": replayed,
    "int8": quantized(torch.int8, 127.0),
    "float8": quantized(torch.float8_e4m3fn, 448.0),
    "float8 e5m2": quantized(torch.float8_e5m2, 448.0),
    "shared": shared,
    "shared but not read once": lambda call, features: shared(call, features, read_once=False),
}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    # NaN counts as larger than everything, so that it cannot pass.
    return (actual.double() - expected).abs().nan_to_num(nan=1e9).max().item()


def run(name: str) -> dict[str, object]:
    case, started = CASES[name], time.perf_counter()
    (output, lse), (expected, expected_lse) = VARIANTS[case.variant](*prepare(case))
    result: dict[str, object] = {"name": name, "allowed": TOLERANCE[case.dtype], "error": error(output, expected)}
    if case.features.get("return_lse"):
        result["lse_error"] = error(lse, expected_lse)
    return result | {"seconds": round(time.perf_counter() - started, 2)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        print(json.dumps(run(case)), flush=True)
