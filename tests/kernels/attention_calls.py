"""Random calls of an attention backend, and the formula that they are checked against."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from hf_paged.kernels import AttentionSpec, PagedAttentionMetadata


@dataclasses.dataclass
class Call:
    """A call of a backend on a pool whose blocks lie in random order, between blocks of NaN that nobody owns."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: PagedAttentionMetadata
    spec: AttentionSpec
    contexts: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def query_lens(self) -> list[int]:
        return self.metadata.query_lens_host.tolist()


def make_call(
    lengths: list[tuple[int, int]],
    num_heads: int = 9,
    num_kv_heads: int = 3,
    key_dim: int = 64,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Call:
    """Makes a call of requests given as (new tokens, context length), decoding requests first."""
    value_dim = value_dim or key_dim
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    nobodys = int(order[-1])
    tables = np.full((len(lengths), max(counts) + 1), nobodys, dtype=np.int32)
    key_cache = torch.full((len(order), num_kv_heads, block_size, key_dim), math.nan, dtype=dtype)
    value_cache = torch.full((len(order), num_kv_heads, block_size, value_dim), math.nan, dtype=dtype)
    contexts, used = [], 0
    for request, (count, (_, seq_len)) in enumerate(zip(counts, lengths, strict=True)):
        blocks = order[used : used + count]
        used += count
        tables[request, :count] = blocks.numpy()
        keys = torch.randn(num_kv_heads, count * block_size, key_dim, generator=generator).to(dtype)
        values = torch.randn(num_kv_heads, count * block_size, value_dim, generator=generator).to(dtype)
        # Slots past the context hold large finite numbers that must not be seen.
        keys[:, seq_len:], values[:, seq_len:] = 100.0, 1000.0
        key_cache[blocks] = keys.unflatten(1, (count, block_size)).transpose(0, 1)
        value_cache[blocks] = values.unflatten(1, (count, block_size)).transpose(0, 1)
        contexts.append((keys[:, :seq_len], values[:, :seq_len]))
    query_lens = np.array([query_len for query_len, _ in lengths])
    metadata = PagedAttentionMetadata.build(tables, query_lens, np.array([s for _, s in lengths]), block_size)
    query = torch.randn(int(query_lens.sum()), num_heads, key_dim, generator=generator).to(dtype)
    spec = AttentionSpec(num_heads, num_kv_heads, key_dim, value_dim, dtype, "cpu", block_size)
    return Call(query, key_cache, value_cache, metadata, spec, contexts)


def dense_attention(
    call: Call,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as the formula says, one query and one head at a time, in float64; returns output and log-sum-exp."""
    num_tokens, num_heads, _ = call.query.shape
    output = torch.empty(num_tokens, num_heads, call.value_cache.shape[3], dtype=torch.float64)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float64)
    token = 0
    for query_len, (keys, values) in zip(call.query_lens, call.contexts, strict=True):
        for position in range(keys.shape[1] - query_len, keys.shape[1]):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                kv_head = head // (num_heads // keys.shape[0])
                scores = keys[kv_head, first : position + 1].double() @ call.query[token, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores += alibi_slopes[head].double() * (torch.arange(first, position + 1) - position)
                exponentials = scores.exp()
                denominator = exponentials.sum() + (0 if sinks is None else sinks[head].double().exp())
                output[token, head] = exponentials @ values[kv_head, first : position + 1].double() / denominator
                lse[token, head] = denominator.log()
            token += 1
    return output, lse


MIXED = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 33), (1, 130), (5, 5), (16, 16), (17, 48), (32, 63)]
DECODES = [(1, length) for length in (1, 15, 16, 17, 31, 32, 33, 64, 100, 300)]
PREFILLS = [(length, length) for length in (2, 15, 16, 17, 31, 32, 33)]
CHUNKS = [(3, 18), (16, 32), (15, 33), (31, 95)]
