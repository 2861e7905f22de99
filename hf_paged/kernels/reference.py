"""Paged attention in plain torch: the oracle of the tests, the last resort on any device, and batch invariant."""

from __future__ import annotations

import math

import torch

from .base import BACKENDS, Capabilities, PagedAttentionBackend
from .metadata import PagedAttentionMetadata
from .quantized_blocks import ALL_DTYPES, Blocks, picked

QUERY_TILE = 8
KEY_TILE = 64


@BACKENDS.register("reference")
class ReferenceBackend(PagedAttentionBackend):
    """One request after the other, in float32 (float64 for float64 inputs).

    Queries are computed in tiles of `QUERY_TILE` positions that start at multiples of `QUERY_TILE`, against the
    keys from position 0 to the end of the tile, rounded up to `KEY_TILE`. The shape of every matrix product then
    depends on the position alone, so that a token's result is bitwise the same whatever its batch mates are and
    however its prefill was chunked (for one number of threads).
    """

    name = "reference"
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda", "xpu", "mps"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        features=frozenset({"window", "softcap", "sinks", "alibi", "lse", "batch_invariant"}),
        cache_dtypes=ALL_DTYPES,
    )

    def attend(
        self,
        query: torch.Tensor,
        key_cache: Blocks,
        value_cache: Blocks,
        metadata: PagedAttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `PagedAttentionBackend.attend`."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        num_tokens, num_heads, _ = query.shape
        output = query.new_empty(num_tokens, num_heads, value_cache.shape[3])
        lse = query.new_empty(num_tokens, num_heads, dtype=dtype)
        sinks = None if sinks is None else sinks.to(dtype)
        slopes = None if alibi_slopes is None else alibi_slopes.to(dtype)
        token = 0
        for request, (query_len, seq_len) in enumerate(
            zip(metadata.query_lens_host.tolist(), metadata.seq_lens_host.tolist(), strict=True)
        ):
            keys = _context(key_cache, metadata, request, seq_len, dtype)
            values = _context(value_cache, metadata, request, seq_len, dtype)
            position = seq_len - query_len
            while position < seq_len:
                first = position // QUERY_TILE * QUERY_TILE
                end = min(first + QUERY_TILE, seq_len)
                new = slice(token, token + end - position)
                tile = query.new_zeros(QUERY_TILE, num_heads, query.shape[2], dtype=dtype)
                tile[position - first : end - first] = query[new]
                num_keys = _round_up(first + QUERY_TILE, KEY_TILE)
                scores = _scores(tile, keys[:, :num_keys], first, scale, window, softcap, slopes)
                tile_output, tile_lse = _combine(scores, values[:, :num_keys], sinks)
                output[new] = tile_output[position - first : end - first]
                lse[new] = tile_lse[position - first : end - first]
                token, position = new.stop, end
        return (output, lse) if return_lse else output


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _context(
    cache: Blocks, metadata: PagedAttentionMetadata, request: int, seq_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns a request's keys or values, `[num_kv_heads, padded length, head_dim]`, zeros past the context."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    num_blocks = -(-seq_len // block_size)
    blocks = picked(cache, metadata.block_tables[request, :num_blocks].long(), dtype)
    length = _round_up(_round_up(seq_len, QUERY_TILE), KEY_TILE)
    context = blocks.new_zeros(num_kv_heads, length, head_dim)
    context[:, :seq_len] = blocks.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :seq_len]
    return context


def _scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    first_position: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the masked scores of a query tile, `[num_kv_heads, group, queries, keys]`."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    grouped = query.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = torch.bmm(grouped.reshape(num_kv_heads, -1, head_dim), keys.transpose(1, 2)) * scale
    scores = scores.view(num_kv_heads, -1, num_queries, num_keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(first_position, first_position + num_queries, device=query.device)
    distance = torch.arange(num_keys, device=query.device)[None, :] - positions[:, None]
    if slopes is not None:
        scores = scores + slopes.view(num_kv_heads, -1, 1, 1) * distance
    hidden = distance > 0 if window is None else (distance > 0) | (distance <= -window)
    return scores.masked_fill(hidden, -math.inf)


def _combine(
    scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output `[queries, heads, Dv]` and the log-sum-exp `[queries, heads]` of a query tile."""
    num_kv_heads, group, num_queries, num_keys = scores.shape
    if sinks is not None:
        column = sinks.view(num_kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., :num_keys].reshape(num_kv_heads, -1, num_keys)
    output = torch.bmm(probabilities, values).view(num_kv_heads * group, num_queries, -1)
    lse = torch.logsumexp(scores, dim=-1).view(num_kv_heads * group, num_queries)
    return output.transpose(0, 1), lse.transpose(0, 1)


def attention_weights(
    query: torch.Tensor,
    key_cache: Blocks,
    block_table: torch.Tensor,
    first_position: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Returns the weights with which a request's tokens attend to the keys up to the last of them.

    Args:
        query (`torch.Tensor`):
            `[tokens, num_query_heads, Dk]`, of consecutive positions.
        key_cache (`Blocks`):
            `[num_blocks, num_kv_heads, block_size, Dk]`, with the keys of these tokens in it.
        block_table (`torch.Tensor`):
            The request's blocks.
        first_position (`int`):
            Position of the first token.
        scale (`float`):
            Factor on the scores.
        window (`int`, *optional*):
            Sliding window.
        softcap (`float`, *optional*):
            Soft cap on the scores.

    Returns:
        `torch.Tensor` `[num_query_heads, tokens, keys]` in the query's dtype, from a softmax in float32 (float64 for
        float64), as Transformers' eager attention has it.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    num_keys = first_position + len(query)
    blocks = picked(key_cache, block_table[: -(-num_keys // block_size)].long(), dtype)
    keys = blocks.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :num_keys]
    scores = _scores(query.to(dtype), keys, first_position, scale, window, softcap, None)
    return torch.softmax(scores, dim=-1).flatten(0, 1).to(query.dtype)
