"""The decoder operator in plain torch: what the native one is tested against, and what recipes are proved with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels.base import AttentionSpec
from ...kernels.layers import LayerArguments, LayerShape
from ...kernels.metadata import PagedAttentionMetadata
from ...kernels.packed_rows import is_packed, packed_linear
from ...kernels.reference import ReferenceBackend
from .recipe import Activation, NormKind, QKNormKind, ResidualFlow, RopeLayout

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.IDENTITY: lambda x: x,
    Activation.SILU: torch.nn.functional.silu,
    Activation.GELU: torch.nn.functional.gelu,
    Activation.GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.RELU: torch.nn.functional.relu,
    Activation.RELU2: lambda x: torch.nn.functional.relu(x).square(),
    Activation.SIGMOID: torch.sigmoid,
    Activation.TANH: torch.tanh,
}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `x @ weight.T + bias`.

    Args:
        x (`torch.Tensor`):
            `[..., in]`.
        weight (`torch.Tensor`):
            `[out, in]`, or packed rows (see `kernels/packed_rows.py`).
        bias (`torch.Tensor`, *optional*):
            `[out]`.
    """
    return (packed_linear if is_packed(weight) else torch.nn.functional.linear)(x, weight, bias)


def normalized(
    x: torch.Tensor,
    kind: NormKind | int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
) -> torch.Tensor:
    """Returns a norm over the last dimension, computed in float32.

    Args:
        x (`torch.Tensor`):
            `[..., size]`.
        kind (`NormKind` or `int`):
            Which norm.
        weight (`torch.Tensor`, *optional*):
            `[size]`.
        bias (`torch.Tensor`, *optional*):
            `[size]`.
        eps (`float`):
            Added to the mean of the squares.
        offset (`float`, defaults to 0.0):
            Added to the weight.
    """
    states = x.float()
    if kind == NormKind.LAYER:
        states = states - states.mean(-1, keepdim=True)
    states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        states = states * (weight.float() + offset)
    if bias is not None:
        states = states + bias.float()
    return states.to(x.dtype)


