"""A decoder layer as every implementation of the operator for layers is given it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .base import PagedAttentionBackend
from .metadata import PagedAttentionMetadata
from .quantized_blocks import Blocks

# In the order of the native operator.
TENSORS = (
    "norm1_weight",
    "norm1_bias",
    "q_weight",
    "k_weight",
    "v_weight",
    "q_bias",
    "k_bias",
    "v_bias",
    "q_norm_weight",
    "k_norm_weight",
    "o_weight",
    "o_bias",
    "post_attention_norm_weight",
    "post_attention_norm_bias",
    "norm2_weight",
    "norm2_bias",
    "gate_weight",
    "up_weight",
    "down_weight",
    "gate_bias",
    "up_bias",
    "down_bias",
    "post_mlp_norm_weight",
    "post_mlp_norm_bias",
    "sinks",
    "alibi_slopes",
)


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """The numbers of a decoder layer, in the operator's order: integers and, from `norm_eps` on, floats.

    Args:
        has_attention (`int`, defaults to 1):
            Whether there is an attention block.
        has_mlp (`int`, defaults to 1):
            Whether there is an MLP.
        norm_kind (`int`, defaults to 1):
            0 none, 1 RMS norm, 2 layer norm.
        residual_flow (`int`, defaults to 0):
            0 sequential, 1 parallel with one norm, 2 parallel with two norms, 3 one block alone, without residual.
        num_query_heads (`int`, defaults to 0):
            Query heads.
        num_kv_heads (`int`, defaults to 0):
            K/V heads.
        key_dim (`int`, defaults to 0):
            Dk.
        value_dim (`int`, defaults to 0):
            Dv.
        rope_layout (`int`, defaults to 0):
            0 none, 1 halves, 2 interleaved, 3 read interleaved and written as halves.
        rotary_begin (`int`, defaults to 0):
            First dimension of a head that rotates.
        rotary_dim (`int`, defaults to 0):
            How many rotate.
        cos_step (`int`, defaults to 1):
            The cosine of pair i stands at `i * cos_step`.
        qk_norm_kind (`int`, defaults to 0):
            0 none, 1 per head, 2 over the full width.
        qk_norm_type (`int`, defaults to 1):
            1 RMS norm, 2 layer norm.
        activation (`int`, defaults to 1):
            A number of `activations.py`; 1 is silu.
        window (`int`, defaults to -1):
            Sliding window, -1 for none.
        bare_norms (`int`, defaults to 0):
            Whether norms without weights stand where norm1 and norm2 do.
        bare_qk_norms (`int`, defaults to 0):
            Whether the q and k norms have no weights.
        gated (`int`, defaults to 1):
            Whether the MLP has a gate.
        norm_eps (`float`, defaults to 1e-6):
            Added to the variance.
        norm_offset (`float`, defaults to 0.0):
            Added to the weights of norms.
        qk_norm_eps (`float`, defaults to 1e-6):
            Added to the variance of heads.
        qk_norm_offset (`float`, defaults to 0.0):
            Added to the weights of q and k norms.
        scale (`float`, defaults to 1.0):
            Factor on attention scores.
        softcap (`float`, defaults to 0.0):
            Soft cap on attention scores, 0 for none.
        residual_multiplier (`float`, defaults to 1.0):
            Factor on what a block adds.
        sin_sign (`float`, defaults to 1.0):
            -1 turns the other way.
    """

    has_attention: int = 1
    has_mlp: int = 1
    norm_kind: int = 1
    residual_flow: int = 0
    num_query_heads: int = 0
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    rope_layout: int = 0
    rotary_begin: int = 0
    rotary_dim: int = 0
    cos_step: int = 1
    qk_norm_kind: int = 0
    qk_norm_type: int = 1
    activation: int = 1
    window: int = -1
    bare_norms: int = 0
    bare_qk_norms: int = 0
    gated: int = 1
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    qk_norm_eps: float = 1e-6
    qk_norm_offset: float = 0.0
    scale: float = 1.0
    softcap: float = 0.0
    residual_multiplier: float = 1.0
    sin_sign: float = 1.0

    def __post_init__(self):
        values = dataclasses.astuple(self)
        object.__setattr__(self, "ints", tuple(int(value) for value in values[:NUM_INTS]))
        object.__setattr__(self, "floats", tuple(float(value) for value in values[NUM_INTS:]))

    @property
    def is_block(self) -> bool:
        """Returns whether this is a block alone, without a residual."""
        return self.residual_flow == 3


NUM_INTS = [field.name for field in dataclasses.fields(LayerShape)].index("norm_eps")


@dataclasses.dataclass(slots=True)
class LayerArguments:
    """A layer in a call.

    Args:
        shape (`LayerShape`):
            Its numbers.
        tensors (`Sequence[torch.Tensor | None]`):
            Its tensors, in the order of `TENSORS`: weights as in `nn.Linear`, or `[blocks, rows, in]` where the rows
            of an interleaved projection come in blocks; sinks and slopes of any dtype.
        key_cache (`Blocks`, *optional*):
            `[num_blocks, num_kv_heads, block_size, Dk]`; none without attention.
        value_cache (`Blocks`, *optional*):
            `[num_blocks, num_kv_heads, block_size, Dv]`.
        prepared (`Any`, *optional*):
            What an implementation made of all this in the first call with it, for those that follow. It must not
            refer to this object, or both would outlive their pool.
    """

    shape: LayerShape
    tensors: Sequence[torch.Tensor | None]
    key_cache: Blocks | None = None
    value_cache: Blocks | None = None
    prepared: Any = None

    def named(self) -> dict[str, torch.Tensor | None]:
        """Returns its tensors by their names in `TENSORS`."""
        return dict(zip(TENSORS, self.tensors, strict=True))

    def attend(
        self, query: torch.Tensor, backend: PagedAttentionBackend, metadata: PagedAttentionMetadata
    ) -> torch.Tensor:
        """Attends over its blocks, in which the new keys and values are.

        Args:
            query (`torch.Tensor`):
                `[tokens, num_query_heads, Dk]`.
            backend (`PagedAttentionBackend`):
                What attends.
            metadata (`PagedAttentionMetadata`):
                Lengths and block tables.

        Returns:
            `torch.Tensor`: `[tokens, num_query_heads, Dv]`.
        """
        assert self.key_cache is not None and self.value_cache is not None, "attention needs blocks"
        output = backend.attend(query, self.key_cache, self.value_cache, metadata, **self.attention_settings())
        assert isinstance(output, torch.Tensor), "a backend returns a pair only when asked for the log-sum-exp"
        return output

    def attention_settings(self) -> dict[str, Any]:
        """Returns what `PagedAttentionBackend.attend` is given beside tensors of the call."""
        shape, tensors = self.shape, self.named()
        return {
            "scale": shape.scale,
            "window": None if shape.window < 0 else shape.window,
            "softcap": shape.softcap or None,
            "sinks": tensors["sinks"],
            "alibi_slopes": tensors["alibi_slopes"],
        }
