"""A stand-in for CUDA graphs on a CPU: records every operator of a call, and runs them again on the same memory.

Python is not run again, so whatever depends on it shows as a wrong result, as it would on a GPU:

    operator                            at a replay
    makes a tensor                      is run again, and its result goes where that tensor lies
    writes into one                     is run again
    only looks at one (a view), empty   is not run: there is nothing to do on a GPU either
    kernel of Triton (interpreted)      is run again with the same arguments

All graphs of a maker share the memory of what they compute in between; before each replay it is spoilt, so that whoever
reads what an earlier replay left there reads NaN.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.generation.graphs.capture import NothingFromHost

Action = Callable[[], None]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def storage_of(tensor: torch.Tensor) -> int:
    """What tells whether tensors share memory."""
    return tensor.untyped_storage()._cdata


class Recorder(TorchDispatchMode):
    """Records operators while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Action] = []
        self.made: list[torch.Tensor] = []
        self.names: list[str] = []
        self._is_in_launch = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not self._is_in_launch:
            self._record(function, args, kwargs, result)
        return result

    def _record(self, function: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        given = {storage_of(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        new = [tensor for tensor in tensors_in(result) if storage_of(tensor) not in given]
        self.made += new
        name = function.overloadpacket.__name__
        if name.startswith(("empty", "new_empty")) or not (new or function._schema.is_mutable):
            return

        def run_again() -> None:
            again = tensors_in(function(*args, **kwargs))
            for target, source in zip(tensors_in(result), again, strict=True):
                if any(target is tensor for tensor in new):
                    target.copy_(source)

        self.names.append(name)
        self.actions.append(run_again)

    def launch(self, run: Action, name: str) -> None:
        """Takes a kernel's launch as one operator."""
        self._is_in_launch = True
        try:
            run()
        finally:
            self._is_in_launch = False
        self.names.append(name)
        self.actions.append(run)


@contextlib.contextmanager
def triton_launches_in(recorder: Recorder) -> Iterator[None]:
    """Launches of Triton's interpreter, if it is there, are recorded."""
    if "triton" not in sys.modules:
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        recorder.launch(lambda: launch(self, *args, **kwargs), self.fn.__name__)

    GridExecutor.__call__ = recorded
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


def spoil(tensor: torch.Tensor) -> None:
    """Fills a tensor with what nobody should have read."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(-77)


class RecordedGraphs:
    """What `CudaGraphs` is on a GPU; keeps what it was asked to do.

    Args:
        num_bytes (`int`, defaults to 0):
            What each graph takes of the device's memory, beyond what the first takes.
        first_bytes (`int`, defaults to 0):
            What the first takes more.
        error (`Exception`, *optional*):
            What a capture raises.
    """

    def __init__(self, num_bytes: int = 0, first_bytes: int = 0, error: Exception | None = None):
        self.num_captures = 0
        self.is_closed = False
        self.graphs: list[Recorder] = []
        self._num_bytes = num_bytes
        self._first_bytes = first_bytes
        self._error = error
        self._free = 1 << 40

    def warm_up(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        with NothingFromHost("cpu"):
            return call()

    def capture(self, call: Callable[[], object]) -> Callable[[], None]:
        if self._error is not None:
            raise self._error
        recorder = Recorder()
        with triton_launches_in(recorder), recorder, NothingFromHost("cpu"):
            call()
        self.graphs.append(recorder)
        self._free -= self._num_bytes + (0 if self.num_captures else self._first_bytes)
        self.num_captures += 1

        def replay() -> None:
            with torch.inference_mode():
                for graph in self.graphs:
                    for tensor in graph.made:
                        spoil(tensor)
                for action in recorder.actions:
                    action()

        return replay

    def free_bytes(self) -> int:
        return self._free

    def close(self) -> None:
        self.is_closed = True
