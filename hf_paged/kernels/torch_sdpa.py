"""Paged attention in plain torch, fast: gather the blocks, then torch's fused attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .base import BACKENDS, AttentionSpec, Capabilities, PagedAttentionBackend
from .metadata import PagedAttentionMetadata
from .quantized_blocks import ALL_DTYPES, Blocks, as_bytes, numbers, split
from .torch_plan import Gathered, PlanBuilder, QuerySlice


@BACKENDS.register("torch_sdpa")
class TorchSDPABackend(PagedAttentionBackend):
    """Gathers a few requests' K/V at a time and attends to them with what torch has.

    Two ways to attend, chosen per call: torch's fused kernel, and plain float32 steps for what it lacks (softcap,
    sinks, log-sum-exp, Dv != Dk).

    Args:
        spec (`AttentionSpec`):
            What the layers that will call need.
    """

    name = "torch_sdpa"
    priority = 20
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda", "xpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        features=frozenset({"window", "softcap", "sinks", "alibi", "lse"}),
        cache_dtypes=ALL_DTYPES,
    )

    def __init__(self, spec: AttentionSpec):
        super().__init__(spec)
        self._workspaces: dict[str, torch.Tensor] = {}

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
        num_tokens, num_heads, key_dim = query.shape
        value_dim = value_cache.shape[3]
        fused = softcap is None and sinks is None and not return_lse and key_dim == value_dim
        plan = self._plan(metadata, key_cache.shape[1], num_heads, window, fused, alibi_slopes is not None)
        output = query.new_empty(num_tokens, num_heads, value_dim)
        lse = query.new_empty(num_tokens, num_heads, dtype=_float(query.dtype)) if return_lse else None
        for gathered in plan:
            keys = self._gather("keys", key_cache, gathered, query.dtype)
            values = self._gather("values", value_cache, gathered, query.dtype)
            for part in gathered.queries:
                q = query[part.tokens].unflatten(0, (gathered.num_requests, -1)).transpose(1, 2)
                k, v = keys[:, :, part.keys], values[:, :, part.keys]
                if fused:
                    out = attend_fused(q, k, v, part, alibi_slopes, scale)
                else:
                    bias = _bias(part, alibi_slopes, _float(q.dtype))
                    out, out_lse = attend_explicit(q, k, v, bias, scale, softcap, sinks)
                    if lse is not None:
                        lse[part.tokens] = out_lse.transpose(1, 2).flatten(0, 1)
                output[part.tokens] = out.transpose(1, 2).flatten(0, 1).to(output.dtype)
        return output if lse is None else (output, lse)

    def _plan(
        self,
        metadata: PagedAttentionMetadata,
        num_kv_heads: int,
        num_heads: int,
        window: int | None,
        fused: bool,
        per_head_bias: bool,
    ) -> list[Gathered]:
        unmasked = fused and not per_head_bias
        key = ("torch_sdpa", num_kv_heads, window, unmasked)
        if key not in metadata.prepared:
            score_bytes = 4 if unmasked else 4 * num_heads
            metadata.prepared[key] = PlanBuilder(metadata, num_kv_heads, window, score_bytes, unmasked).build()
        return metadata.prepared[key]

    def _gather(self, name: str, cache: Blocks, gathered: Gathered, dtype: torch.dtype) -> torch.Tensor:
        """Copies the requests' blocks into a workspace: `[num_requests, num_kv_heads, num_keys, head_dim]`."""
        _, num_kv_heads, block_size, head_dim = cache.shape
        codes, scales = split(cache)
        if scales is None:
            blocks = self._picked(name, codes.view(-1, block_size * head_dim), gathered.rows)
        else:
            blocks = self._picked(name, as_bytes(codes).view(-1, block_size * head_dim), gathered.rows)
            blocks = blocks.view(codes.dtype).view(-1, block_size, head_dim)
            blocks = numbers(blocks, scales.view(-1, block_size).index_select(0, gathered.rows), dtype)
        return blocks.view(gathered.num_requests, num_kv_heads, -1, head_dim)

    def _picked(self, name: str, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The workspace is kept, because the pages of a fresh one would have to be faulted in every time."""
        width = rows.shape[1]
        size = len(wanted) * width
        workspace = self._workspaces.get(name)
        if workspace is None or workspace.numel() < size or workspace.dtype != rows.dtype:
            workspace = self._workspaces[name] = torch.empty(size, dtype=rows.dtype, device=rows.device)
        into = workspace[:size].view(-1, width)
        return torch.index_select(rows, 0, wanted, out=into)


def attend_fused(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: QuerySlice,
    alibi_slopes: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attends with torch's fused kernel; takes and returns `[num_requests, num_heads, num_queries, head_dim]`.

    Args:
        query (`torch.Tensor`):
            `[num_requests, num_heads, num_queries, Dk]`.
        keys (`torch.Tensor`):
            `[num_requests, num_kv_heads, num_keys, Dk]`.
        values (`torch.Tensor`):
            `[num_requests, num_kv_heads, num_keys, Dk]`.
        part (`QuerySlice`):
            Which query sees which key.
        alibi_slopes (`torch.Tensor`, *optional*):
            `[num_heads]`.
        scale (`float`):
            Factor on the scores.
    """
    num_requests, num_heads, num_queries, head_dim = query.shape
    if num_queries == 1:
        # The group of query heads that share a K/V head become rows of one product: each key is read once.
        query = query.reshape(num_requests, keys.shape[1], -1, head_dim)
    if part.causal and alibi_slopes is None:
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    else:
        # A bias of whole numbers times slopes needs float32, which the kernel takes beside bfloat16 queries.
        dtype = query.dtype if alibi_slopes is None else _float(query.dtype)
        bias = _bias(part, alibi_slopes, dtype)
        if num_queries == 1 and alibi_slopes is not None:
            bias = bias.view(num_requests, keys.shape[1], -1, keys.shape[2])
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale, enable_gqa=True)
    return out.reshape(num_requests, num_heads, num_queries, -1)


