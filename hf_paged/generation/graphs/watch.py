"""Notices, before a captured step is replayed, that the model would compute something else now, or elsewhere."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from ...modeling.patterns.plain import obstacle
from ..native_watch import ObstacleWatch, StructureWatch

if TYPE_CHECKING:
    from ..native_layers import BoundLayers

_dtype = operator.attrgetter("dtype")


class GraphWatch:
    """What a model consists of at one moment, for graphs that read its weights where they lie.

    Writes to weights are no change: a replay reads them. Weights that lie elsewhere are one, and so are other modules,
    settings, adapters, and another choice of layers that are computed natively.

    Args:
        model (`PreTrainedModel`):
            The model. Its modules are kept alive, it is not.
        native (`BoundLayers`, *optional*):
            What of it is computed natively.
    """

    def __init__(self, model: Any, native: BoundLayers | None):
        self._native = native
        self._state = native.state() if native is not None else None
        self._structure = StructureWatch(model) if native is None else None  # native layers have one of their own
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
        if self._native is not None:
            if self._native.state() != self._state:
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
