"""The attention backend of the native library."""

from __future__ import annotations

import torch

from ...errors import ConfigurationError
from ..base import BACKENDS, Capabilities, PagedAttentionBackend
from ..metadata import PagedAttentionMetadata
from ..quantized_blocks import ALL_DTYPES, Blocks
from . import attention, library


@BACKENDS.register("native_cpu")
class NativeCPUBackend(PagedAttentionBackend):
    """Native attention for x86 processors with AVX2, AVX-512 or AMX. Results are float32 sums, rounded once."""

    name = "native_cpu"
    priority = 40
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        features=frozenset({"window", "softcap", "sinks", "alibi", "lse"}),
        cache_dtypes=ALL_DTYPES,
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Returns why there is no native library on this machine, or `None`; builds it if need be."""
        try:
            if attention.load():
                return None
        except ConfigurationError as error:
            return str(error)
        return f"has no native library here: {library.status().reason}"

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
        output, lse = attention.paged_attention(
            query,
            (key_cache, value_cache),
            metadata.block_tables,
            (metadata.cu_seqlens_q, metadata.seq_lens),
            scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            return_lse=return_lse,
        )
        return (output, lse) if return_lse else output
