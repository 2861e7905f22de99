"""Paged attention by native code: decoding, chunked prefill and mixed batches in one call."""

from __future__ import annotations

import functools

import torch

from ..quantized_blocks import Blocks, split
from . import library


@functools.cache
def load() -> bool:
    """Makes the operator of this file available, and returns whether it is."""
    if not library.load():
        return False
    _register_fake()
    return True


def paged_attention(
    query: torch.Tensor,
    caches: tuple[Blocks, Blocks],
    block_tables: torch.Tensor,
    lengths: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a call's new tokens over their requests' blocks; see `PagedAttentionBackend.attend`.

    Scores, softmax and sums are float32. Where the processor's bfloat16 dot product is used, queries, and with many
    rows the softmax's weights, are rounded to bfloat16. A context is cut into pieces that are merged by their
    log-sum-exp (Dao et al., "Flash-Decoding", 2023), and keys that several requests have in common are read once
    (Juravsky et al., "Hydragen", 2024). Results do not depend on the number of threads.

    Args:
        query (`torch.Tensor`):
            `[num_tokens, num_query_heads, Dk]`, float32 or of the caches' dtype, any of three if they are quantized.
        caches (`tuple[Blocks, Blocks]`):
            Keys and values, contiguous `[num_blocks, num_kv_heads, block_size, Dk or Dv]`, float32, bfloat16 or
            float16, or quantized.
        block_tables (`torch.Tensor`):
            int32 `[num_requests, max_blocks]`.
        lengths (`tuple[torch.Tensor, torch.Tensor]`):
            `cu_seqlens_q`, int32 `[num_requests + 1]`, and `seq_lens`, int32 `[num_requests]`.
        scale (`float`):
            Factor on the scores.
        window (`int`, *optional*):
            A token sees the last `window` positions, its own included.
        softcap (`float`, *optional*):
            Scores become `softcap * tanh(score / softcap)`.
        sinks (`torch.Tensor`, *optional*):
            `[num_query_heads]`.
        alibi_slopes (`torch.Tensor`, *optional*):
            `[num_query_heads]`.
        return_lse (`bool`, defaults to `False`):
            Whether the log-sum-exp is wanted.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[num_tokens, num_query_heads, Dv]` in the query's dtype, and the
        log-sum-exp, float32 `[num_tokens, num_query_heads]` (no rows unless wanted).

    Raises:
        RuntimeError: If a shape or dtype does not fit, or a block table names a block that is not in the caches;
            nothing was read then.
    """
    if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
        query = query.contiguous()
    (keys, key_scales), (values, value_scales) = map(split, caches)
    return torch.ops.hf_paged.paged_attention(
        query,
        keys,
        values,
        key_scales,
        value_scales,
        block_tables,
        *lengths,
        scale,
        window or 0,
        softcap or 0.0,
        _per_head(sinks),
        _per_head(alibi_slopes),
        return_lse,
    )


def _per_head(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def _register_fake() -> None:
    """Tells torch.compile the shapes and dtypes of the results."""

    def attended(
        query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *rest: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, num_heads, _ = query.shape
        output = query.new_empty(num_tokens, num_heads, value_cache.shape[3])
        return output, query.new_empty(num_tokens if rest[-1] else 0, num_heads, dtype=torch.float32)

    torch.library.register_fake("hf_paged::paged_attention", attended)
