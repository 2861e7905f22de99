"""The parts of a model that are compiled, beside those that are computed natively.

at load            watch a step: which modules do not attend
before each step   the same modules?  hooks, own forwards, training?  what is native?   ->  the largest that are left
in a step          their forwards are `CompiledForward`s; each is compiled when it is first called
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from ...cache.step_cache import StepCache
from ...configuration import PagedConfig
from ...kernels.base import PagedAttentionBackend
from ...modeling.layer_groups import LayerGroup
from ...modeling.native_step import Substitute, substituted
from ..native_layers import BoundLayers, NativeLayers
from ..native_units import Unit
from ..native_watch import ObstacleWatch, StructureWatch, holders_of, is_compiled
from ..plan import EnginePlan
from ..probe import evaluating
from ..watched_step import WatchedStep
from .candidates import Candidate, find_candidates, largest
from .compiled_forward import CompiledForward, inductor, kind_of

Part = tuple[torch.nn.Module, CompiledForward]


class CompiledParts:
    """What is compiled of one model, and what is computed natively.

    Args:
        model (`PreTrainedModel`):
            The model. Its layers are kept alive until `clear`, it is not.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        backend (`PagedAttentionBackend`):
            The attention backend.
        plan (`EnginePlan`):
            What was decided for the engine.
        native (`NativeLayers`, *optional*):
            What is computed natively, which is not compiled.
        note (`Callable[[str], None]`):
            Is told what cannot be compiled, and why.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: tuple[LayerGroup, ...],
        backend: PagedAttentionBackend,
        plan: EnginePlan,
        native: NativeLayers | None,
        note: Callable[[str], None],
    ):
        self._model = weakref.ref(model)
        self._arguments = groups, backend, plan.block_size, plan.max_model_len
        self._native = native
        self._note = note
        self.forwards: dict[Hashable, CompiledForward] = {}
        self._found: _Found | None = self._look(model)

    def describe(self) -> str:
        """Returns what is compiled in a step that begins now, in a few words."""
        counts = collections.Counter(forward.name for _, forward in self.current_parts())
        return ", ".join(f"{count} {name}" for name, count in counts.items()) or "off: nothing is left to compile"

    def bind(self, cache: StepCache) -> BoundParts:
        """Returns what a runner needs to run its steps so.

        Args:
            cache (`StepCache`):
                The view of its steps.
        """
        return BoundParts(self, None if self._native is None else self._native.bind(cache))

    def clear(self) -> None:
        """Lets go of the model's layers, and of what was compiled."""
        self._found = None
        self.forwards.clear()

    def current_parts(self) -> tuple[Part, ...]:
        """Returns the modules that are compiled in a step that begins now; the same object if they are the same."""
        found = self.look_again()
        if found is None:
            return ()
        return found.parts(() if self._native is None else self._native.current_units(), self._forward_of)

    def look_again(self) -> _Found | None:
        """Returns what was found in the model as it is, the same object if it has not changed; `None` for nothing."""
        model, found = self._model(), self._found
        if model is None or found is None or model.training or any(map(is_compiled, (model, *found.holders))):
            return None
        if not found.structure.is_same():
            found = self._found = self._look(model)
        return found

    def _forward_of(self, module: torch.nn.Module) -> CompiledForward:
        kind = kind_of(module)
        if kind not in self.forwards:
            self.forwards[kind] = CompiledForward(type(module).__name__, inductor, self._note)
        return self.forwards[kind]

    def _look(self, model: torch.nn.Module) -> _Found:
        structure, obstacles = StructureWatch(model), ObstacleWatch(model)  # changes meanwhile are seen later
        candidates: tuple[Candidate, ...] = ()
        try:
            with evaluating(model), torch.inference_mode():
                candidates = find_candidates(WatchedStep(model, *self._arguments))
        except Exception as error:
            self._note(f"compile_parts has no effect: {type(error).__name__}: {error}")
        return _Found(model, candidates, structure, obstacles)


