"""Capturing what a call launches, to launch all of it again at once.

    warm_up    the call runs; whatever it waits for, or reads on the host, is refused
    capture    the call runs without being computed; its launches become a graph
    replay     one launch, on the same memory; Python is not run again

A call that waits for the device is found out before it is captured: PyTorch does not survive every capture that fails
(pytorch/pytorch#171265, pytorch/pytorch#180395).
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...cache.memory import free_memory, give_back

_aten = torch.ops.aten
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index)
_MOVING = (_aten.copy_, _aten.to, *_INDEXING)  # whose tensors lie on one device, or move
# What torch does not tag: in inference mode composite operators come whole.
_READS_NUMBERS = (_aten.is_nonzero,)
_UNKNOWN_SHAPES = (_aten.argwhere, _aten.nonzero_numpy)
Replay = Callable[[], None]


class NotCapturableError(Exception):
    """A call does what a graph cannot; says what. Never leaves the package."""


def described(error: Exception) -> str:
    """Returns what went wrong in a call that was to be captured, and where in the model.

    Args:
        error (`Exception`):
            What it raised.
    """
    text = str(error).partition("\n")[0]  # CUDA's errors go on with advice
    text = text if isinstance(error, NotCapturableError) else f"{type(error).__name__}: {text}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    frames = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    return f"{text}, in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else text


class GraphMaker(Protocol):
    """Captures calls: `CudaGraphs`, or a stand-in of the tests."""

    def warm_up(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Runs a call as it will be captured; its kernels are compiled and loaded then.

        Args:
            call (`Callable[[], torch.Tensor]`):
                What will be captured.

        Returns:
            `torch.Tensor`: What it returned.

        Raises:
            NotCapturableError: If it waits for the device or copies from or to the host.
        """

    def capture(self, call: Callable[[], object]) -> Replay:
        """Captures a call.

        Args:
            call (`Callable[[], object]`):
                What is captured, after it was warmed up; it reads and writes memory that lives as long as its replays.

        Returns:
            `Replay`: Launches it again, in the order of the stream that is then the current one.

        Raises:
            NotCapturableError: If it waits for the device or copies from or to the host.
        """

    def free_bytes(self) -> int:
        """Returns the bytes that are free on the device, without those that torch keeps for later."""

    def close(self) -> None:
        """Waits until nothing is replayed any more, before graphs are let go of."""


class CudaGraphs(GraphMaker):
    """CUDA graphs that share the memory of what they compute in between.

    Args:
        device (`torch.device`):
            The GPU.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See `GraphMaker.warm_up`."""
        with self._on_own_stream(), NothingFromHost(self._device.type):
            return call()

    def capture(self, call: Callable[[], object]) -> Replay:
        """See `GraphMaker.capture`."""
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`, which gives all free memory back first and waits for the device, each time. Other
        # threads may go on with the device meanwhile.
        with self._on_own_stream(), _no_garbage_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with NothingFromHost(self._device.type):
                    call()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what went wrong first says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def free_bytes(self) -> int:
        """Returns the bytes that are free on the GPU, without those that torch keeps for later."""
        give_back(self._device)
        return free_memory(self._device)

    def close(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize(self._device)

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Nothing can be captured on the default stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


class NothingFromHost(TorchDispatchMode):
    """Refuses operators that wait for a device, or whose result depends on memory of the host, in this thread.

    Args:
        device_type (`str`):
            Of the device.
    """

    def __init__(self, device_type: str):
        super().__init__()
        self._device_type = device_type

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns `True`: Dynamo compiles under this mode, which then sees what compiled code does."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors_in((*args, *kwargs.values())))
        there = [tensor for tensor in given if tensor.device.type == self._device_type]
        if there:
            if torch.Tag.data_dependent_output in function.tags or function.overloadpacket in _READS_NUMBERS:
                raise NotCapturableError(f"{function} reads a number on the host")
            if _has_unknown_shape(function, given, kwargs):
                raise NotCapturableError(f"{function} makes a tensor whose shape depends on numbers")
        targets = {value.type for value in (*args, *kwargs.values()) if isinstance(value, torch.device)}
        if given and _crosses(function, given, targets, self._device_type):
            raise NotCapturableError(f"{function} copies between the device and the host")
        return function(*args, **kwargs)


def _has_unknown_shape(function: Any, given: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    operator = function.overloadpacket
    if operator in _INDEXING:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
    if operator is _aten.repeat_interleave and len(given) == 2 or operator is _aten.where and len(given) == 1:
        return kwargs.get("output_size") is None
    if operator in _UNKNOWN_SHAPES:
        return True
    if kwargs.get("output_size") is not None:  # the caller knows
        return False
    return torch.Tag.dynamic_output_shape in function.tags


def _crosses(function: Any, given: list[torch.Tensor], targets: set[str], device_type: str) -> bool:
    """Whether tensors go to the device or from it. A number in a tensor on the host does not: it is an argument."""
    types = {tensor.device.type for tensor in given}
    if device_type not in types | targets:
        return False
    return not targets <= types or (len(types) > 1 and function.overloadpacket in _MOVING)


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection might free something of the device, which may not be done while a call is captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
