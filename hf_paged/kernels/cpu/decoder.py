"""Decoder layers in one operator: what a layer is to it, and the call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from ..metadata import PagedAttentionMetadata
from . import library

# In the operator's order.
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
            of an interleaved projection come in blocks; sinks and slopes in float32.
        key_cache (`torch.Tensor`, *optional*):
            `[num_blocks, num_kv_heads, block_size, Dk]`; none without attention.
        value_cache (`torch.Tensor`, *optional*):
            `[num_blocks, num_kv_heads, block_size, Dv]`.
    """

    shape: LayerShape
    tensors: Sequence[torch.Tensor | None]
    key_cache: torch.Tensor | None = None
    value_cache: torch.Tensor | None = None


def decoder_layers(
    hidden: torch.Tensor,
    layers: Sequence[LayerArguments],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    metadata: PagedAttentionMetadata | None,
) -> torch.Tensor:
    """Runs decoder layers, one after the other, in one operator; stores their K/V.

    Args:
        hidden (`torch.Tensor`):
            `[tokens, hidden_size]`, float32, bfloat16 or float16.
        layers (`Sequence[LayerArguments]`):
            The layers, or one block alone.
        cos (`torch.Tensor`, *optional*):
            `[tokens, n]`, shared by all layers that rotate.
        sin (`torch.Tensor`, *optional*):
            The same.
        metadata (`PagedAttentionMetadata`, *optional*):
            Lengths and block tables; none if no layer has attention.

    Returns:
        `torch.Tensor`: `[tokens, hidden_size]` in the dtype of `hidden`; between layers all is float32.
    """
    tensors: list[torch.Tensor | None] = []
    ints: list[int] = []
    floats: list[float] = []
    keys, values = [], []
    for layer in layers:
        tensors += layer.tensors
        ints += layer.shape.ints  # type: ignore[attr-defined]
        floats += layer.shape.floats  # type: ignore[attr-defined]
        if layer.key_cache is not None and layer.value_cache is not None:
            keys.append(layer.key_cache)
            values.append(layer.value_cache)
    empty = torch.empty(0)
    given = (empty,) * 4
    if metadata is not None:
        given = (metadata.block_tables, metadata.slot_mapping, metadata.cu_seqlens_q, metadata.seq_lens)
    dtype = hidden.dtype
    if not layers[0].shape.is_block:
        hidden = hidden.to(torch.float32)
    output = torch.ops.hf_paged.decoder_layers(hidden, tensors, ints, floats, cos, sin, keys, values, *given)
    return output.to(dtype)


@functools.cache
def load() -> bool:
    """Makes the operator of this file available, and returns whether it is."""
    if not library.load():
        return False

    def fake(
        hidden: torch.Tensor, tensors: Sequence[torch.Tensor | None], ints: Sequence[int], *_: object
    ) -> torch.Tensor:
        last = dict(zip(TENSORS, tensors[-len(TENSORS) :], strict=True))
        weight = last["down_weight"] if last["down_weight"] is not None else last["o_weight"]
        assert weight is not None, "a layer has a last linear"
        return hidden.new_empty(hidden.shape[0], weight.shape[0])

    torch.library.register_fake("hf_paged::decoder_layers", fake)
    return True
