"""Counts launches and bytes of what runs in Triton's interpreter; imported by programs only, see `interpreted.py`."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter as triton_interpreter

_NO_LAUNCH = ("empty", "new_empty", "set_")  # make tensors of memory
_PICKS_ROWS = ("embedding", "index", "index_select")  # read no more of their first tensor than they return


class Meter(TorchDispatchMode):
    """Counts what would be launched on a GPU, and the bytes that each launch reads and writes, every place once."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: collections.Counter[str] = collections.Counter()
        self.num_bytes = 0
        self._places: list[np.ndarray] | None = None

    def __enter__(self) -> Meter:
        executor, builder = triton_interpreter.GridExecutor, triton_interpreter.InterpreterBuilder
        self._originals = executor.__call__, builder.create_masked_load, builder.create_masked_store
        launch, load, store = self._originals
        meter = self

        def counted_launch(self: Any, *args: Any, **kwargs: Any) -> None:
            meter._places = []
            launch(self, *args, **kwargs)
            meter.num_bytes += len(np.unique(np.concatenate(meter._places or [np.empty(0)])))
            meter.launches[self.fn.__name__] += 1
            meter._places = None

        def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            meter._touch(ptrs, mask)
            return load(self, ptrs, mask, *rest)

        def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            meter._touch(ptrs, mask)
            return store(self, ptrs, value, mask, *rest)

        executor.__call__, builder.create_masked_load, builder.create_masked_store = (
            counted_launch,
            counted_load,
            counted_store,
        )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        executor, builder = triton_interpreter.GridExecutor, triton_interpreter.InterpreterBuilder
        executor.__call__, builder.create_masked_load, builder.create_masked_store = self._originals

    def _touch(self, ptrs: Any, mask: Any) -> None:
        assert self._places is not None, "memory is touched in launches"
        element = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        places, inside = np.broadcast_arrays(np.atleast_1d(ptrs.data), np.atleast_1d(mask.data))
        self._places.append((places[inside].astype(np.int64)[:, None] + np.arange(element)).ravel())

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if self._places is None and not name.startswith(_NO_LAUNCH):
            given = _tensors(args)
            made = [tensor for tensor in _tensors([result]) if tensor.numel()]
            memory = {tensor.untyped_storage().data_ptr() for tensor in given}
            is_view = all(tensor.untyped_storage().data_ptr() in memory for tensor in made)
            if function._schema.is_mutable or not (is_view and made):
                self.launches[name] += 1
                read = made + given[1:] if name in _PICKS_ROWS else given
                self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *made))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, also those in lists."""
    flat = [part for value in values for part in (value if isinstance(value, (tuple, list)) else [value])]
    return [value for value in flat if isinstance(value, torch.Tensor)]
