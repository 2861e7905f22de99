"""The layers of a model that are computed natively, inside of engine steps only, and never after they have changed.

at load            inspect: recognise, prove
before each step   the same modules, settings, dtypes?   else inspect again
                   hooks, own forwards, training?        those modules as they are
in a step          NativeCalls
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref

import torch

from ..cache.step_cache import StepCache
from ..kernels.base import PagedAttentionBackend
from ..modeling.layer_groups import LayerGroup
from ..modeling.packed_linear import inputs_not_rounded
from ..modeling.patterns.plain import DTYPES
from .native_calls import NativeCalls
from .native_inspection import inspect
from .native_operators import Operators, native_operators, triton_operators
from .native_units import Inspection, Unit
from .native_watch import ObstacleWatch, StructureWatch, TensorWatch, holders_of, is_compiled
from .native_weights import lay_weights_side_by_side
from .plan import EnginePlan
from .probe import evaluating, one_thread_if_small

logger = logging.getLogger(__name__)


class NativeLayers:
    """What is computed natively of one model.

    Args:
        model (`PreTrainedModel`):
            The model, in evaluation mode. Its layers are kept alive until `clear`, it is not.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        backend (`PagedAttentionBackend`):
            The attention backend.
        block_size (`int`):
            Tokens per block.
        max_position (`int`):
            The number of positions that the model is used at.
        operators (`Operators`):
            What recognised modules are run on.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: tuple[LayerGroup, ...],
        backend: PagedAttentionBackend,
        *,
        block_size: int,
        max_position: int,
        operators: Operators,
    ):
        self._model = weakref.ref(model)
        self._arguments = groups, backend, block_size, max_position, operators
        self.operators = operators
        self._found: _Found | None = self._look(model)

    @property
    def inspection(self) -> Inspection:
        """Returns what was found in the model at last."""
        return self._found.inspection if self._found is not None else Inspection((), 0, {})

    @property
    def weights_number(self) -> int:
        """Returns a number that changes when weights are replaced."""
        return self._found.tensors.number if self._found is not None else 0

    def bind(self, cache: StepCache) -> BoundLayers:
        """Returns what a runner needs to compute its steps natively.

        Args:
            cache (`StepCache`):
                The view of its steps.
        """
        model = self._model()
        if model is not None and self._found is not None:
            self._lay_out(model, self._found.inspection)  # again, if an engine slept and its weights were away
        return BoundLayers(self, cache)

    def state(self) -> tuple[object, ...]:
        """Returns what a step that begins now is computed with: equal to that of a step before if it is the same."""
        units = self.current_units()
        return self._found, units, self.weights_number

    def clear(self) -> None:
        """Lets go of the model's layers."""
        self._found = None

    def current_units(self) -> tuple[Unit, ...]:
        """Returns the modules that are computed natively in a step that begins now."""
        model, found = self._model(), self._found
        if model is None or found is None or model.training or any(map(is_compiled, (model, *found.holders))):
            return ()
        if not found.holds():
            found = self._found = self._look(model)
        return found.free_units()

    def _look(self, model: torch.nn.Module) -> _Found:
        structure, obstacles = StructureWatch(model), ObstacleWatch(model)  # changes meanwhile are seen later
        logger.info("Comparing native operators with the model's own layers ...")
        with evaluating(model), one_thread_if_small(model), inputs_not_rounded(model):
            blocked = obstacles.blocked()
            try:
                inspection = inspect(model, *self._arguments)
            except Exception as error:
                inspection = Inspection((), 0, {f"{type(error).__name__}: {error}": 1})
        self._lay_out(model, inspection)
        logger.info("Computed natively (%s): %s.", self.operators.name, inspection.describe())
        for reason, count in inspection.reasons.items():
            logger.info("Not computed natively: %d x %s.", count, reason)
        holders = holders_of((unit.module for unit in inspection.units), model)
        return _Found(inspection, structure, obstacles, TensorWatch(inspection.units), holders, blocked)

    def _lay_out(self, model: torch.nn.Module, inspection: Inspection) -> None:
        if self.operators.joins_linears:
            lay_weights_side_by_side(model, inspection.units)


