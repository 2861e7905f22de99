"""The decoder layer: norms around an attention block and an MLP, and what is added to what.

The place of each norm is read off the tensors that it was given and that it returned in an observed call; the flow of
the residual is a hypothesis, tried on the layer's observed output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...kernels.layers import LayerShape
from .attention import AttentionBlock
from .mlp import MLP, find_mlp
from .norm import Norm, find_norm
from .observation import Call, first_with, input_of, output_of, relative_error, same, tolerance
from .plain import NotRecognizedError, is_plain_linear
from .recipe import LayerRecipe, NormKind, ResidualFlow


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A norm in its place; without a norm, its output is its input."""

    input: torch.Tensor
    output: torch.Tensor
    norm: Norm | None = None


def find_decoder_layer(layer: Call, block: AttentionBlock, calls: Sequence[Call]) -> LayerRecipe:
    """Finds out what a decoder layer does.

    Args:
        layer (`Call`):
            The observed call of the layer.
        block (`AttentionBlock`):
            Its attention block.
        calls (`Sequence[Call]`):
            All observed calls of modules.

    Raises:
        NotRecognizedError: If it does something else than this pattern says.
    """
    inner = [call for call in calls if call.is_within(layer) and not call.is_within(block.call)]
    linears = [call for call in inner if is_plain_linear(call.module)]
    mlp = find_mlp(linears, _holders(linears, layer))
    hidden, output = layer.input, layer.tensor_output
    if hidden is None or output is None:
        raise NotRecognizedError("the layer's input or output is not one tensor")
    norm1, attended = _before(block.input, inner), _after(block.output, inner)
    norm2, added = _before(mlp.input, inner), _after(mlp.output, inner)
    if not same(norm1.input, hidden):
        raise NotRecognizedError("attention is not given the layer's input, normalised or not")
    flow, multiplier = _flow(layer, output, norm1, attended.output, norm2, added.output)
    if flow == ResidualFlow.PARALLEL_ONE_NORM:
        norm2 = dataclasses.replace(norm2, norm=None)
    places = {"norm1": norm1, "post_attention_norm": attended, "norm2": norm2, "post_mlp_norm": added}
    norms = {name: place.norm for name, place in places.items() if place.norm is not None}
    kinds = {(norm.kind, norm.eps, norm.offset) for norm in norms.values()}
    if len(kinds) > 1:
        raise NotRecognizedError("the norms of the layer are of different kinds")
    sources = block.recipe.sources | mlp.sources
    for name, norm in norms.items():
        sources = sources | norm.sources(name)
    shape = dataclasses.replace(
        block.recipe.shape,
        has_mlp=1,
        residual_flow=flow,
        residual_multiplier=multiplier,
        activation=mlp.activation,
        gated=int("gate_weight" in mlp.sources),
    )
    for kind, eps, offset in kinds:
        shape = dataclasses.replace(shape, norm_kind=kind, norm_eps=eps, norm_offset=offset)
    bare = {name for name, norm in norms.items() if norm.is_bare}
    if bare:
        needed = {"norm1"} if flow == ResidualFlow.PARALLEL_ONE_NORM else {"norm1", "norm2"}
        if bare != needed:
            raise NotRecognizedError("some of its norms have weights and others have none")
        shape = dataclasses.replace(shape, bare_norms=1)
    return LayerRecipe(sources, shape)


def find_mlp_block(call: Call, calls: Sequence[Call]) -> tuple[LayerRecipe, MLP]:
    """Finds out what an MLP that stands alone does.

    Args:
        call (`Call`):
            The observed call of a module.
        calls (`Sequence[Call]`):
            All observed calls of modules.

    Raises:
        NotRecognizedError: If it is not an MLP.
    """
    linears = [inner for inner in calls if inner.is_within(call) and is_plain_linear(inner.module)]
    mlp = find_mlp(linears, [call.module])
    if not same(mlp.input, call.input) or not same(mlp.output, call.tensor_output):
        raise NotRecognizedError("more than an MLP")
    shape = LayerShape(
        has_attention=0,
        norm_kind=NormKind.NONE,
        residual_flow=ResidualFlow.NONE,
        activation=mlp.activation,
        gated=int("gate_weight" in mlp.sources),
    )
    return LayerRecipe(mlp.sources, shape), mlp


def _holders(linears: Sequence[Call], layer: Call) -> list[torch.nn.Module]:
    """The modules in which the linears lie."""
    parents = [parent.module for call in linears for parent in call.parents[-1:]]
    return list({id(module): module for module in (*parents, layer.module)}.values())


def _before(states: torch.Tensor, inner: Sequence[Call]) -> _Placed:
    for call in first_with(inner, states, output_of):
        norm = find_norm(call.module, states.shape[-1])
        if norm is not None and call.input is not None:
            return _Placed(call.input, states, norm)
    return _Placed(states, states)


def _after(states: torch.Tensor, inner: Sequence[Call]) -> _Placed:
    for call in first_with(inner, states, input_of):
        norm = find_norm(call.module, states.shape[-1])
        if norm is not None and isinstance(call.output, torch.Tensor):
            return _Placed(states, call.output, norm)
    return _Placed(states, states)


def _flow(
    layer: Call,
    output: torch.Tensor,
    norm1: _Placed,
    attended: torch.Tensor,
    norm2: _Placed,
    added: torch.Tensor,
) -> tuple[ResidualFlow, float]:
    hidden = norm1.input.reshape(output.shape)
    attended, added, given = (t.reshape(output.shape) for t in (attended, added, norm2.input))
    multipliers = _multipliers(layer.module)
    if same(norm2.input, hidden) or same(norm2.output, norm1.output):
        multiplier = _best(multipliers, [(hidden, attended + added, output)])
        if multiplier is not None:
            is_shared = norm2.norm is None or norm2.norm.module is getattr(norm1.norm, "module", None)
            return (ResidualFlow.PARALLEL_ONE_NORM if is_shared else ResidualFlow.PARALLEL_TWO_NORMS), multiplier
    else:
        multiplier = _best(multipliers, [(hidden, attended, given), (given, added, output)])
        if multiplier is not None:
            return ResidualFlow.SEQUENTIAL, multiplier
    raise NotRecognizedError("attention and MLP are not added to the residual in a known way")


def _best(multipliers: list[float], sums: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> float | None:
    """The multiplier with which `base + part * multiplier` is nearest to the sum, if near; in bf16 1 is near 0.98."""

    def error(multiplier: float) -> float:
        return max(relative_error((base + part * multiplier) - base, total - base) for base, part, total in sums)

    best = min(multipliers, key=error)
    return best if error(best) <= tolerance(sums[0][0].dtype) else None


def _multipliers(module: torch.nn.Module) -> list[float]:
    return [1.0, *(v for name, v in vars(module).items() if type(v) is float and not name.startswith("_"))]
