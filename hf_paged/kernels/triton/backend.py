"""The Triton attention backend: what it declares, and how it is called."""

from __future__ import annotations

import numpy as np
import torch

from ..base import BACKENDS, Capabilities, PagedAttentionBackend
from ..metadata import PagedAttentionMetadata
from ..quantized_blocks import ALL_DTYPES, Blocks
from . import device
from .configs import BLOCK_SIZES, MAX_GROUP_BYTES, MAX_HEAD_DIM, MIN_KEYS_PER_SPLIT
from .layer_cache import LayerCache
from .shared_prefix import PREPARED, keys_saved, prepared_prefixes


@BACKENDS.register("triton")
class TritonBackend(PagedAttentionBackend):
    """One block-table kernel for decoding and prefill; on a CPU only under Triton's interpreter, for tests.

    What the decoding requests of a step share is read once; `prepare` finds it by the step's block tables on the host,
    if it has them, and keeps it in `metadata.prepared`.
    """

    name = "triton"
    priority = 30
    automatic_devices = frozenset({"cuda"})
    graph_safe = True
    alike_keys = MIN_KEYS_PER_SPLIT
    capabilities = Capabilities(
        device_types=frozenset({"cuda", "cpu"}) if device.interpreted() else frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        features=frozenset({"window", "softcap", "sinks", "alibi", "lse"}),
        block_sizes=BLOCK_SIZES,
        max_head_dim=MAX_HEAD_DIM,
        max_group_bytes=MAX_GROUP_BYTES,
        cache_dtypes=ALL_DTYPES,
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Returns why the kernels cannot run on this machine, or `None`."""
        return device.unavailable_reason()

    def keys_saved(self, block_tables: np.ndarray, seq_lens: np.ndarray) -> int:
        """See `PagedAttentionBackend.keys_saved`; what requests share is read once."""
        return keys_saved(block_tables, seq_lens, self.spec.block_size)

    def prepare(self, metadata: PagedAttentionMetadata, num_kv_heads: int) -> None:
        """Finds the prefixes that decoding requests share.

        Args:
            metadata (`PagedAttentionMetadata`):
                The step's lengths and block tables.
            num_kv_heads (`int`):
                Not needed: what is shared is the same for all heads.
        """
        if PREPARED not in metadata.prepared:
            metadata.prepared[PREPARED] = prepared_prefixes(metadata)

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: Blocks,
        value_cache: Blocks,
        metadata: PagedAttentionMetadata,
    ) -> None:
        """See `PagedAttentionBackend.store`; tokens with negative slots are padding and go nowhere."""
        from .cache import rope_store

        # In one launch, as native layers do it, with a query head that nobody needs.
        rope_store(key[:, :1], key, value, None, None, LayerCache.of(key_cache, value_cache), metadata.slot_mapping)

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
        # Triton takes long to import and is not needed before the first launch.
        from .attention import Scoring, paged_attention

        output, lse = paged_attention(
            query,
            LayerCache.of(key_cache, value_cache),
            metadata,
            Scoring(scale, window, softcap, sinks, alibi_slopes),
            return_lse=return_lse,
            shared=metadata.prepared.get(PREPARED),
        )
        return output if lse is None else (output, lse)
