"""The Triton attention backend: what it declares, and how it is called."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import torch

from ..base import BACKENDS, Capabilities, PagedAttentionBackend
from ..metadata import PagedAttentionMetadata


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@BACKENDS.register("triton")
class TritonBackend(PagedAttentionBackend):
    """One block-table kernel for decoding and prefill; on a CPU only under Triton's interpreter, for tests."""

    name = "triton"
    priority = 30
    automatic_devices = frozenset({"cuda"})
    capabilities = Capabilities(
        device_types=frozenset({"cuda", "cpu"}) if _interpreted() else frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        features=frozenset({"window", "softcap", "sinks", "alibi", "lse"}),
        block_sizes=frozenset({8, 16, 32, 64, 128}),
        max_head_dim=256,
    )

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
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
        query = query if query.stride(2) == 1 else query.contiguous()
        output = query.new_empty(*query.shape[:2], value_cache.shape[3])
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
        arguments = {
            "output_ptr": output,
            "lse_ptr": lse,
            "query_ptr": query,
            "key_ptr": key_cache,
            "value_ptr": value_cache,
            "block_tables_ptr": metadata.block_tables,
            "cu_seqlens_q_ptr": metadata.cu_seqlens_q,
            "seq_lens_ptr": metadata.seq_lens,
            "sinks_ptr": sinks,
            "slopes_ptr": alibi_slopes,
            "scale": scale,
            "softcap": softcap or 0.0,
            "window": window or 0,
            "max_blocks": metadata.block_tables.stride(0),
            "query_stride_token": query.stride(0),
            "query_stride_head": query.stride(1),
            "HAS_WINDOW": window is not None,
            "HAS_SOFTCAP": softcap is not None,
            "HAS_SINKS": sinks is not None,
            "HAS_ALIBI": alibi_slopes is not None,
            "RETURN_LSE": return_lse,
        }
        # Decoding and prefill want tiles of different heights: at most two launches of one kernel.
        num_decodes, num_requests = metadata.num_decodes, metadata.num_requests
        with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
            if num_decodes:
                self._launch(arguments, 0, num_decodes, 1)
            if num_requests > num_decodes:
                longest = int(metadata.query_lens_host[num_decodes:].max())
                self._launch(arguments, num_decodes, num_requests - num_decodes, longest)
        return output if lse is None else (output, lse)

    def _launch(self, arguments: dict[str, Any], first_request: int, num_requests: int, longest_query: int) -> None:
        # Triton takes long to import and is not needed before the first launch.
        from .paged_attention import paged_attention_kernel

        key_cache, value_cache = arguments["key_ptr"], arguments["value_ptr"]
        _, num_kv_heads, block_size, key_dim = key_cache.shape
        group = arguments["query_ptr"].shape[1] // num_kv_heads
        config = launch_config(
            group, _padded(max(key_dim, value_cache.shape[3])) * key_cache.element_size(), longest_query
        )
        query_tiles = -(-longest_query // (config.block_m // group))
        paged_attention_kernel[(num_requests, num_kv_heads, query_tiles)](
            **arguments,
            first_request=first_request,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            BLOCK_SIZE=block_size,
            KEY_DIM=key_dim,
            VALUE_DIM=value_cache.shape[3],
            KEY_PAD=_padded(key_dim),
            VALUE_PAD=_padded(value_cache.shape[3]),
            BLOCK_M=config.block_m,
            TILE=config.tile,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """The shape of one launch.

    Args:
        block_m (`int`):
            Rows (query token, head of the group) of a program.
        tile (`int`):
            Keys visited at a time.
        num_warps (`int`):
            Warps of a program.
        num_stages (`int`):
            Depth of the pipeline that loads keys ahead.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


def launch_config(group: int, bytes_per_key: int, longest_query: int) -> LaunchConfig:
    """Returns the shape of a launch, from a table: no autotuning, so that nothing is compiled or timed while serving.

    Args:
        group (`int`):
            Query heads per K/V head.
        bytes_per_key (`int`):
            Size of a head's key or value, the larger, padded.
        longest_query (`int`):
            New tokens of the longest request; 1 for decoding.
    """
    # float32 heads of 256 leave no registers for tall tiles.
    height = 16 if longest_query * group <= 16 or bytes_per_key > 512 else 64
    # Keys and values, two or three tiles of each, must fit the 99 KiB of the smallest shared memories; and prefill
    # with 64 keys of 256 bytes spills registers on sm_80.
    tile = min(64, max(16, (16384 if height == 16 else 8192) // bytes_per_key))
    num_stages = 3 if height == 16 and bytes_per_key <= 256 else 2
    return LaunchConfig(max(height, 1 << (group - 1).bit_length()), tile, num_warps=4, num_stages=num_stages)


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())
