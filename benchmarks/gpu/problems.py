"""Attention problems as a step has them: requests whose blocks lie anywhere in a large pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_paged.kernels import AttentionSpec, PagedAttentionBackend, PagedAttentionMetadata, select_backend

# Calls in turns read as much as this before any of it is read again: more than the caches of any GPU hold.
COLD_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Problem:
    """Requests of one length.

    Args:
        name (`str`):
            For people.
        num_requests (`int`):
            Requests.
        query_len (`int`):
            New tokens of each; 1 for decoding.
        context (`int`):
            Tokens of each, the new ones included.
        num_heads (`int`, defaults to 32):
            Query heads.
        num_kv_heads (`int`, defaults to 8):
            K/V heads.
        head_dim (`int`, defaults to 128):
            Size of a head.
        block_size (`int`, defaults to 16):
            Tokens per block.
    """

    name: str
    num_requests: int
    query_len: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def is_decode(self) -> bool:
        """Returns whether each request has one new token."""
        return self.query_len == 1

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Returns what must be read or written at least: K/V and queries once, output once.

        Args:
            dtype (`torch.dtype`):
                Of everything.
        """
        tokens = self.num_requests * (2 * self.context * self.num_kv_heads + 2 * self.query_len * self.num_heads)
        return tokens * self.head_dim * dtype.itemsize

    @property
    def operations(self) -> float:
        """Returns multiplications and additions, those above the causal diagonal left out."""
        visible = self.query_len * self.context - self.query_len * (self.query_len - 1) / 2
        return 4.0 * self.num_requests * self.num_heads * self.head_dim * visible


class PagedProblem:
    """A problem on a device: a pool of random K/V, and block tables that take its blocks in random order.

    Args:
        problem (`Problem`):
            The requests.
        device (`str`):
            Where.
        dtype (`torch.dtype`):
            Of queries and K/V.
        seed (`int`):
            Of everything random.
        cold_bytes (`int`, defaults to 256 MiB):
            Bytes that calls in turns read before they begin again.
        max_sets (`int`, defaults to 32):
            Block tables at most.
    """

    def __init__(
        self,
        problem: Problem,
        device: str,
        dtype: torch.dtype,
        seed: int,
        cold_bytes: int = COLD_BYTES,
        max_sets: int = 32,
    ):
        self.problem, self.device, self.dtype = problem, device, dtype
        torch.manual_seed(seed)
        num_sets = min(max_sets, max(1, -(-cold_bytes // problem.num_bytes(dtype))))
        per_request = -(-problem.context // problem.block_size)
        num_blocks = num_sets * problem.num_requests * per_request
        shape = (num_blocks, problem.num_kv_heads, problem.block_size, problem.head_dim)
        self.keys, self.values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        tables = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        self.tables = tables.reshape(num_sets, problem.num_requests, per_request)
        lengths = np.full(problem.num_requests, problem.context)
        queries = np.full(problem.num_requests, problem.query_len)
        self.calls = [
            PagedAttentionMetadata.build(table, queries, lengths, problem.block_size, device) for table in self.tables
        ]
        num_tokens = problem.num_requests * problem.query_len
        self.query = torch.randn(num_tokens, problem.num_heads, problem.head_dim, device=device, dtype=dtype)

    @property
    def scale(self) -> float:
        """Returns the factor on the scores."""
        return self.problem.head_dim**-0.5

    def backend(self, name: str = "triton") -> PagedAttentionBackend:
        """Returns an attention backend for it.

        Args:
            name (`str`, defaults to `"triton"`):
                Which.
        """
        problem = self.problem
        spec = AttentionSpec(
            num_query_heads=problem.num_heads,
            num_kv_heads=problem.num_kv_heads,
            key_dim=problem.head_dim,
            value_dim=problem.head_dim,
            dtype=self.dtype,
            device_type=self.device,
            block_size=problem.block_size,
        )
        return select_backend(spec, name)

    def paged_calls(self, backend: PagedAttentionBackend) -> list[Callable[[], Any]]:
        """Returns a call for each block table.

        Args:
            backend (`PagedAttentionBackend`):
                Who attends.
        """
        for metadata in self.calls:
            backend.prepare(metadata, self.problem.num_kv_heads)

        def make(metadata: PagedAttentionMetadata) -> Callable[[], Any]:
            return lambda: backend.attend(self.query, self.keys, self.values, metadata, scale=self.scale)

        return [make(metadata) for metadata in self.calls]

    def dense(self, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of one block table in one piece, `[requests, kv_heads, context, head_dim]`.

        Args:
            number (`int`, defaults to 0):
                Which block table.
        """
        problem = self.problem
        table = torch.from_numpy(self.tables[number]).to(self.device, torch.int64)
        found = []
        for cache in (self.keys, self.values):
            whole = cache[table].transpose(1, 2)  # [requests, kv_heads, blocks, block_size, head_dim]
            found.append(whole.flatten(2, 3)[:, :, : problem.context].contiguous())
        return found[0], found[1]

    def dense_query(self) -> torch.Tensor:
        """Returns the queries as `[requests, heads, query_len, head_dim]`."""
        problem = self.problem
        rows = self.query.view(problem.num_requests, problem.query_len, problem.num_heads, problem.head_dim)
        return rows.transpose(1, 2)
