"""Recognises a model's layers by watching one step, and proves each of them against what that step computed.

    two short steps over blocks of their own, the second of them watched
        -> calls of modules and of attention    -> patterns    -> recipes
        -> each recipe run on the watched input, over the same blocks    -> same output, or it stays off

Positions in the watched step reach from the first to the last that the model knows, since a factor that depends on the
position would be 1 at the front.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..kernels.base import PagedAttentionBackend
from ..modeling.layer_groups import LayerGroup
from ..modeling.patterns import reference
from ..modeling.patterns.attention import AttentionBlock, find_angles, find_attention
from ..modeling.patterns.decoder_layer import find_decoder_layer, find_mlp_block
from ..modeling.patterns.norm import could_be_norm, find_norm
from ..modeling.patterns.observation import (
    AttentionCall,
    Call,
    close,
    first_tensor,
    relative_error,
    returning,
    tolerance,
)
from ..modeling.patterns.plain import (
    NotProvedError,
    NotRecognizedError,
    check_one_device,
    check_plain,
    is_plain_linear,
)
from ..modeling.patterns.recipe import LayerRecipe, TensorSource
from .native_calls import NativeCalls
from .native_operators import DecoderLayers, Operators
from .native_units import Argument, Inspection, Unit, run_small
from .watched_step import WatchedStep

logger = logging.getLogger(__name__)

_AMPLIFICATION = 64.0
_LARGE_RESIDUAL = 1e4  # float16 holds six times as much
_NO_SETTINGS = frozenset({"layer_idx", *vars(torch.nn.Module())})
_TOLERANCE_OF_ALL = {torch.float32: 1e-3}  # of the logits, as at load: a router may choose another expert
_TOLERANCE_OF_ALL_HALF = 0.2


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """A decoder layer as it was watched: its call, that of attention in it, and those of its modules."""

    call: Call
    attention: AttentionCall
    inner: list[Call]


@torch.inference_mode()
def inspect(
    model: torch.nn.Module,
    groups: tuple[LayerGroup, ...],
    backend: PagedAttentionBackend,
    block_size: int,
    max_position: int,
    operators: Operators,
) -> Inspection:
    """Recognises the layers of a model and proves them.

    Args:
        model (`PreTrainedModel`):
            The model, in evaluation mode.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        backend (`PagedAttentionBackend`):
            The attention backend.
        block_size (`int`):
            Tokens per block.
        max_position (`int`):
            The number of positions that the model is used at.
        operators (`Operators`):
            What proved layers will be run on.
    """
    return _Inspector(WatchedStep(model, groups, backend, block_size, max_position), operators).inspect()


class _Inspector:
    """One inspection."""

    def __init__(self, watched: WatchedStep, operators: Operators):
        self._watched = watched
        self._operators = operators
        self._reasons: collections.Counter[str] = collections.Counter()
        self._counts: collections.Counter[int] = collections.Counter()  # calls of each module
        self._worst: dict[str, float] = {}  # relative errors, by reason
        self._faithful: dict[tuple, bool] = {}

    def inspect(self) -> Inspection:
        model, watched = self._watched.model, self._watched
        watched.run(module for module in model.modules() if module is not model)
        calls, layers = watched.observer.calls, []
        for attention in watched.observer.attentions:
            outer = _decoder_layer(attention, model)
            layers.append(_Layer(outer, attention, [call for call in calls if call.is_within(outer) or call is outer]))
        self._counts = collections.Counter(id(call.module) for call in calls)
        units: list[Unit] = []
        for layer in layers:
            units += self._units_of(layer)
        units += self._heads(layers)
        units = _chained(units, watched.observer.calls)
        error = self._error_of_all(units)
        if error > _TOLERANCE_OF_ALL.get(watched.logits.dtype, _TOLERANCE_OF_ALL_HALF):
            self._reasons[f"the layers together are off by {error:.2g}"] += 1
            units = []
        return Inspection(tuple(units), len(layers), self._all_reasons())

    def _all_reasons(self) -> dict[str, int]:
        return {
            f"{reason}, by {self._worst[reason]:.2g}" if reason in self._worst else reason: count
            for reason, count in self._reasons.most_common()
        }

    def _error_of_all(self, units: list[Unit]) -> float:
        """The relative error of the logits of the watched step, run again with everything native."""
        watched = self._watched
        calls = NativeCalls(units, self._operators, watched.runner.cache)
        with calls.step(0):
            logits = watched.runner.call(watched.inputs)
        return relative_error(logits, watched.logits)

    # ------------------------------------------------------------------ what a layer is

    def _units_of(self, layer: _Layer) -> list[Unit]:
        """The layer, or what of it is recognised."""
        block, units = None, []
        try:
            block = self._attention(layer)
            check_plain(layer.call.module.modules())
            recipe = find_decoder_layer(layer.call, block, layer.inner)
            _check_all_is_read(layer.call, recipe, layer.inner)
            self._amplify_mlps(layer, block)
            angles = block.angles or find_angles(layer.call)
            unit = self._unit("layer", layer.call, recipe, layer.attention, angles)
            self._amplify_layer(layer, recipe, angles)
            self._prove(unit, layer.call, layer.attention, angles)
            return [unit]
        except NotRecognizedError as error:
            self._refuse("layer", layer.call.module, error)
        if block is not None:
            try:
                unit = self._unit("attention", block.call, block.recipe, layer.attention, block.angles)
                self._prove(unit, block.call, layer.attention, block.angles)
                units.append(unit)
            except NotRecognizedError as error:
                self._refuse("attention block", block.call.module, error)
        taken = [unit.module for unit in units]
        for call in layer.inner:
            if call is not layer.call and not any(parent.module in taken for parent in call.parents):
                found = None if call.module in taken else self._small_unit(call, layer.inner)
                if found is not None:
                    units.append(found)
                    taken.append(found.module)
        return units

    def _attention(self, layer: _Layer) -> AttentionBlock:
        block = find_attention(layer.attention, layer.inner)
        check_plain(block.call.module.modules())
        if block.call.input is None or block.call.input.shape != block.input.shape:
            raise NotRecognizedError("the attention block changes its input before its linears")
        _check_all_is_read(block.call, block.recipe, layer.inner)
        self._amplify_attention(block)
        return block

    def _small_unit(self, call: Call, calls: Sequence[Call] = ()) -> Unit | None:
        """An MLP, a norm or a linear that stands alone."""
        try:
            if could_be_norm(call.module):
                return self._norm(call)
            if is_plain_linear(call.module):
                return self._linear(call)
            check_plain(call.module.modules())
            recipe, _ = find_mlp_block(call, calls)
            _check_all_is_read(call, recipe, calls)
            self._amplify_mlp(call, calls)
            unit = self._unit("mlp", call, recipe)
            self._prove(unit, call)
            return unit
        except NotRecognizedError:
            return None

    def _norm(self, call: Call) -> Unit | None:
        norm = None if call.input is None else find_norm(call.module, call.input.shape[-1])
        if norm is None or self._operators.norm is None or call.input is None:
            return None
        check_plain([call.module])
        unit = dataclasses.replace(self._unit("norm", call), norm=norm)
        with _as_obstacle():
            result = run_small(unit, self._operators, call.input)
        self._check(result, call.output)
        return unit

    def _linear(self, call: Call) -> Unit | None:
        if self._operators.linear is None or call.input is None:
            return None
        check_plain([call.module])
        unit = self._unit("linear", call)
        with _as_obstacle():
            result = run_small(unit, self._operators, call.input)
        self._check(result, call.output)
        return unit

    def _heads(self, layers: list[_Layer]) -> list[Unit]:
        """Linears and norms outside of the layers."""
        within = {id(layer.call.module) for layer in layers}
        units = []
        for call in self._watched.observer.calls:
            is_inside = any(id(outer.module) in within for outer in (call, *call.parents))
            is_leaf = could_be_norm(call.module) or is_plain_linear(call.module)
            unit = self._small_unit(call) if is_leaf and not is_inside else None
            if unit is not None:
                units.append(unit)
        return units

    def _unit(
        self,
        kind: str,
        call: Call,
        recipe: LayerRecipe | None = None,
        attention: AttentionCall | None = None,
        angles: tuple | None = None,
    ) -> Unit:
        hidden = _argument(call, lambda value: value is call.input)
        if hidden is None or call.input is None or first_tensor(call.output) is None:
            raise NotRecognizedError("its input or output is not one tensor")
        weights = call.module.parameters() if recipe is None else map(TensorSource.fetch, recipe.sources.values())
        check_one_device(weights, call.input.device)
        places: dict[str, Any] = {}
        if attention is not None:
            places["layer_idx"] = attention.layer_idx
            places["cache"] = _argument(call, lambda value: value is self._watched.runner.cache)
            if places["cache"] is None:
                raise NotRecognizedError("it is not given the cache")
        if angles is not None:
            places["angles"] = _argument(call, lambda value: _is_pair(value, angles))
            if places["angles"] is None:
                raise NotRecognizedError("it is not given the rotary angles that its attention block is given")
        if self._counts[id(call.module)] != 1:
            raise NotRecognizedError("it is called more than once")
        return Unit(kind, call.module, returning(call.output), hidden, recipe, **places)

    # ------------------------------------------------------------------ proofs

    def _prove(
        self, unit: Unit, call: Call, attention: AttentionCall | None = None, angles: tuple | None = None
    ) -> None:
        """Runs a unit on what its module was given, and compares with what that returned."""
        assert unit.recipe is not None, "only layers and their parts have this proof"
        hidden, expected = call.input, first_tensor(call.output)
        assert hidden is not None and expected is not None, "a unit has an input and an output"
        with _as_obstacle():
            result = self._computed(unit.recipe, hidden, attention, angles, self._operators.decoder_layers)
        self._check(result.view(expected.shape), expected, hidden if unit.kind == "layer" else None)

    def _computed(
        self,
        recipe: LayerRecipe,
        hidden: torch.Tensor,
        attention: AttentionCall | None,
        angles: tuple | None,
        decoder_layers: DecoderLayers,
    ) -> torch.Tensor:
        """What a recipe makes of some input, over the blocks of the watched step; its K/V are written there."""
        cos = sin = metadata = None
        caches: tuple = ()
        if attention is not None:
            layer = next(
                step for step in self._watched.runner.cache.layers if step.spec.layer_idx == attention.layer_idx
            )
            caches = layer.spec.key_cache, layer.spec.value_cache
            metadata = self._watched.inputs.metadata[layer.spec.group_idx]
        if angles is not None:
            cos, sin = angles[0][0], angles[1][0]
        flat = hidden.reshape(-1, hidden.shape[-1])
        return decoder_layers(flat, [recipe.arguments(*caches)], cos, sin, metadata)

    def _check(self, result: torch.Tensor, expected: torch.Tensor, base: torch.Tensor | None = None) -> None:
        error = relative_error(result, expected, base)
        if not error <= tolerance(expected.dtype):
            raise NotProvedError(error, tolerance(expected.dtype))

    def _amplify_layer(self, layer: _Layer, recipe: LayerRecipe, angles: tuple | None) -> None:
        """Clamps of the residual bite on large numbers only."""
        if not self._is_faithful(layer.call.module, lambda: self._amplified_layer_fits(layer, recipe, angles)):
            raise NotRecognizedError("it treats large inputs in another way than small ones")

    def _amplified_layer_fits(self, layer: _Layer, recipe: LayerRecipe, angles: tuple | None) -> bool:
        hidden = layer.call.input
        assert hidden is not None, "a layer has an input"
        factor = _LARGE_RESIDUAL / max(float(hidden.abs().max()), 1.0 / _LARGE_RESIDUAL)
        again = self._watched.amplified(layer.call, factor)
        if again is None:
            return False
        result = self._computed(recipe, hidden * factor, layer.attention, angles, reference.decoder_layers)
        return close(result, again[0]) or not bool(again[0].isfinite().all())

    def _amplify_attention(self, block: AttentionBlock) -> None:
        """Clamps of queries, keys and values bite on large numbers only."""
        if not self._is_faithful(block.call.module, lambda: self._amplified_attention_fits(block)):
            raise NotRecognizedError("it treats large inputs in another way than small ones")

    def _amplified_attention_fits(self, block: AttentionBlock) -> bool:
        again, recipe = self._watched.amplified(block.call, _AMPLIFICATION), block.recipe
        if again is None or again[1] is None:
            return False
        seen = again[1]
        flat = (block.input * _AMPLIFICATION).reshape(-1, block.input.shape[-1])
        cos, sin = (None, None) if block.angles is None else (table[0] for table in block.angles)
        query, key, value = reference.projections(flat, recipe.arguments(), cos, sin)
        query = query * (recipe.shape.scale / seen.request.scale)
        pairs = (query, seen.query), (key, seen.key), (value, seen.value)
        return all(close(states, arrived) or not bool(arrived.isfinite().all()) for states, arrived in pairs)

    def _amplify_mlps(self, layer: _Layer, block: AttentionBlock) -> None:
        for call in layer.inner:
            if call.parents[-1:] == (layer.call,) and call is not block.call:
                self._amplify_mlp(call, layer.inner)

    def _amplify_mlp(self, call: Call, calls: Sequence[Call]) -> None:
        try:
            part, mlp = find_mlp_block(call, calls)
        except NotRecognizedError:
            return  # a norm, a dropout
        if not self._is_faithful(call.module, lambda: self._amplified_mlp_fits(call, part, mlp.input)):
            raise NotRecognizedError("its MLP treats large inputs in another way than small ones")

    def _amplified_mlp_fits(self, call: Call, part: LayerRecipe, states: torch.Tensor) -> bool:
        again = self._watched.amplified(call, _AMPLIFICATION)
        flat = (states * _AMPLIFICATION).reshape(-1, states.shape[-1])
        result = reference.decoder_layers(flat, [part.arguments()], None, None, None)
        return again is not None and (close(result, again[0]) or not bool(again[0].isfinite().all()))

    def _is_faithful(self, module: torch.nn.Module, try_it: Callable[[], bool]) -> bool:
        """Tried once for all modules that consist of the same classes with the same settings, and have no buffers."""
        buffers = [id(buffer) for buffer in module.buffers() if buffer.is_floating_point()]
        key = (*buffers, *((type(part), *_settings_of(part)) for part in module.modules()))
        if key not in self._faithful:
            self._faithful[key] = try_it()
        return self._faithful[key]

    def _refuse(self, what: str, module: torch.nn.Module, error: NotRecognizedError) -> None:
        reason = f"{what} ({type(module).__name__}): {error}"
        self._reasons[reason] += 1
        if isinstance(error, NotProvedError):
            self._worst[reason] = max(error.error, self._worst.get(reason, 0.0))


def _check_all_is_read(call: Call, recipe: LayerRecipe, calls: Sequence[Call]) -> None:
    """A parameter that the recipe leaves out may be without effect only now, such as a factor that is 1."""
    read = {(id(source.parameters), source.name) for source in recipe.sources.values()}
    for inner in [call, *(inner for inner in calls if inner.is_within(call))]:
        parameters = inner.module._parameters
        for name, parameter in parameters.items():
            if parameter is not None and (id(parameters), name) not in read:
                raise NotRecognizedError(f"`{name}` of {type(inner.module).__name__} has no known part in it")


def _settings_of(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Plain values by what they are, and others, such as functions, by which object they are."""
    return [
        (name, value if type(value) in (int, float, bool, str, type(None)) else id(value))
        for name, value in vars(module).items()
        if name not in _NO_SETTINGS
    ]