def attend_explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends step by step in float32 (float64 if the query is).

    Args:
        query (`torch.Tensor`):
            `[num_requests, num_heads, num_queries, Dk]`.
        keys (`torch.Tensor`):
            `[num_requests, num_kv_heads, num_keys, Dk]`.
        values (`torch.Tensor`):
            `[num_requests, num_kv_heads, num_keys, Dv]`.
        bias (`torch.Tensor`):
            Added to the scores after the cap, `[num_requests, 1 or num_heads, num_queries, num_keys]`.
        scale (`float`):
            Factor on the scores.
        softcap (`float`, *optional*):
            Scores become `softcap * tanh(score / softcap)`.
        sinks (`torch.Tensor`, *optional*):
            `[num_heads]`: one more score per head, without a value.

    Returns:
        The output `[num_requests, num_heads, num_queries, Dv]` and the log-sum-exp without its last dimension.
    """
    dtype = _float(query.dtype)
    num_requests, num_heads, num_queries, head_dim = query.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    grouped = query.to(dtype).reshape(num_requests, num_kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, keys.to(dtype).transpose(2, 3)).mul_(scale)
    scores = scores.view(num_requests, num_heads, num_queries, num_keys)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores += bias
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(dtype).view(1, num_heads, 1, 1)
        highest = torch.maximum(highest, sinks)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - highest)
    out = torch.matmul(weights.view(num_requests, num_kv_heads, -1, num_keys), values.to(dtype))
    out = out.view(num_requests, num_heads, num_queries, -1) / total
    return out, (highest + total.log()).squeeze(-1)


def _float(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bias(part: QuerySlice, alibi_slopes: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns what is added to the scores: the mask, and the distance times each head's slope."""
    if alibi_slopes is None:
        return part.mask(dtype)
    slopes = alibi_slopes.to(_float(dtype)).view(1, -1, 1, 1)
    return (slopes * part.distance()).to(dtype) + part.mask(dtype)
