"""Decoder layers on a GPU: torch's linears, Triton for what lies between them.

    hidden ┐
           + -> norm -> q, k, v -> rope, store -> attention -> o -> + -> norm -> gate, up -> activation -> down -> +
    of the layer before ^                                           one launch                             of the next

Weights that are views of one, side by side, are multiplied with in one linear. Sums, their norms, and a norm of what is
added are one launch, across the border between two layers as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..base import PagedAttentionBackend
from ..cpu.rope import Pairs, RopeLayout
from ..layers import LayerArguments
from ..metadata import PagedAttentionMetadata
from .activations import activation, gated_activation
from .cache import rope_store
from .fused_weights import Linears
from .launching import check
from .layer_cache import LayerCache
from .norms import Norm, add_normalized, normalized

PAIRS: tuple[Pairs, ...] = ("half", "interleaved", "interleaved_to_half")
SEQUENTIAL, PARALLEL_ONE_NORM, PARALLEL_TWO_NORMS, BLOCK_ALONE = range(4)  # flows of the residual
PER_HEAD, FULL_WIDTH = 1, 2  # over what queries and keys are normed
Tables = tuple[torch.Tensor, torch.Tensor] | None


@dataclasses.dataclass(slots=True, eq=False)
class _Branch:
    """What is yet to be added to the residual."""

    states: torch.Tensor
    before: Norm | None
    multiplier: float
    other: torch.Tensor | None = None

    def added(self, residual: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
        return add_normalized(
            self.states, residual, norm, before=self.before, other=self.other, multiplier=self.multiplier
        )


class TritonLayers:
    """Runs decoder layers, attention blocks and MLPs, as `modeling/patterns/reference.py` says.

    Args:
        backend (`PagedAttentionBackend`):
            What attends.
    """

    def __init__(self, backend: PagedAttentionBackend):
        self._backend = backend

    def __call__(
        self,
        hidden: torch.Tensor,
        layers: Sequence[LayerArguments],
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        metadata: PagedAttentionMetadata | None,
    ) -> torch.Tensor:
        """Runs layers one after the other; stores their K/V.

        Args:
            hidden (`torch.Tensor`):
                `[tokens, hidden_size]`, float32, bfloat16 or float16, of the weights' dtype.
            layers (`Sequence[LayerArguments]`):
                The layers, or one block alone.
            cos (`torch.Tensor`, *optional*):
                `[tokens, n]`, shared by all layers that rotate.
            sin (`torch.Tensor`, *optional*):
                The same.
            metadata (`PagedAttentionMetadata`, *optional*):
                Lengths and block tables; none if no layer has attention.

        Returns:
            `torch.Tensor`: `[tokens, hidden_size]` in the dtype of `hidden`, in which it is between layers, too.

        Raises:
            NotSupportedError: If a shape or dtype is none that the kernels take.
        """
        step = _Step(self._backend, None if cos is None or sin is None else (cos, sin), metadata)
        branch: _Branch | None = None
        for arguments in layers:
            layer = arguments.prepared
            if layer is None:
                layer = arguments.prepared = _Layer(arguments)
            if layer.shape.is_block:
                return layer.attention(hidden, step) if layer.shape.has_attention else layer.mlp(hidden)
            hidden, branch = layer.run(hidden, branch, step)
        return hidden if branch is None else branch.added(hidden, None)[1]


@dataclasses.dataclass(slots=True, eq=False)
class _Step:
    """What layers have in common in a call."""

    backend: PagedAttentionBackend
    angles: Tables
    metadata: PagedAttentionMetadata | None


class _Layer:
    """One layer's computation: made once, run in many calls."""

    def __init__(self, arguments: LayerArguments):
        self.shape = arguments.shape
        self._tensors = arguments.named()
        self._norm1, self._norm2 = self._norm("norm1"), self._norm("norm2")
        self._post_attention_norm, self._post_mlp_norm = self._norm("post_attention_norm"), self._norm("post_mlp_norm")
        if self.shape.has_attention:
            assert arguments.key_cache is not None and arguments.value_cache is not None, "attention needs blocks"
            self._blocks = arguments.key_cache, arguments.value_cache
            self._cache = LayerCache.of(*self._blocks)
            self._settings = arguments.attention_settings()
            self._qkv, self._o = self._linears("q", "k", "v"), self._linears("o")
            self._head_sizes = (
                (self.shape.num_query_heads, self.shape.key_dim),
                (self.shape.num_kv_heads, self.shape.key_dim),
                (self.shape.num_kv_heads, self.shape.value_dim),
            )
            self._qk_norms, self._rope_layout = self._make_qk_norms(), self._make_rope_layout()
        if self.shape.has_mlp:
            self._first = self._linears("gate", "up") if self.shape.gated else self._linears("up")
            self._down = self._linears("down")

    def run(self, residual: torch.Tensor, branch: _Branch | None, step: _Step) -> tuple[torch.Tensor, _Branch | None]:
        """Returns the residual and what is yet to be added to it."""
        shape = self.shape
        if shape.residual_flow == SEQUENTIAL:
            if shape.has_attention:
                states, residual = _entered(self._norm1, residual, branch)
                branch = self._branch(self.attention(states, step), self._post_attention_norm)
            if shape.has_mlp:
                states, residual = _entered(self._norm2, residual, branch)
                branch = self._branch(self.mlp(states), self._post_mlp_norm)
            return residual, branch
        has_norms_after = self._post_attention_norm or self._post_mlp_norm
        check(not has_norms_after, "attention and MLP side by side have no norms after them.")
        states, residual = _entered(self._norm1, residual, branch)
        attended = self.attention(states, step)
        if shape.residual_flow == PARALLEL_TWO_NORMS:
            states = _entered(self._norm2, residual, None)[0]
        return residual, _Branch(self.mlp(states), None, shape.residual_multiplier, attended)

    def attention(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        """Returns what the attention block makes of `[tokens, hidden_size]`."""
        assert step.metadata is not None, "attention needs lengths and block tables"
        query, key, value = self._project(x)
        norms = self._qk_norms
        if norms is not None and self.shape.qk_norm_kind == FULL_WIDTH:
            query, key = (
                normalized(part.flatten(1), norm).view(part.shape)
                for part, norm in zip((query, key), norms, strict=True)
            )
            norms = None
        layout = self._rope_layout
        query = rope_store(
            query, key, value, step.angles if layout else None, layout, self._cache, step.metadata.slot_mapping, norms
        )
        output = step.backend.attend(query, *self._blocks, step.metadata, **self._settings)
        assert isinstance(output, torch.Tensor), "a backend returns a pair only when asked for the log-sum-exp"
        return self._o(output.flatten(1))[0]

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the MLP makes of `[tokens, hidden_size]`."""
        if self.shape.gated:
            gate, up = self._first(x)
            states = gated_activation(gate, up, self.shape.activation)
        else:
            states = activation(self._first(x)[0], self.shape.activation)
        return self._down(states)[0]

    def _project(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, each `[tokens, heads, head_dim]`, views of one tensor where they can be."""
        parts = zip(self._qkv(x), self._head_sizes, strict=True)
        return [part if part.shape[1:] == size else part.reshape(x.shape[0], *size) for part, size in parts]

    def _linears(self, *names: str) -> Linears:
        weights, biases = ([self._tensors[f"{name}_{kind}"] for name in names] for kind in ("weight", "bias"))
        return Linears(weights, biases)

    def _branch(self, states: torch.Tensor, norm_after: Norm | None) -> _Branch:
        return _Branch(states, norm_after, self.shape.residual_multiplier)

    def _norm(self, name: str) -> Norm | None:
        weight, bias, shape = self._tensors[f"{name}_weight"], self._tensors[f"{name}_bias"], self.shape
        if weight is None and not (shape.bare_norms and name in ("norm1", "norm2")):
            return None
        return Norm(shape.norm_kind, weight, bias, shape.norm_eps, shape.norm_offset)

    def _make_qk_norms(self) -> tuple[Norm, Norm] | None:
        shape = self.shape
        query, key = self._tensors["q_norm_weight"], self._tensors["k_norm_weight"]
        if not shape.qk_norm_kind or (query is None and not shape.bare_qk_norms):
            return None
        rest = None, shape.qk_norm_eps, shape.qk_norm_offset
        return Norm(shape.qk_norm_type, query, *rest), Norm(shape.qk_norm_type, key, *rest)

    def _make_rope_layout(self) -> RopeLayout | None:
        shape = self.shape
        if not shape.rope_layout:
            return None
        pairs = PAIRS[shape.rope_layout - 1]
        return RopeLayout(shape.rotary_dim, pairs, shape.rotary_begin, shape.cos_step, shape.sin_sign < 0)


def _entered(norm: Norm | None, residual: torch.Tensor, branch: _Branch | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what the next block is given, and the residual after what was yet to be added."""
    if branch is not None:
        return branch.added(residual, norm)
    return (residual if norm is None else normalized(residual, norm)), residual