class _Found:
    """What an inspection found, and what it depends on.

    Args:
        inspection (`Inspection`):
            What was found.
        structure (`StructureWatch`):
            What the model consisted of.
        obstacles (`ObstacleWatch`):
            Notices hooks and the like.
        tensors (`TensorWatch`):
            Notices weights that are replaced.
        holders (`list[torch.nn.Module]`):
            The modules whose forwards call the recognised ones.
        blocked_before (`frozenset[int]`):
            The ids of the modules that could not be recognised because of hooks and the like.
    """

    def __init__(
        self,
        inspection: Inspection,
        structure: StructureWatch,
        obstacles: ObstacleWatch,
        tensors: TensorWatch,
        holders: list[torch.nn.Module],
        blocked_before: frozenset[int],
    ):
        self.inspection = inspection
        self.tensors = tensors
        self.holders = holders
        self._structure = structure
        self._obstacles = obstacles
        self._blocked_before = blocked_before
        self._read = [frozenset(map(id, unit.module.modules())) for unit in inspection.units]  # instead of called
        self._blocked: frozenset[int] = frozenset()
        self._units = inspection.units

    def holds(self) -> bool:
        """Returns whether the model is what it was, and what stood in the way of recognising a module still does."""
        is_same = self._structure.is_same() and self.tensors.are_alike()
        return is_same and (not self._blocked_before or self._blocked_before <= self._obstacles.blocked())

    def free_units(self) -> tuple[Unit, ...]:
        """Returns the recognised modules without those that nobody may read now; the same object if they are the same.

        A run of layers that loses one becomes two.
        """
        blocked = self._obstacles.blocked()
        if blocked != self._blocked:
            units: list[Unit] = []
            is_before_free = False
            for unit, read in zip(self.inspection.units, self._read, strict=True):
                is_free = blocked.isdisjoint(read)
                if is_free:
                    units.append(unit if is_before_free else dataclasses.replace(unit, follows=False))
                is_before_free = is_free
            self._blocked, self._units = blocked, tuple(units)
        return self._units


class BoundLayers:
    """What one runner computes natively.

    Args:
        layers (`NativeLayers`):
            What is computed natively of its model.
        cache (`StepCache`):
            The view of its steps.
    """

    def __init__(self, layers: NativeLayers, cache: StepCache):
        self._layers = layers
        self._cache = cache
        self._units: tuple[Unit, ...] = ()
        self._calls: NativeCalls | None = None

    def state(self) -> tuple[object, ...]:
        """Returns what a step that begins now is computed with: equal to that of a step before if it is the same."""
        return self._layers.state()

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the model's calls by this thread are computed natively."""
        units = self._layers.current_units()
        if not units:
            return contextlib.nullcontext()
        if self._calls is None or units is not self._units:
            self._units, self._calls = units, NativeCalls(units, self._layers.operators, self._cache)
        return self._calls.step(self._layers.weights_number)


def native_layers(
    model: torch.nn.Module, groups: tuple[LayerGroup, ...], backend: PagedAttentionBackend, plan: EnginePlan
) -> NativeLayers | None:
    """Returns what of a model is computed natively, or `None` if nothing can be on its device or by its plan.

    Args:
        model (`PreTrainedModel`):
            The model.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        backend (`PagedAttentionBackend`):
            The attention backend.
        plan (`EnginePlan`):
            What was decided for the engine.
    """
    layers = [layer for group in groups for layer in group.layers]
    if plan.batch_invariant or any(layer.dtype not in DTYPES for layer in layers):
        return None
    device_types = {layer.device.type for layer in layers}
    if device_types == {"cuda"}:
        operators = triton_operators(backend)
    else:
        operators = native_operators() if device_types == {"cpu"} else None
    if operators is None:
        return None
    return NativeLayers(
        model, groups, backend, block_size=plan.block_size, max_position=plan.max_model_len, operators=operators
    )
