"""The interface of an attention backend, and what each one must declare about itself."""

from __future__ import annotations

import abc
import dataclasses

import numpy as np
import torch

from ..registry import Registry
from .metadata import PagedAttentionMetadata
from .quantized_blocks import Blocks, write_rows

BACKENDS: Registry[type[PagedAttentionBackend]] = Registry("attention backend")


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What the layers of a model need of a backend.

    Args:
        num_query_heads (`int`):
            Query heads on this device.
        num_kv_heads (`int`):
            Key/value heads on this device; query head h reads K/V head `h // (num_query_heads // num_kv_heads)`.
        key_dim (`int`):
            Size of a query and key head (Dk).
        value_dim (`int`):
            Size of a value head (Dv).
        dtype (`torch.dtype`):
            Dtype of queries, output and, unless they are quantized, K/V.
        device_type (`str`):
            `"cpu"`, `"cuda"`, ...
        block_size (`int`):
            Tokens per block.
        features (`frozenset[str]`):
            Of `"window"`, `"softcap"`, `"sinks"`, `"alibi"`, `"lse"`, `"batch_invariant"`.
        cache_dtype (`torch.dtype`, *optional*):
            Dtype of the codes of quantized K/V.
    """

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device_type: str
    block_size: int
    features: frozenset[str] = frozenset()
    cache_dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a backend can do; `None` means no restriction.

    Args:
        device_types (`frozenset[str]`):
            Device types it runs on.
        dtypes (`frozenset[torch.dtype]`):
            Dtypes of queries and K/V.
        features (`frozenset[str]`):
            Features of `AttentionSpec.features` it implements.
        block_sizes (`frozenset[int]`, *optional*):
            Block sizes it accepts.
        max_head_dim (`int`, *optional*):
            Largest Dk or Dv.
        separate_value_dim (`bool`, defaults to `True`):
            Whether Dv may differ from Dk.
        max_group_bytes (`int`, *optional*):
            Largest size of the queries of one token that read one K/V head, both their number and the head's size
            rounded up to powers of two.
        cache_dtypes (`frozenset[torch.dtype]`, defaults to none):
            Dtypes of the codes of quantized K/V that it stores and reads; see `quantized_blocks.py`.
    """

    device_types: frozenset[str]
    dtypes: frozenset[torch.dtype]
    features: frozenset[str]
    block_sizes: frozenset[int] | None = None
    max_head_dim: int | None = None
    separate_value_dim: bool = True
    max_group_bytes: int | None = None
    cache_dtypes: frozenset[torch.dtype] = frozenset()

    def missing(self, spec: AttentionSpec) -> str | None:
        """Returns why a backend with these capabilities cannot serve a model, or `None` if it can.

        Args:
            spec (`AttentionSpec`):
                What the model needs.
        """
        if spec.device_type not in self.device_types:
            return f"runs on {', '.join(sorted(self.device_types))}, not on {spec.device_type}"
        if spec.dtype not in self.dtypes:
            return f"has no {spec.dtype}"
        if spec.cache_dtype is not None and spec.cache_dtype not in self.cache_dtypes:
            return f"has no K/V in {spec.cache_dtype}"
        if not spec.features <= self.features:
            return f"has no {', '.join(sorted(spec.features - self.features))}"
        if self.block_sizes is not None and spec.block_size not in self.block_sizes:
            return f"needs a block size of {sorted(self.block_sizes)}, not {spec.block_size}"
        if self.max_head_dim is not None and max(spec.key_dim, spec.value_dim) > self.max_head_dim:
            return f"takes heads of up to {self.max_head_dim}, not {max(spec.key_dim, spec.value_dim)}"
        if spec.key_dim != spec.value_dim and not self.separate_value_dim:
            return "needs equal key and value head sizes"
        group = -(-spec.num_query_heads // spec.num_kv_heads)
        size = spec.dtype.itemsize
        for number in (group, max(spec.key_dim, spec.value_dim)):
            size <<= (number - 1).bit_length()
        if self.max_group_bytes is not None and size > self.max_group_bytes:
            return f"has no room for {group} query heads to a K/V head of {spec.key_dim} in {spec.dtype}"
        return None


def slot_rows(metadata: PagedAttentionMetadata, num_kv_heads: int) -> torch.Tensor:
    """Returns the rows of `cache.view(-1, head_dim)` that the call's new tokens go to, int64 `[tokens * heads]`.

    Computed once per call and kept in `metadata.prepared`.

    Args:
        metadata (`PagedAttentionMetadata`):
            The call's slots.
        num_kv_heads (`int`):
            K/V heads of the cache.
    """
    key = ("slot_rows", num_kv_heads)
    if key not in metadata.prepared:
        slots, block_size = metadata.slot_mapping, metadata.block_size
        offsets = slots % block_size
        heads = torch.arange(num_kv_heads, device=slots.device)
        # (block_id * heads + head) * block_size + offset, where block_id * block_size is slot - offset.
        rows = ((slots - offsets) * num_kv_heads + offsets)[:, None] + heads * block_size
        metadata.prepared[key] = rows.reshape(-1)
    return metadata.prepared[key]


class PagedAttentionBackend(abc.ABC):
    """Attention over K/V blocks. One stateless-looking object per engine; it may keep workspaces.

    K/V tensors of a layer are contiguous, of the shape `[num_blocks, num_kv_heads, block_size, head_dim]`:

        key_cache[block_id, head] = | slot 0: Dk numbers | slot 1 | ... | slot block_size - 1 |

    A backend that declares `cache_dtypes` may be given `QuantizedBlocks` in their place.

    A backend sets, next to `name` and `capabilities`, its `priority` (where several fit, the highest is taken) and
    `automatic_devices` (device types on which it is taken without being asked for by name; `None` means all it
    runs on). It is `graph_safe` if its decoding launches depend on shapes and on the longest context on the host, and
    read all else on the device: request rows of length 0 and slots below 0 are passed over. One that reads the common
    beginning of neighbouring requests once says by `alike_keys` (a multiple of the block size) how long it must be.

    Args:
        spec (`AttentionSpec`):
            What the layers that will call need.
    """

    name: str
    capabilities: Capabilities
    priority: int = 0
    automatic_devices: frozenset[str] | None = None
    graph_safe: bool = False
    alike_keys: int | None = None

    def __init__(self, spec: AttentionSpec):
        self.spec = spec

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Returns why the backend cannot be used on this machine (a missing package, ...), or `None`."""
        return None

    def keys_saved(self, block_tables: np.ndarray, seq_lens: np.ndarray) -> int:
        """Returns how many keys less are read by a decoding call that is planned for just these requests.

        A captured call is planned for any. Where keys are saved by the gigabyte, it does not pay.

        Args:
            block_tables (`np.ndarray`):
                int32 `[num_requests, max_blocks]`, on the host.
            seq_lens (`np.ndarray`):
                int32 `[num_requests]`, contexts with the new token.
        """
        return 0

    def prepare(self, metadata: PagedAttentionMetadata, num_kv_heads: int) -> None:  # noqa: B027 - optional hook
        """Computes what all layers of a step share, into `metadata.prepared`.

        Args:
            metadata (`PagedAttentionMetadata`):
                The step's lengths and block tables.
            num_kv_heads (`int`):
                K/V heads of the layers that will ask.
        """

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: Blocks,
        value_cache: Blocks,
        metadata: PagedAttentionMetadata,
    ) -> None:
        """Writes new keys and values into their slots.

        Args:
            key (`torch.Tensor`):
                `[num_tokens, num_kv_heads, Dk]`, any strides.
            value (`torch.Tensor`):
                `[num_tokens, num_kv_heads, Dv]`, any strides.
            key_cache (`Blocks`):
                `[num_blocks, num_kv_heads, block_size, Dk]`, contiguous.
            value_cache (`Blocks`):
                `[num_blocks, num_kv_heads, block_size, Dv]`, contiguous.
            metadata (`PagedAttentionMetadata`):
                The call's slots; keeps the row numbers that all layers share.
        """
        rows = slot_rows(metadata, key_cache.shape[1])
        for new, cache in ((key, key_cache), (value, value_cache)):
            write_rows(cache, rows, new.reshape(-1, cache.shape[3]))

    @abc.abstractmethod
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
        """Causal attention of a call's new tokens over their requests' blocks.

        Args:
            query (`torch.Tensor`):
                `[num_tokens, num_query_heads, Dk]`, any strides.
            key_cache (`Blocks`):
                `[num_blocks, num_kv_heads, block_size, Dk]`.
            value_cache (`Blocks`):
                `[num_blocks, num_kv_heads, block_size, Dv]`.
            metadata (`PagedAttentionMetadata`):
                Lengths and block tables of the call.
            scale (`float`):
                Factor on the scores.
            window (`int`, *optional*):
                A token sees the last `window` positions, its own included.
            softcap (`float`, *optional*):
                Scores become `softcap * tanh(score / softcap)`, before masking.
            sinks (`torch.Tensor`, *optional*):
                `[num_query_heads]`: one more score per head in the softmax's denominator, without a value.
            alibi_slopes (`torch.Tensor`, *optional*):
                `[num_query_heads]`: `slope * (key position - query position)` is added to the scores.
            return_lse (`bool`, defaults to `False`):
                Also return the log-sum-exp of the scores (sinks included).

        Returns:
            `torch.Tensor` `[num_tokens, num_query_heads, Dv]` in the query's dtype, and with `return_lse` also
            float32 `[num_tokens, num_query_heads]` (float64 if the query is).
        """
