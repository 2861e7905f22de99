"""Notices, before each step, that a module that is computed natively is not what it was when it was recognised."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..modeling.native_step import has_own_forward
from ..modeling.patterns.plain import any_global_hook, obstacle
from .native_units import Unit
from .seen_tensors import SeenTensors

_dtype = operator.attrgetter("dtype")
_is_contiguous = operator.methodcaller("is_contiguous")
_NUMBERS = (int, float, bool)
_PLAIN = (*_NUMBERS, type(None))
_CONTAINERS = (list, tuple, set, dict)
_NO_SETTINGS = frozenset({"training", "forward", *vars(torch.nn.Module())})


def _is_setting(name: str, value: Any) -> bool:
    """Numbers, strings, functions such as an activation."""
    if name in _NO_SETTINGS:
        return False
    return type(value) in (*_NUMBERS, str) or (callable(value) and not name.startswith("_"))


def _is_collection(name: str, value: Any) -> bool:
    """Lists and the like of plain values, such as the names of merged adapters, which are changed in place."""
    if name in _NO_SETTINGS or type(value) not in _CONTAINERS:
        return False
    items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return all(type(item) in (*_PLAIN, str) for item in items)


class StructureWatch:
    """What a model consists of at one moment: its modules, their classes and forwards, plain values and functions.

    Whatever was recognised was recognised in this; if it changes, the model is to be inspected again.

    Args:
        model (`PreTrainedModel`):
            The model.
    """

    def __init__(self, model: Any):
        modules = [module for module in model.modules() if module is not model]
        config = model.config.get_text_config(decoder=True) if hasattr(model, "config") else None
        self._edges = [(m._modules, name) for m in (model, *modules) for name in m._modules]
        self._settings = [
            (vars(m), name)
            for m in modules
            if type(m) is not torch.nn.Linear
            for name, value in vars(m).items()
            if _is_setting(name, value)
        ]
        if config is not None:
            self._settings += [(vars(config), name) for name, value in vars(config).items() if type(value) in _PLAIN]
        self._collections = [
            (vars(m), name) for m in modules for name, value in vars(m).items() if _is_collection(name, value)
        ]
        self._modules = modules
        self._classes: list[Any] = list({id(cls): cls for cls in map(type, modules)}.values())
        self._seen = self._look()
        self._seen_collections = [type(collection)(collection) for collection in self._look_at_collections()]

    def _look(self) -> list | None:
        try:
            children = [id(modules[name]) for modules, name in self._edges]
            settings = [values[name] for values, name in self._settings]
        except KeyError:
            return None
        forwards = [cls.forward for cls in self._classes]
        return [children, settings, forwards, list(map(type, self._modules))]

    def _look_at_collections(self) -> list[Any]:
        return [values.get(name) for values, name in self._collections]

    def is_same(self) -> bool:
        """Returns whether nothing has changed."""
        try:
            return self._look() == self._seen and self._look_at_collections() == self._seen_collections
        except (RuntimeError, ValueError):  # there are tensors in them now
            return False


class TensorWatch:
    """The weights of recognised modules, which may be others at each step, but of one form each.

    Operators read a weight's memory anew at each call, and check its shape; views of a part of a weight are kept, and
    are worthless once it lies elsewhere. What no operator is given (a buffer, an adapter that is merged) must stay what
    it was when the modules were proved without it.

    Args:
        units (`Sequence[Unit]`):
            The modules.
    """

    def __init__(self, units: Sequence[Unit]):
        sources = [source for unit in units if unit.recipe is not None for source in unit.recipe.sources.values()]
        small = [unit.module._parameters for unit in units if unit.recipe is None]
        self._places = [(source.parameters, source.name) for source in sources]
        self._places += [
            (parameters, name) for parameters in small for name in parameters if parameters[name] is not None
        ]
        self._viewed = list({(id(s.parameters), s.name): (s.parameters, s.name) for s in sources if s.view}.values())
        inner = {id(module): module for unit in units for module in unit.module.modules()}.values()
        read = {(id(parameters), name) for parameters, name in self._places}
        self._unread: list[tuple[dict[str, Any], str]] = [
            (tensors, name)
            for m in inner
            for tensors in (m._parameters, m._buffers)
            for name in tensors
            if tensors[name] is not None and (id(tensors), name) not in read
        ]
        self._seen_unread = SeenTensors([tensors[name] for tensors, name in self._unread])
        self._absent = [(m._parameters, name) for m in inner for name, p in m._parameters.items() if p is None]
        self.number = 0  # of the weights so far: another object, or other memory under a view, is another weight
        self._ids: list[int] | None = None
        self._addresses: list[int] = []
        self._forms = self._look()

    def _look(self) -> list:
        """Notes which tensors there are; returns their classes and dtypes."""
        tensors = [parameters[name] for parameters, name in self._places]
        ids, addresses = list(map(id, tensors)), [parameters[name].data_ptr() for parameters, name in self._viewed]
        if ids != self._ids or addresses != self._addresses:
            self._ids, self._addresses = ids, addresses
            self.number += 1
            self._classes = list(map(type, tensors))
            self._shapes = [tensor.shape for tensor in tensors]
        return [self._classes, self._shapes, list(map(_dtype, tensors)), list(map(_is_contiguous, tensors))]

    def are_alike(self) -> bool:
        """Returns whether the weights still have their classes, shapes, dtypes and layouts, and others their values."""
        try:
            if self._look() != self._forms or [1 for ps, name in self._absent if ps[name] is not None]:
                return False
            return not self._unread or self._seen_unread.are_still([tensors[name] for tensors, name in self._unread])
        except (KeyError, AttributeError, RuntimeError):  # one is gone, is None now, or has no memory
            return False


class ObstacleWatch:
    """Which modules may not be read instead of called now: hooks, a forward of their own, training.

    Args:
        model (`torch.nn.Module`):
            The model.
    """

    def __init__(self, model: torch.nn.Module):
        self._modules = [module for module in model.modules() if module is not model]
        self._dicts = [module.__dict__ for module in self._modules]
        self._num_handles = -1
        self._blocked: frozenset[int] = frozenset()

    def blocked(self) -> frozenset[int]:
        """Returns the ids of the modules that may not be read; quick if there is none, and no hook is new."""
        num_handles = RemovableHandle.next_id
        is_quiet = num_handles == self._num_handles and not self._blocked
        if is_quiet and not [values for values in self._dicts if values["training"] or "forward" in values]:
            return self._blocked
        self._num_handles = num_handles
        if any_global_hook():
            self._blocked = frozenset(map(id, self._modules))
        else:
            self._blocked = frozenset(id(m) for m in self._modules if m.training or obstacle(m) is not None)
        return self._blocked


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether a module's forward was compiled, or is not that of its class.

    Args:
        module (`torch.nn.Module`):
            Any module.
    """
    return has_own_forward(module) or getattr(module, "_compiled_call_impl", None) is not None


def holders_of(read: Iterable[torch.nn.Module], model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules whose forwards call some others, without the model, which nothing here keeps alive.

    Args:
        read (`Iterable[torch.nn.Module]`):
            Modules, with all in them, that are read instead of called.
        model (`torch.nn.Module`):
            The model that they are in.
    """
    roots = {id(module): module for module in read}
    inside = {id(module) for root in roots.values() for module in root.modules()}
    outside = [module for module in model.modules() if module is not model and id(module) not in inside]
    return [module for module in outside if not roots.keys().isdisjoint(map(id, module.modules()))]
