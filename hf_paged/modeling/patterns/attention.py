"""The attention block: projections to q, k and v, perhaps norms of q and k, perhaps rotary embeddings, attention, o.

Which linear is which, how heads lie in a fused one and how they are rotated are hypotheses, tried on what was observed
to go into the linears and to arrive at attention.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...kernels.layers import LayerShape
from .mlp import linear_sources
from .norm import Norm, find_norm
from .observation import (
    AttentionCall,
    Call,
    check_telling,
    close,
    first_with,
    input_of,
    output_of,
    relative_error,
    same,
)
from .plain import NotRecognizedError, is_plain_linear, is_plain_tensor
from .recipe import (
    HeadRows,
    LayerRecipe,
    NormKind,
    QKNormKind,
    ResidualFlow,
    RopeLayout,
    Rows,
    TensorSource,
)
from .reference import rotated


@dataclasses.dataclass(frozen=True)
class AttentionBlock:
    """What an attention block is made of.

    Args:
        recipe (`LayerRecipe`):
            The block alone.
        call (`Call`):
            The observed call of its module.
        input (`torch.Tensor`):
            What its linears were given.
        output (`torch.Tensor`):
            What its last linear returned, and the block with it.
        angles (`tuple[torch.Tensor, torch.Tensor]`, *optional*):
            The model's cosines and sines, if it rotates.
    """

    recipe: LayerRecipe
    call: Call
    input: torch.Tensor
    output: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor] | None


@dataclasses.dataclass(frozen=True)
class _Projection:
    """A hypothesis about one of q, k and v: its numbers `[tokens, width]` and where its tensors are."""

    states: torch.Tensor
    sources: dict[str, TensorSource]
    linear: Call


@dataclasses.dataclass(frozen=True)
class _Rope:
    """A hypothesis about how queries and keys are rotated; see `LayerShape`."""

    layout: RopeLayout
    begin: int = 0
    dim: int = 0
    step: int = 1
    sin_sign: float = 1.0
    query_factor: float = 1.0


def find_attention(attention: AttentionCall, calls: Sequence[Call]) -> AttentionBlock:
    """Finds out how the module that called attention came to its queries, keys and values, and what it did after.

    Args:
        attention (`AttentionCall`):
            The call of attention.
        calls (`Sequence[Call]`):
            All observed calls of modules.

    Raises:
        NotRecognizedError: If it did something else than this pattern says.
    """
    block = attention.parents[-1]
    check_telling(attention.query, attention.key, attention.value, attention.output)
    inner = [call for call in calls if call.is_within(block)]
    linears = [call for call in inner if is_plain_linear(call.module)]
    last = next(first_with(linears, attention.output, input_of), None)
    if last is None or not same(block.tensor_output, last.output):
        raise NotRecognizedError("the output of attention does not go through one linear to the block's output")
    firsts = [call for call in linears if call is not last]
    if not firsts or not all(same(call.input, firsts[0].input) for call in firsts):
        raise NotRecognizedError("queries, keys and values are not made by linears of one input")
    check_telling(firsts[0].input, last.output)
    angles = find_angles(block)
    projections, norms, rope = _fitting(firsts, attention, inner, angles)
    sources = linear_sources(last.module, "o") | _sinks(block.module, attention.request.sinks)
    for found in [part.sources for part in projections] + [part.sources for part in norms]:
        sources |= found
    request, norm = attention.request, norms[0].norm
    shape = LayerShape(
        has_mlp=0,
        norm_kind=NormKind.NONE,
        residual_flow=ResidualFlow.NONE,
        num_query_heads=attention.query.shape[1],
        num_kv_heads=attention.key.shape[1],
        key_dim=attention.key.shape[2],
        value_dim=attention.value.shape[2],
        rope_layout=rope.layout,
        rotary_begin=rope.begin,
        rotary_dim=rope.dim,
        cos_step=rope.step,
        qk_norm_kind=norms[0].kind,
        window=-1 if request.window is None else request.window,
        bare_qk_norms=int(norm is not None and norm.is_bare),
        gated=0,
        scale=float(request.scale) * rope.query_factor,
        softcap=request.softcap or 0.0,
        sin_sign=rope.sin_sign,
    )
    if norm is not None:
        shape = dataclasses.replace(shape, qk_norm_type=norm.kind, qk_norm_eps=norm.eps, qk_norm_offset=norm.offset)
    is_rotary = rope.layout != RopeLayout.NONE
    assert firsts[0].input is not None, "a linear has an input"
    recipe = LayerRecipe(sources, shape)
    return AttentionBlock(recipe, block, firsts[0].input, last.output, angles if is_rotary else None)


def find_angles(call: Call) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the cosines and sines among the arguments of a call: a pair of tensors `[1, tokens, columns]`.

    Args:
        call (`Call`):
            A call of a layer or an attention module.
    """
    return next((pair for pair in (*call.args, *call.kwargs.values()) if is_angles(pair)), None)