def rotated(x: torch.Tensor, shape: LayerShape, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns queries or keys rotated by their positions' angles.

    Args:
        x (`torch.Tensor`):
            `[tokens, heads, head_dim]`.
        shape (`LayerShape`):
            Says how.
        cos (`torch.Tensor`):
            `[tokens, columns]`.
        sin (`torch.Tensor`):
            `[tokens, columns]`.
    """
    layout, step, half = shape.rope_layout, shape.cos_step, shape.rotary_dim // 2
    if layout == RopeLayout.NONE:
        return x
    before, rotary, after = x.split([shape.rotary_begin, 2 * half, x.shape[-1] - shape.rotary_begin - 2 * half], dim=-1)
    rotary = rotary.float()
    cos, sin = (table[:, : half * step : step].float()[:, None] for table in (cos, sin * shape.sin_sign))
    if layout == RopeLayout.HALF:
        first, second = rotary[..., :half], rotary[..., half:]
    else:
        first, second = rotary[..., ::2], rotary[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    both = torch.stack(turned, dim=-1).flatten(-2) if layout == RopeLayout.INTERLEAVED else torch.cat(turned, dim=-1)
    return torch.cat([before, both.to(x.dtype), after], dim=-1)


class _Layer:
    """One layer's computation."""

    def __init__(self, arguments: LayerArguments):
        self.shape = arguments.shape
        self.tensors = arguments.named()

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.tensors[f"{name}_weight"], self.tensors[f"{name}_bias"]
        assert weight is not None, "a linear has a weight"
        weight, bias = weight.reshape(-1, weight.shape[-1]), None if bias is None else bias.reshape(-1)
        return linear(x, weight, bias)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias, shape = self.tensors[f"{name}_weight"], self.tensors[f"{name}_bias"], self.shape
        if weight is None and not (shape.bare_norms and name in ("norm1", "norm2")):
            return x
        return normalized(x, shape.norm_kind, weight, bias, shape.norm_eps, shape.norm_offset)

    def qk_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Of `[tokens, heads, head_dim]`."""
        shape = self.shape
        if shape.qk_norm_kind == QKNormKind.NONE:
            return x
        states = x if shape.qk_norm_kind == QKNormKind.PER_HEAD else x.flatten(1)
        weight, offset = self.tensors[f"{name}_norm_weight"], shape.qk_norm_offset
        return normalized(states, shape.qk_norm_type, weight, None, shape.qk_norm_eps, offset).view(x.shape)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape, tokens = self.shape, len(x)
        query = self.qk_norm(self.linear(x, "q").view(tokens, shape.num_query_heads, shape.key_dim), "q")
        key = self.qk_norm(self.linear(x, "k").view(tokens, shape.num_kv_heads, shape.key_dim), "k")
        value = self.linear(x, "v").view(tokens, shape.num_kv_heads, shape.value_dim)
        if shape.rope_layout != RopeLayout.NONE:
            assert cos is not None and sin is not None, "a layer that rotates gets angles"
            query, key = (rotated(states, shape, cos, sin) for states in (query, key))
        return query, key, value

    def attention(self, x: torch.Tensor, cos: Any, sin: Any, attend: Attend) -> torch.Tensor:
        return self.linear(attend(*self.project(x, cos, sin)).flatten(1), "o")

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        activation = ACTIVATIONS[Activation(self.shape.activation)]
        up = self.linear(x, "up")
        return self.linear(activation(self.linear(x, "gate")) * up if self.shape.gated else activation(up), "down")

    def run(self, x: torch.Tensor, cos: Any, sin: Any, attend: Attend) -> torch.Tensor:
        shape = self.shape
        if shape.residual_flow == ResidualFlow.NONE:
            return self.attention(x, cos, sin, attend) if shape.has_attention else self.mlp(x)
        multiplier, states = shape.residual_multiplier, self.norm(x, "norm1")
        attended = self.norm(self.attention(states, cos, sin, attend), "post_attention_norm")
        if shape.residual_flow == ResidualFlow.SEQUENTIAL:
            x = x + attended * multiplier
            return x + self.norm(self.mlp(self.norm(x, "norm2")), "post_mlp_norm") * multiplier
        if shape.residual_flow == ResidualFlow.PARALLEL_TWO_NORMS:
            states = self.norm(x, "norm2")
        return x + (attended + self.norm(self.mlp(states), "post_mlp_norm")) * multiplier


def projections(
    x: torch.Tensor, layer: LayerArguments, cos: torch.Tensor | None, sin: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the queries, keys and values of an attention block as attention gets them.

    Args:
        x (`torch.Tensor`):
            `[tokens, hidden]`, the block's input.
        layer (`LayerArguments`):
            The block.
        cos (`torch.Tensor`, *optional*):
            `[tokens, columns]`.
        sin (`torch.Tensor`, *optional*):
            `[tokens, columns]`.

    Returns:
        Each `[tokens, heads, head_dim]`.
    """
    return _Layer(layer).project(x, cos, sin)


def decoder_layers(
    hidden: torch.Tensor,
    layers: Sequence[LayerArguments],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    metadata: PagedAttentionMetadata | None,
) -> torch.Tensor:
    """Runs layers one after the other.

    Args:
        hidden (`torch.Tensor`):
            `[tokens, hidden]`.
        layers (`Sequence[LayerArguments]`):
            The layers.
        cos (`torch.Tensor`, *optional*):
            `[tokens, columns]`, or `None` if no layer rotates.
        sin (`torch.Tensor`, *optional*):
            `[tokens, columns]`, or `None` if no layer rotates.
        metadata (`PagedAttentionMetadata`, *optional*):
            Lengths and block tables; `None` if no layer attends.

    Returns:
        `torch.Tensor` `[tokens, hidden]`.
    """
    for arguments in layers:
        hidden = _Layer(arguments).run(hidden, cos, sin, _attending(arguments, metadata))
    return hidden


def _attending(arguments: LayerArguments, metadata: PagedAttentionMetadata | None) -> Attend:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key_cache, value_cache = arguments.key_cache, arguments.value_cache
        assert metadata is not None and key_cache is not None and value_cache is not None, "attention needs blocks"
        (_, num_heads, key_dim), (_, num_kv_heads, value_dim), device = query.shape, value.shape, query.device
        spec = AttentionSpec(num_heads, num_kv_heads, key_dim, value_dim, query.dtype, device.type, metadata.block_size)
        backend = ReferenceBackend(spec)
        backend.store(key, value, key_cache, value_cache, metadata)
        return arguments.attend(query, backend, metadata)

    return attend
