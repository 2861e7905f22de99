"""Notices, before a captured step is replayed, that the model would compute something else now, or elsewhere."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from ...modeling.patterns.plain import obstacle
from ..native_watch import ObstacleWatch, StructureWatch

if TYPE_CHECKING:
    from ..step_forwards import BoundForwards

_dtype = operator.attrgetter("dtype")


class GraphWatch:
    """What a model consists of at one moment, for graphs that read its weights where they lie.

    Writes to weights are no change: a replay reads them. Weights that lie elsewhere are one, and so are other modules,
    settings, adapters, and another choice of modules that are computed natively or compiled.

    Args:
        model (`PreTrainedModel`):
            The model. Its modules are kept alive, it is not.
        forwards (`BoundForwards`, *optional*):
            What its modules do in steps instead of their own forwards.
    """

    def __init__(self, model: Any, forwards: BoundForwards | None):
        self._forwards = forwards
        self._state = forwards.state() if forwards is not None else None
        self._structure = StructureWatch(model) if forwards is None else None  # else their state tells
        self._obstacles = ObstacleWatch(model)
        self._places = [
            (tensors, name)
            for module in model.modules()
            for tensors in (module._parameters, module._buffers, None if module is model else vars(module))
            if tensors is not None
            for name, value in tensors.items()
            if isinstance(value, torch.Tensor)
        ]
        self._seen = self._look()

    def _look(self) -> list | None:
        try:
            tensors = [tensors[name] for tensors, name in self._places]
            addresses = list(map(torch.Tensor.data_ptr, tensors))
            return [list(map(id, tensors)), addresses, list(map(_dtype, tensors))]
        except (KeyError, TypeError, AttributeError, RuntimeError):  # one is gone, is none now, or has no memory
            return None

    def is_same(self) -> bool:
        """Returns whether a step would run the same kernels on the same memory."""
        if self._forwards is not None:
            if self._forwards.state() != self._state:
                return False
        elif self._structure is not None and not self._structure.is_same():
            return False
        return self._seen is not None and self._look() == self._seen

    def is_open(self, model: Any) -> bool:
        """Returns whether nothing but the model itself has a say in what a call of it does: no hook, no training.

        Args:
            model (`PreTrainedModel`):
                The model.
        """
        return not (model.training or obstacle(model) is not None or self._obstacles.blocked())
