"""Runs the model's calls natively during a step: what each recognised module does instead of its forward.

    model's loop      layer 0         layer 1        ...   layer 29       norm        head
    with us           one operator    identity       ...   identity       its own     native linear
                      for all of a
                      run of layers

Weights are handed over as the objects that lie on the modules; operators read their memory at each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..cache.step_cache import StepCache, StepLayer
from ..kernels.layers import LayerArguments
from ..kernels.packed_rows import is_packed
from ..modeling.native_step import Substitute, substituted
from .native_operators import Operators
from .native_units import Unit, run_small


class _Run:
    """Layers that one call of the operator computes, or an attention block or an MLP alone."""

    def __init__(self, units: Sequence[Unit], operators: Operators, cache: StepCache):
        self.units = units
        self._operators = operators
        self._cache = cache
        layers = {layer.spec.layer_idx: layer for layer in cache.layers}
        self.layers: list[StepLayer] = [layers[unit.layer_idx] for unit in units if unit.layer_idx is not None]
        self._is_rotary = any(unit.recipe is not None and unit.recipe.is_rotary for unit in units)
        self.arguments: list[LayerArguments] = []
        self.output: torch.Tensor | None = None

    def fetch(self) -> None:
        """Fetches the tensors of all layers."""
        layers = {layer.spec.layer_idx: layer.spec for layer in self.layers}
        self.arguments = []
        for unit in self.units:
            assert unit.recipe is not None, "a run consists of layers or parts of one"
            spec = None if unit.layer_idx is None else layers[unit.layer_idx]
            caches = () if spec is None else (spec.key_cache, spec.value_cache)
            self.arguments.append(unit.recipe.arguments(*caches))

    def first(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Computes the run in the forward of its first module; `None` if the call is not one of the step."""
        unit = self.units[0]
        self.output = None
        hidden = unit.hidden.of(args, kwargs)
        if unit.cache is not None and unit.cache.of(args, kwargs) is not self._cache:
            return None
        weight = next(tensor for tensor in self.arguments[0].tensors if tensor is not None)
        if not isinstance(hidden, torch.Tensor) or hidden.dtype != weight.dtype or hidden.device != weight.device:
            return None
        cos = sin = None
        if self._is_rotary:
            assert unit.angles is not None, "layers that rotate are given angles"
            cos, sin = (table[0] for table in unit.angles.of(args, kwargs))
        metadata = None
        if self.layers:
            metadata = self.layers[0].metadata
            self._cache.attended(len(self.layers))
        flat = hidden.reshape(-1, hidden.shape[-1])
        result = self._operators.decoder_layers(flat, self.arguments, cos, sin, metadata)
        self.output = result.view(hidden.shape)
        return self.output


class _LayerCall:
    """The forward of a module in a run: the first computes the run, the others hand its output on."""

    def __init__(self, run: _Run, place: int):
        self._run = run
        self._is_first = place == 0
        self._hidden = run.units[place].hidden
        self._returned = run.units[place].returned

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        output = self._run.first(module, args, kwargs) if self._is_first else self._run.output
        if output is None:
            return type(module).forward(module, *args, **kwargs)
        if not self._is_first:
            assert self._hidden.of(args, kwargs) is output, "layers that were called one after the other still are"
        return self._returned(output)


class _SmallCall:
    """The forward of a norm or a linear."""

    def __init__(self, unit: Unit, operators: Operators):
        self._unit = unit
        self._operators = operators

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        x, weight = self._unit.hidden.of(args, kwargs), module._parameters["weight"]
        if weight is None or not isinstance(x, torch.Tensor) or x.device != weight.device:
            return type(module).forward(module, *args, **kwargs)
        if x.dtype != weight.dtype and not is_packed(weight):
            return type(module).forward(module, *args, **kwargs)
        return run_small(self._unit, self._operators, x)


class NativeCalls:
    """What the steps of one runner compute natively.

    Args:
        units (`Sequence[Unit]`):
            Recognised modules, in the order in which they are called.
        operators (`Operators`):
            What they are run on.
        cache (`StepCache`):
            The view of the steps.
    """

    def __init__(self, units: Sequence[Unit], operators: Operators, cache: StepCache):
        self._runs: list[_Run] = []
        self._substitutes: list[Substitute] = []
        groups: list[list[Unit]] = []
        for unit in units:
            if unit.recipe is None:
                self._substitutes.append(Substitute(unit.module, _SmallCall(unit, operators)))
            elif unit.follows and groups:
                groups[-1].append(unit)
            else:
                groups.append([unit])
        for group in groups:
            run = _Run(group, operators, cache)
            self._runs.append(run)
            self._substitutes += [Substitute(unit.module, _LayerCall(run, i)) for i, unit in enumerate(group)]
        self._number = -1

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The model's calls are computed natively while the context lasts, those of this thread.

        Args:
            number (`int`):
                Of the weights; if it is not that of the step before, they are fetched anew.
        """
        if number != self._number:
            for run in self._runs:
                run.fetch()
            self._number = number
        try:
            with substituted(self._substitutes):
                yield
        finally:
            for run in self._runs:
                run.output = None
