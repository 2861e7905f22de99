"""The Triton attention backend: what it declares, and how it is called."""

from __future__ import annotations

import torch

from ..base import BACKENDS, Capabilities, PagedAttentionBackend
from ..metadata import PagedAttentionMetadata
from . import device
from .layer_cache import LayerCache
from .shared_prefix import PREPARED


@BACKENDS.register("triton")
class TritonBackend(PagedAttentionBackend):
    """One block-table kernel for decoding and prefill; on a CPU only under Triton's interpreter, for tests.

    A step that put `SharedPrefixes` under `shared_prefix.PREPARED` into `metadata.prepared` has what its decoding
    requests share read once. Quantized K/V go through `attention.paged_attention`.
    """

    name = "triton"
    priority = 30
    automatic_devices = frozenset({"cuda"})
    capabilities = Capabilities(
        device_types=frozenset({"cuda", "cpu"}) if device.interpreted() else frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        features=frozenset({"window", "softcap", "sinks", "alibi", "lse"}),
        block_sizes=frozenset({16, 32, 64, 128}),
        max_head_dim=256,
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Returns why the kernels cannot run on this machine, or `None`."""
        return device.unavailable_reason()

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
        # Triton takes long to import and is not needed before the first launch.
        from .attention import Scoring, paged_attention

        output, lse = paged_attention(
            query,
            LayerCache(key_cache, value_cache),
            metadata,
            Scoring(scale, window, softcap, sinks, alibi_slopes),
            return_lse=return_lse,
            shared=metadata.prepared.get(PREPARED),
        )
        return output if lse is None else (output, lse)
