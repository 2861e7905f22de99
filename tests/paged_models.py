"""Tiny models on a paged engine, how they are broken, and how much an engine still holds."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hf_paged import AutoPagedModelForCausalLM, PagedConfig
from tests.families import tiny_model


def paged(family: str = "llama", *, overrides: dict[str, Any] | None = None, **config: Any) -> Any:
    """A fresh tiny model of a family, paged; keyword arguments are `PagedConfig` fields."""
    model = tiny_model(family, **(overrides or {}))
    return AutoPagedModelForCausalLM.from_model(model, paged_config=PagedConfig(**config))


def paged_engine(family: str = "llama", **config: Any) -> Any:
    """The engine of a fresh tiny model, which it keeps alive here, as an engine does not by itself."""
    model = paged(family, **config)
    model.engine.kept_model = model
    return model.engine


def answers_without_cache(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens by plain forwards over everything so far, one prompt at a time."""
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def spend_time_in_torch(model: Any) -> None:
    """Makes each call of the model spend nearly all its time inside of torch, where other threads may run."""
    forward, matrix = type(model).forward, torch.randn(1024, 1024)

    def slow(self, *args, **kwargs):
        for _ in range(4):
            torch.mm(matrix, matrix)
        return forward(self, *args, **kwargs)

    type(model).forward = slow


def assert_idle(engine: Any) -> None:
    """Nothing is left of earlier requests: no live request, no held block."""
    assert not engine.has_unfinished
    assert not engine.live.scheduler.requests
    assert engine.live.block_manager.num_blocks_held == 0


@contextlib.contextmanager
def broken_forward(model: Any, what: Any, at: int = 1, times: int = 1) -> Iterator[None]:
    """The model's forward raises, or does, something in some of its calls."""
    forward, calls = type(model).forward, itertools.count(1)

    def broken(self, *args, **kwargs):
        if at <= next(calls) < at + times:
            if isinstance(what, BaseException):
                raise what
            return what(lambda: forward(self, *args, **kwargs), kwargs)
        return forward(self, *args, **kwargs)

    type(model).forward = broken
    try:
        yield
    finally:
        type(model).forward = forward
