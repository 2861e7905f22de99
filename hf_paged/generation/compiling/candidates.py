"""Which modules of a model may be compiled: those in its layers that do not attend, the largest first.

model                         attends
  layer 0                     attends, in one layer
    norm                      candidate
    attention                 attends
      linear                  one operator: nothing to gain
      norm of a head          candidate
    block of experts          candidate; if it cannot be compiled, or may not be:
      router, experts           candidates instead
  norm                        not in a layer
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...modeling.patterns.observation import Call
from ..watched_step import WatchedStep

_FEWEST_OPERATORS = 2  # one is launched as fast without


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A module that does not attend.

    Args:
        module (`torch.nn.Module`):
            The module.
        inner (`tuple[Candidate, ...]`):
            Those that its forward calls, which may be compiled if it is not.
        is_worth_it (`bool`):
            Whether there is something to gain, and nothing in its call that only the step itself may handle.
    """

    module: torch.nn.Module
    inner: tuple[Candidate, ...]
    is_worth_it: bool

    @property
    def read(self) -> frozenset[int]:
        """Returns the ids of the modules that are compiled with it."""
        return frozenset(map(id, self.module.modules()))


def find_candidates(watched: WatchedStep) -> tuple[Candidate, ...]:
    """Runs a step and returns the modules of layers that may be compiled, the largest ones, each with those in it.

    Args:
        watched (`WatchedStep`):
            A step that was not run yet.
    """
    watched.run([module for module in watched.model.modules() if module is not watched.model])
    layers: dict[int, set[int]] = collections.defaultdict(set)
    for attention in watched.observer.attentions:
        for call in attention.parents:
            layers[id(call)].add(attention.layer_idx)
    num_layers = len(set().union(*layers.values()))
    called: dict[int, list[Call]] = collections.defaultdict(list)
    for call in watched.observer.calls:
        if call.parents and id(call) not in layers:
            called[id(call.parents[-1])].append(call)
    is_worth_it = _Worth(watched.runner.cache)
    found = [
        _candidate(call, called, is_worth_it)
        for holder in watched.observer.calls
        if id(holder) in layers and (len(layers[id(holder)]) == 1 or num_layers == 1)
        for call in called[id(holder)]
    ]
    return tuple({id(candidate.module): candidate for candidate in found}.values())


def _candidate(call: Call, called: dict[int, list[Call]], is_worth_it: _Worth) -> Candidate:
    inner = tuple(_candidate(child, called, is_worth_it) for child in called[id(call)])
    return Candidate(call.module, inner, is_worth_it(call))


def largest(candidates: Iterable[Candidate], may_be: Callable[[Candidate], bool]) -> Iterator[torch.nn.Module]:
    """Yields the largest modules that may be compiled, each once.

    Args:
        candidates (`Iterable[Candidate]`):
            Candidates.
        may_be (`Callable[[Candidate], bool]`):
            Whether one may be.
    """
    seen: set[int] = set()
    for candidate in _largest(candidates, may_be):
        if id(candidate.module) not in seen:
            seen.add(id(candidate.module))
            yield candidate.module


def _largest(candidates: Iterable[Candidate], may_be: Callable[[Candidate], bool]) -> Iterator[Candidate]:
    for candidate in candidates:
        if candidate.is_worth_it and may_be(candidate):
            yield candidate
        else:
            yield from _largest(candidate.inner, may_be)


class _Worth:
    """Whether compiling a module saves launches, by what one of its class does in one call."""

    def __init__(self, cache: Any):
        self._cache = cache
        self._counts: dict[type, int] = {}

    def __call__(self, call: Call) -> bool:
        if any(value is self._cache for value in (*call.args, *call.kwargs.values())):
            return False  # it may write there
        cls = type(call.module)
        if cls not in self._counts:
            with _OperatorCount() as count:
                call.module(*call.args, **call.kwargs)
            self._counts[cls] = count.count
        return self._counts[cls] >= _FEWEST_OPERATORS


class _OperatorCount(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))