class _Found:
    """What may be compiled of a model, and what that depends on.

    Args:
        model (`torch.nn.Module`):
            The model.
        candidates (`tuple[Candidate, ...]`):
            Which modules may be compiled.
        structure (`StructureWatch`):
            What the model consisted of.
        obstacles (`ObstacleWatch`):
            Notices hooks and the like.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        candidates: tuple[Candidate, ...],
        structure: StructureWatch,
        obstacles: ObstacleWatch,
    ):
        self.structure = structure
        self.holders = holders_of((candidate.module for candidate in candidates), model)
        self._candidates = candidates
        self._obstacles = obstacles
        self._units: Sequence[Unit] = ()
        self._blocked: frozenset[int] | None = None
        self._num_handles = 0
        self._parts: tuple[Part, ...] = ()

    def parts(
        self, units: Sequence[Unit], forward_of: Callable[[torch.nn.Module], CompiledForward]
    ) -> tuple[Part, ...]:
        """Returns the largest modules that may be compiled now, which are neither native nor anybody else's.

        Args:
            units (`Sequence[Unit]`):
                What is computed natively.
            forward_of (`Callable[[torch.nn.Module], CompiledForward]`):
                Returns the compiled forward of a module.
        """
        blocked, num_handles = self._obstacles.blocked(), RemovableHandle.next_id
        is_known = units is self._units and blocked == self._blocked and num_handles == self._num_handles
        if is_known and not any(forward.is_off for _, forward in self._parts):
            return self._parts
        taken = blocked.union(id(module) for unit in units for module in unit.module.modules())

        def may_be(candidate: Candidate) -> bool:
            if not taken.isdisjoint(candidate.read) or _has_hooks_inside(candidate.module):
                return False
            return not forward_of(candidate.module).is_off

        self._units, self._blocked, self._num_handles = units, blocked, num_handles
        parts = tuple((module, forward_of(module)) for module in largest(self._candidates, may_be))
        if parts != self._parts:
            self._parts = parts
        return self._parts


def _has_hooks_inside(module: torch.nn.Module) -> bool:
    """Whether Dynamo would meet hooks, be they only Transformers' own, which do nothing in the steps of parts."""
    return any(inner._forward_hooks or inner._forward_pre_hooks for inner in module.modules() if inner is not module)


class BoundParts:
    """What one runner runs compiled or natively.

    Args:
        parts (`CompiledParts`):
            What is compiled of its model.
        native (`BoundLayers`, *optional*):
            What is computed natively.
    """

    def __init__(self, parts: CompiledParts, native: BoundLayers | None):
        self._parts = parts
        self._native = native
        self._placed: tuple[Part, ...] = ()
        self._substitutes: list[Substitute] = []

    def state(self) -> tuple[object, ...]:
        """Returns what a step that begins now is computed with: equal to that of a step before if it is the same.

        Whether a part can be compiled makes no difference to what it computes.
        """
        native = () if self._native is None else self._native.state()
        return (*native, self._parts.look_again())

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Returns a context in which the model's calls by this thread are run so."""
        parts = self._parts.current_parts()
        if parts is not self._placed:
            self._placed, self._substitutes = parts, [Substitute(*part) for part in parts]
        native = contextlib.nullcontext() if self._native is None else self._native.step()
        with native, substituted(self._substitutes), _numbers_as_constants() if parts else contextlib.nullcontext():
            yield


def _numbers_as_constants() -> contextlib.AbstractContextManager[None]:
    """Dynamo makes no inputs of settings such as a norm's epsilon, which every call would have to hand over."""
    return torch._dynamo.config.patch(specialize_float=True)


def compiled_parts(
    model: torch.nn.Module,
    groups: tuple[LayerGroup, ...],
    backend: PagedAttentionBackend,
    plan: EnginePlan,
    config: PagedConfig,
    native: NativeLayers | None,
    note: Callable[[str], None],
) -> CompiledParts | None:
    """Returns what of a model is compiled, or `None` if nothing is to be.

    Args:
        model (`PreTrainedModel`):
            The model.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        backend (`PagedAttentionBackend`):
            The attention backend.
        plan (`EnginePlan`):
            What was decided for the engine.
        config (`PagedConfig`):
            What the user asked for.
        native (`NativeLayers`, *optional*):
            What is computed natively.
        note (`Callable[[str], None]`):
            Is told what cannot be compiled, and why.
    """
    if not config.compile_parts or plan.batch_invariant:
        return None
    return CompiledParts(model, groups, backend, plan, native, note)
