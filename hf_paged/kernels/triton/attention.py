"""Calls of the attention kernels: what is launched for the decoding requests of a call, and what for the others."""

from __future__ import annotations

import dataclasses
import math

import torch

from ..metadata import PagedAttentionMetadata
from .configs import BLOCK_SIZES, MAX_HEAD_DIM, LaunchConfig, launch_config, padded, split_count
from .device import device_traits
from .launching import check, check_codes, check_dtype, on_device, register_limit
from .layer_cache import LayerCache
from .paged_attention import paged_attention_kernel
from .reduce import merge_parts
from .shared_prefix import SharedPrefixes

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How scores are made of queries and keys; see `PagedAttentionBackend.attend`.

    Args:
        scale (`float`):
            Factor on the scores.
        window (`int`, *optional*):
            A token sees the last `window` positions.
        softcap (`float`, *optional*):
            Soft cap on the scores.
        sinks (`torch.Tensor`, *optional*):
            `[num_query_heads]`, contiguous.
        alibi_slopes (`torch.Tensor`, *optional*):
            `[num_query_heads]`, contiguous.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    @property
    def depends_on_distance(self) -> bool:
        """Returns whether a score depends on how far a key lies behind its query."""
        return self.window is not None or self.alibi_slopes is not None


@dataclasses.dataclass(frozen=True)
class _Requests:
    """The requests of one launch, `first ... first + count - 1` of the tensors."""

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    first: int
    count: int
    longest_query: int
    longest_context: int
    starts: torch.Tensor | None = None
    shared: bool = False


