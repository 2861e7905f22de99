"""Engines whose decoding steps are recorded and replayed on a CPU, beside the same ones without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hf_paged.generation import engine as engine_module
from hf_paged.generation import native_layers
from hf_paged.generation.engine import Engine
from hf_paged.generation.graphs import settings
from hf_paged.generation.native_operators import triton_operators
from hf_paged.generation.plan import EnginePlan
from hf_paged.kernels.base import PagedAttentionBackend
from tests.generation.graphs.backend import DeviceLengths
from tests.generation.graphs.recorder import RecordedGraphs
from tests.paged_models import paged

BUDGET = 1 << 30


@dataclasses.dataclass
class GraphSetup:
    """What an engine that is made next is to believe about its machine.

    Args:
        makers (`list[RecordedGraphs]`):
            Those that engines have made.
        make (`Callable[[], RecordedGraphs]`):
            Makes another.
        backend (`type[PagedAttentionBackend]`):
            The attention backend.
        budget (`int`):
            What graphs may take.
        wanted (`bool`):
            Whether they are captured.
    """

    makers: list[RecordedGraphs]
    make: Callable[[], RecordedGraphs] = RecordedGraphs
    backend: type[PagedAttentionBackend] = DeviceLengths
    budget: int = BUDGET
    wanted: bool = True

    def model(self, family: str = "llama", wanted: bool = True, **config: Any) -> Any:
        """A paged model whose engine was made in this setup, with or without graphs."""
        before, self.wanted = self.wanted, wanted
        try:
            model = paged(family, **config)
            model.engine  # noqa: B018 - made at the first look
        finally:
            self.wanted = before
        return model

    def engine(self, family: str = "llama", wanted: bool = True, **config: Any) -> Any:
        """The engine of such a model, which it keeps alive here, as an engine does not by itself."""
        model = self.model(family, wanted, **config)
        model.engine.kept_model = model
        return model.engine

    def _make(self) -> RecordedGraphs:
        self.makers.append(self.make())
        return self.makers[-1]


def set_up(monkeypatch: pytest.MonkeyPatch) -> GraphSetup:
    """Engines capture on a CPU from now on, layers as their model has them."""
    setup = _set_up(monkeypatch)
    monkeypatch.setattr(engine_module, "select_backend", lambda spec, name: setup.backend(spec))
    monkeypatch.setattr(engine_module, "native_layers", lambda *args: None)
    return setup


def set_up_triton(monkeypatch: pytest.MonkeyPatch, native: bool = True) -> GraphSetup:
    """Engines capture on a CPU from now on, with Triton's attention in its interpreter, and all of its operators."""

    def on_triton(model: Any, groups: Any, backend: PagedAttentionBackend, plan: EnginePlan) -> Any:
        if not native:
            return None
        monkeypatch.setattr(native_layers, "native_operators", lambda: triton_operators(backend))
        return original(model, groups, backend, plan)

    original = native_layers.native_layers
    monkeypatch.setattr(engine_module, "native_layers", on_triton)
    return _set_up(monkeypatch)


def _set_up(monkeypatch: pytest.MonkeyPatch) -> GraphSetup:
    setup = GraphSetup([])
    monkeypatch.setattr(settings, "obstacle_to_graphs", lambda *args: None if setup.wanted else "not wanted")
    monkeypatch.setattr(settings, "CudaGraphs", lambda device: setup._make())
    monkeypatch.setattr(EnginePlan, "graph_bytes", property(lambda plan: setup.budget))
    return setup


def graphs_of(engine: Engine) -> Any:
    """The graphs of an engine's runner, which is made if it is not there."""
    return engine._loop.ready_runner().graphs