def is_angles(pair: Any) -> bool:
    """Returns whether an argument has the form of cosines and sines.

    Args:
        pair (`Any`):
            The argument.
    """
    return (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(table, torch.Tensor) and table.ndim == 3 and table.shape[0] == 1 for table in pair)
        and pair[0].shape == pair[1].shape
    )


def _fitting(
    firsts: Sequence[Call],
    attention: AttentionCall,
    inner: Sequence[Call],
    angles: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[tuple[_Projection, ...], tuple[_Normalized, _Normalized], _Rope]:
    """The first hypothesis about the projections by which queries and keys come out as they arrive at attention."""
    reason = NotRecognizedError("the widths of the linears are not those of queries, keys and values")
    for projections in _projections(firsts, attention):
        try:
            norms = _norms(projections[0], projections[1], inner)
            return projections, norms, _rope(norms[0].states, norms[1].states, attention, angles)
        except NotRecognizedError as error:
            reason = error
    raise reason


def _projections(firsts: Sequence[Call], attention: AttentionCall) -> Iterator[tuple[_Projection, ...]]:
    if len(firsts) == 1:
        yield _fused(firsts[0], attention)
        return
    value = next(first_with(firsts, attention.value, output_of), None)
    rest = [call for call in firsts if call is not value]
    if value is None or len(rest) != 2:
        raise NotRecognizedError("queries, keys and values are not the outputs of one linear or of three")
    widths = [attention.query[0].numel(), attention.key[0].numel()]
    for pair in (rest, rest[::-1]):
        if [call.output.shape[-1] for call in pair] == widths:
            yield tuple(
                _Projection(call.output[0], linear_sources(call.module, name), call)
                for name, call in zip("qkv", (*pair, value), strict=True)
            )


def _fused(linear: Call, attention: AttentionCall) -> tuple[_Projection, ...]:
    """One linear for all: its output is cut in one of the known ways so that the values come out."""
    states = linear.output[0]
    for cuts in _cuts(states.shape[-1], attention):
        parts = [_cut(states, cut) for cut in cuts]
        if same(parts[2], attention.value):
            return tuple(
                _Projection(part, linear_sources(linear.module, name, cut), linear)
                for name, part, cut in zip("qkv", parts, cuts, strict=True)
            )
    raise NotRecognizedError("the values at attention are no known part of the fused linear's output")


def _cuts(width: int, attention: AttentionCall) -> Iterator[tuple[Any, Any, Any]]:
    query, key, value = (states[0].numel() for states in (attention.query, attention.key, attention.value))
    if width != query + key + value:
        return
    yield Rows(0, query), Rows(query, query + key), Rows(query + key, width)
    if query == key == value:
        heads = attention.query.shape[1]
        yield HeadRows(heads, 0, 3), HeadRows(heads, 1, 3), HeadRows(heads, 2, 3)


def _cut(states: torch.Tensor, cut: Rows | HeadRows) -> torch.Tensor:
    """A view of weight rows, applied to the columns that they make."""
    return cut(states.t().contiguous()).reshape(-1, len(states)).t()


@dataclasses.dataclass(frozen=True)
class _Normalized:
    states: torch.Tensor
    kind: QKNormKind = QKNormKind.NONE
    norm: Norm | None = None
    sources: dict[str, TensorSource] = dataclasses.field(default_factory=dict)


def _norms(query: _Projection, key: _Projection, inner: Sequence[Call]) -> tuple[_Normalized, _Normalized]:
    """Norms that were given the queries and keys of the linears."""
    found = [_norm_of(projection, name, inner) for projection, name in ((query, "q"), (key, "k"))]
    first, second = found
    if first.kind != second.kind:
        raise NotRecognizedError("queries and keys are normalised in different ways")
    if first.norm and second.norm:
        numbers = {(norm.kind, norm.eps, norm.offset) for norm in (first.norm, second.norm)}
        if len(numbers) != 1 or any(name.endswith("_bias") for name in first.sources | second.sources):
            raise NotRecognizedError("the norms of queries and keys differ, or have biases")
    return first, second


def _norm_of(projection: _Projection, name: str, inner: Sequence[Call]) -> _Normalized:
    """A norm of `[1, tokens, width]`, or of `[1, tokens, heads, head_dim]` or `[1, heads, tokens, head_dim]`."""
    for call in inner:
        given, output = call.input, call.output
        if given is None or not isinstance(output, torch.Tensor) or output.shape != given.shape:
            continue
        for order in ((0, 1, 2, 3), (0, 2, 1, 3)) if given.ndim == 4 else ((0, 1, 2),):
            if given.ndim == len(order) and same(given.permute(order), projection.states):
                norm = find_norm(call.module, given.shape[-1])
                if norm is not None:
                    kind = QKNormKind.PER_HEAD if given.ndim == 4 else QKNormKind.FULL_WIDTH
                    states = output.permute(order).reshape(projection.states.shape)
                    return _Normalized(states, kind, norm, norm.sources(f"{name}_norm"))
    return _Normalized(projection.states)


def _rope(
    query: torch.Tensor, key: torch.Tensor, attention: AttentionCall, angles: tuple[torch.Tensor, torch.Tensor] | None
) -> _Rope:
    if same(key, attention.key):
        factors = _factors(attention.parents[-1].module)
        factor = min(factors, key=lambda factor: relative_error(query * factor, attention.query))
        if close(query * factor, attention.query):
            return _Rope(RopeLayout.NONE, query_factor=factor)
    pairs = [(query, attention.query), (key, attention.key)]
    if angles is None:
        raise NotRecognizedError("queries and keys are changed before attention, and no rotary angles are given")
    cos, sin = (table[0] for table in angles)
    for rope in _ropes(cos.shape[1], attention.query.shape[2]):
        shape = LayerShape(
            rope_layout=rope.layout,
            rotary_begin=rope.begin,
            rotary_dim=rope.dim,
            cos_step=rope.step,
            sin_sign=rope.sin_sign,
        )
        if all(close(rotated(states.reshape(arrived.shape), shape, cos, sin), arrived) for states, arrived in pairs):
            return rope
    raise NotRecognizedError("queries and keys are not rotated in a known way before attention")


def _ropes(num_columns: int, head_dim: int) -> Iterator[_Rope]:
    """What is common first: the angles stand twice in a row of the table, in halves or side by side, or once."""
    for sin_sign, (dim, step) in itertools.product(
        (1.0, -1.0), ((num_columns, 1), (num_columns, 2), (2 * num_columns, 1))
    ):
        if dim <= head_dim and dim % 2 == 0:
            for layout in (RopeLayout.HALF, RopeLayout.INTERLEAVED, RopeLayout.INTERLEAVED_TO_HALF):
                for begin in dict.fromkeys((0, head_dim - dim)):
                    yield _Rope(layout, begin, dim, step, sin_sign)


def _factors(module: torch.nn.Module) -> list[float]:
    """What queries may be multiplied with instead of scores."""
    return [1.0, *(v for name, v in vars(module).items() if type(v) is float and not name.startswith("_"))]


def _sinks(module: torch.nn.Module, sinks: torch.Tensor | None) -> dict[str, TensorSource]:
    if sinks is None:
        return {}
    for name, parameter in module._parameters.items():
        if parameter is sinks and is_plain_tensor(parameter):
            return {"sinks": TensorSource(module._parameters, name)}
    raise NotRecognizedError("the attention sinks are not a parameter of the attention module")