@dataclasses.dataclass(frozen=True)
class _Call:
    """What all launches of a call have in common."""

    query: torch.Tensor
    cache: LayerCache
    scoring: Scoring

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.cache.keys.shape[1]

    def config(self, requests: _Requests) -> LaunchConfig:
        head_dim = max(self.cache.keys.shape[3], self.cache.values.shape[3])
        architecture = device_traits(self.query.device).architecture
        return launch_config(architecture, self.group, head_dim, self.query.element_size(), requests.longest_query)

    def query_tiles(self, requests: _Requests) -> int:
        return -(-requests.longest_query // (self.config(requests).block_m // self.group))

    def num_splits(self, requests: _Requests) -> int:
        num_programs = requests.count * self.cache.keys.shape[1] * self.query_tiles(requests)
        keys = requests.longest_context
        if self.scoring.window is not None:
            keys = min(keys, self.scoring.window + requests.longest_query)
        return split_count(device_traits(self.query.device).num_processors, num_programs, keys)

    def launch(self, requests: _Requests, output: torch.Tensor, lse: torch.Tensor | None, num_splits: int) -> None:
        """Attends; `output` and `lse` begin with the part of the first split."""
        cache, scoring, config = self.cache, self.scoring, self.config(requests)
        _, num_kv_heads, block_size, key_dim = cache.keys.shape
        value_dim = cache.values.shape[3]
        scale, softcap = scoring.scale * LOG2E, None
        if scoring.softcap is not None:
            # tanh(x) = 1 - 2 / (1 + exp2(2 * log2(e) * x))
            scale, softcap = 2 * scale / scoring.softcap, scoring.softcap * LOG2E
        paged_attention_kernel[(requests.count, num_kv_heads, self.query_tiles(requests) * num_splits)](
            output,
            lse,
            self.query,
            cache.keys,
            cache.values,
            cache.key_scales,
            cache.value_scales,
            requests.block_tables,
            requests.cu_seqlens_q,
            requests.seq_lens,
            requests.starts,
            # Counted once: with what a request has for itself.
            None if requests.shared else scoring.sinks,
            scoring.alibi_slopes,
            scale,
            softcap,
            scoring.window,
            requests.first,
            requests.block_tables.stride(0),
            num_splits,
            output.shape[-3] * output.shape[-2],
            self.query.stride(0),
            self.query.stride(1),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=self.group,
            BLOCK_SIZE=block_size,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_PAD=padded(key_dim),
            VALUE_PAD=padded(value_dim),
            BLOCK_M=config.block_m,
            TILE=config.tile,
            SHARED=requests.shared,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **register_limit(self.query),
        )

    def attend(
        self,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        requests: _Requests,
        prefixes: _Requests | None = None,
        first_token: int = 0,
    ) -> None:
        """Attends in as many parts as keep the device busy, and merges those of the tokens from `first_token` on."""
        num_splits = self.num_splits(requests)
        num_before = 0 if prefixes is None else self.num_splits(prefixes)
        num_parts = num_before + num_splits
        if num_parts == 1:
            self.launch(requests, output, lse, 1)
            return
        parts = output.new_empty(num_parts, *output.shape, dtype=torch.float32)
        part_lse = output.new_empty(num_parts, *output.shape[:2], dtype=torch.float32)
        if prefixes is not None:
            self.launch(prefixes, parts, part_lse, num_before)
        self.launch(requests, parts[num_before:], part_lse[num_before:], num_splits)
        merge_parts(output, lse, parts, part_lse, first_token)


def paged_attention(
    query: torch.Tensor,
    cache: LayerCache,
    metadata: PagedAttentionMetadata,
    scoring: Scoring,
    *,
    return_lse: bool = False,
    shared: SharedPrefixes | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention of a call's new tokens over their requests' blocks.

    Decoding requests and the others are two launches of one kernel, each followed by a merge if its keys are split.
    The number of splits comes from the lengths on the host, what each visits from the lengths on the device: a call
    that is captured in a CUDA graph with the longest contexts on the host may be replayed with any others. A request
    of length 0 gets zeros; one without tokens (`cu_seqlens_q` stands still) is passed over.

    Args:
        query (`torch.Tensor`):
            `[num_tokens, num_query_heads, Dk]`, float32, bfloat16 or float16, any strides.
        cache (`LayerCache`):
            The layer's keys and values.
        metadata (`PagedAttentionMetadata`):
            Lengths and block tables.
        scoring (`Scoring`):
            Scale and features.
        return_lse (`bool`, defaults to `False`):
            Also return the log-sum-exp of the scores.
        shared (`SharedPrefixes`, *optional*):
            What the decoding requests share; not used with a window or ALiBi.

    Returns:
        `[num_tokens, num_query_heads, Dv]` in the query's dtype, and float32 `[num_tokens, num_query_heads]` or `None`.

    Raises:
        NotSupportedError: If the dtypes do not fit each other or the device, or the scale is not positive.
    """
    _check(query, cache)
    check(scoring.scale > 0, f"`scale` is {scoring.scale}; it must be positive.")
    query = query if query.stride(2) == 1 else query.contiguous()
    output = query.new_empty(*query.shape[:2], cache.values.shape[3])
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    call = _Call(query, cache, scoring)
    num_decodes, num_others = metadata.num_decodes, metadata.num_requests - metadata.num_decodes
    tensors = (metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables)
    with on_device(query):
        if num_decodes:
            requests = _Requests(*tensors, 0, num_decodes, 1, int(metadata.seq_lens_host[:num_decodes].max()))
            prefixes = None
            if shared is not None and not scoring.depends_on_distance:
                prefixes, requests = _share(requests, shared)
            decode_lse = None if lse is None else lse[:num_decodes]
            call.attend(output[:num_decodes], decode_lse, requests, prefixes)
        if num_others:
            longest_query = int(metadata.query_lens_host[num_decodes:].max())
            longest_context = int(metadata.seq_lens_host[num_decodes:].max())
            requests = _Requests(*tensors, num_decodes, num_others, longest_query, longest_context)
            call.attend(output, lse, requests, first_token=num_decodes)
    return output, lse


def _share(requests: _Requests, shared: SharedPrefixes) -> tuple[_Requests, _Requests]:
    """Returns the runs with what they share, and the requests with what is left."""
    runs = _Requests(
        shared.cu_seqlens_q,
        shared.lengths,
        shared.block_tables,
        0,
        len(shared.lengths),
        shared.longest_run,
        shared.longest_prefix,
        shared=True,
    )
    return runs, dataclasses.replace(requests, starts=shared.starts, longest_context=shared.longest_rest)


def _check_shapes(query: torch.Tensor, cache: LayerCache) -> None:
    keys, values = cache.keys, cache.values
    check(query.dim() == 3, f"`query` is {list(query.shape)}; it must be [tokens, heads, head_dim].")
    for name, tensor in (("keys", keys), ("values", values)):
        fits = tensor.dim() == 4 and tensor.is_contiguous() and tensor.shape[:3] == keys.shape[:3]
        check(fits, f"`{name}` is {list(tensor.shape)}; it must be contiguous [blocks, heads, block_size, head_dim].")
        check(tensor.shape[3] <= MAX_HEAD_DIM, f"heads of {tensor.shape[3]} are larger than {MAX_HEAD_DIM}.")
    num_kv_heads, block_size = keys.shape[1:3]
    check(block_size in BLOCK_SIZES, f"blocks of {block_size} tokens are none of {sorted(BLOCK_SIZES)}.")
    fits = query.shape[2] == keys.shape[3] and query.shape[1] % num_kv_heads == 0
    check(fits, f"`query` is {list(query.shape)}, which does not go with `keys` {list(keys.shape)}.")


def _check(query: torch.Tensor, cache: LayerCache) -> None:
    check_dtype("query", query)
    _check_shapes(query, cache)
    for name, tensor in (("keys", cache.keys), ("values", cache.values)):
        if cache.is_quantized:
            check_codes(name, tensor)
        else:
            check_dtype(name, tensor, (query.dtype,))
    check(
        (cache.key_scales is None) == (cache.value_scales is None),
        "a quantized cache needs `key_scales` and `value_scales`, a plain one neither.",
    )