@contextlib.contextmanager
def _as_obstacle() -> Iterator[None]:
    """What an operator refuses is not computed by it."""
    try:
        yield
    except RuntimeError as error:
        raise NotRecognizedError(f"the operator does not take it: {error}") from error


def _argument(call: Call, is_it: Callable[[Any], bool]) -> Argument | None:
    arguments = [*enumerate(call.args), *call.kwargs.items()]
    return next((Argument(place) for place, value in arguments if is_it(value)), None)  # type: ignore[arg-type]


def _is_pair(value: Any, pair: tuple) -> bool:
    return (
        isinstance(value, (tuple, list)) and len(value) == 2 and all(a is b for a, b in zip(value, pair, strict=True))
    )


def _decoder_layer(attention: AttentionCall, model: torch.nn.Module) -> Call:
    """The outermost call of an item of a list of modules that attention was called in; else the attention module's."""
    holders = [model, *(call.module for call in attention.parents)]
    items = {id(item) for holder in holders for item in _items_of_lists(holder)}
    return next((call for call in attention.parents if id(call.module) in items), attention.parents[-1])


def _items_of_lists(module: torch.nn.Module) -> list[torch.nn.Module]:
    lists = [child for child in module.children() if isinstance(child, torch.nn.ModuleList)]
    return [item for modules in lists for item in modules]


def _chained(units: list[Unit], calls: list[Call]) -> list[Unit]:
    """Marks the layers that are given what the layer before returned, with the same angles, if they have any."""
    found = {id(call.module): call for call in calls}
    order = {id(call.module): place for place, call in enumerate(calls)}
    chained: list[Unit] = []
    for unit in sorted(units, key=lambda unit: order[id(unit.module)]):
        before = chained[-1] if chained else None
        is_fed = before is not None and _is_fed_by(unit, found[id(unit.module)], before, found[id(before.module)])
        chained.append(dataclasses.replace(unit, follows=is_fed))
    return chained


def _is_fed_by(unit: Unit, call: Call, before: Unit, earlier: Call) -> bool:
    if not unit.kind == before.kind == "layer" or call.input is not first_tensor(earlier.output):
        return False
    pairs = (before, earlier), (unit, call)
    first, second = (None if u.angles is None else u.angles.of(c.args, c.kwargs) for u, c in pairs)
    return first is second or (first is not None and _is_pair(second, first))
