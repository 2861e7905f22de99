"""What an engine has on a GPU and a dry run on a CPU has not, by the tests' stand-ins.

Decoding steps are recorded and replayed operator by operator. Attention that reads lengths on the device is plain
torch's; or Triton's in its interpreter if it is asked for by name, and then its operators run the layers, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from .settings import Settings

_GRAPH_BYTES = 1 << 30


@contextlib.contextmanager
def as_on_a_gpu(settings: Settings) -> Iterator[None]:
    """Engines that are made and used meanwhile have graphs in a dry run, too. On a GPU this does nothing.

    Args:
        settings (`Settings`):
            What the command line decided.
    """
    if not settings.dry_run:
        yield
        return
    from hf_paged.generation import engine, native_layers
    from hf_paged.generation.graphs import settings as graph_settings
    from hf_paged.generation.native_operators import triton_operators
    from hf_paged.generation.plan import EnginePlan
    from tests.generation.graphs.backend import DeviceLengths
    from tests.generation.graphs.recorder import RecordedGraphs

    select, make_layers = engine.select_backend, engine.native_layers

    def selected(spec: Any, name: str | None) -> Any:
        return select(spec, name) if name else DeviceLengths(spec)

    def layers(model: Any, groups: Any, backend: Any, plan: EnginePlan) -> Any:
        if backend.name != "triton":
            return None
        with mock.patch.object(native_layers, "native_operators", lambda: triton_operators(backend)):
            return make_layers(model, groups, backend, plan)

    with (
        mock.patch.object(engine, "select_backend", selected),
        mock.patch.object(engine, "native_layers", layers),
        mock.patch.object(
            graph_settings, "obstacle_to_graphs", lambda config, _: "eager" if config.enforce_eager else None
        ),
        mock.patch.object(graph_settings, "CudaGraphs", lambda device: RecordedGraphs()),
        mock.patch.object(EnginePlan, "graph_bytes", property(lambda plan: _GRAPH_BYTES)),
    ):
        yield


@contextlib.contextmanager
def counted_memory(settings: Settings, total: int) -> Iterator[None]:
    """In a dry run the CPU is an accelerator meanwhile whose memory is counted. On a GPU this does nothing.

    Args:
        settings (`Settings`):
            What the command line decided.
        total (`int`):
            Bytes that it has.
    """
    if not settings.dry_run:
        yield
        return
    from tests.generation.fake_accelerator import on_accelerator

    with contextlib.ExitStack() as patches, on_accelerator(_Patches(patches), total):
        yield


class _Patches:
    """Of pytest's `monkeypatch`, what `on_accelerator` needs."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack = stack

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Replaces an attribute for a while."""
        self._stack.enter_context(mock.patch.object(target, name, value))
