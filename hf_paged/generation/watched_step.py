"""A short step that is run once to be watched, over blocks of its own: sequences at their start, and in the middle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..kernels.base import PagedAttentionBackend
from ..modeling.layer_groups import LayerGroup, num_embeddings
from ..modeling.patterns.observation import AttentionCall, Call, Observer, first_tensor
from .model_runner import ModelRunner
from .step import ScheduledRequest, SchedulerOutput


class WatchedStep:
    """The watched step: what the model was called with, and what happened.

    Args:
        model (`PreTrainedModel`):
            The model, in evaluation mode.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        backend (`PagedAttentionBackend`):
            The attention backend.
        block_size (`int`):
            Tokens per block.
        max_position (`int`):
            The number of positions that the model is used at.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: tuple[LayerGroup, ...],
        backend: PagedAttentionBackend,
        block_size: int,
        max_position: int,
    ):
        lengths, vocab = {"a": block_size + 3, "b": 6, "c": 3}, num_embeddings(model)
        tokens = {name: tuple((7 * i + 3 * n + 1) % vocab for i in range(n)) for name, n in lengths.items()}
        blocks, start = {}, 0
        for name, length in lengths.items():
            count = -(-length // block_size)
            blocks[name] = tuple(tuple(range(start, start + count)) for _ in groups)
            start += count
        self.runner = ModelRunner(
            model,
            groups,
            backend,
            num_blocks=start,
            block_size=block_size,
            max_num_seqs=len(lengths),
            max_model_len=2 * block_size + 3,
        )
        self.model = model
        first = tuple(
            ScheduledRequest(name, 0, count, tokens[name], blocks[name], is_new=True)
            for name, count in (("a", block_size + 2), ("b", 2))
        )
        self.runner.launch(SchedulerOutput(0, first))
        second = (
            ScheduledRequest("a", block_size + 2, 1, sample_ids=("a",)),
            ScheduledRequest("b", 2, 4, sample_ids=("b",)),
            ScheduledRequest("c", 0, 3, tokens["c"], blocks["c"], is_new=True, sample_ids=("c",)),
        )
        self.inputs = self.runner.inputs_of(SchedulerOutput(1, second))
        self.inputs.position_ids[0, -3:] += max(max_position - 3, 0)
        self.observer = Observer()
        self.logits = torch.empty(0)

    def run(self, modules: Iterable[torch.nn.Module]) -> None:
        """Watches the step.

        Args:
            modules (`Iterable[torch.nn.Module]`):
                Whose calls are seen.
        """
        cache = self.runner.cache
        cache.observer = self.observer.attended
        try:
            with self.observer.watching(modules):
                self.logits = self.call()
        finally:
            cache.observer = None

    def call(self) -> torch.Tensor:
        """Runs the step once more, or for the first time; returns its logits."""
        return self.runner.call(self.inputs)

    def amplified(self, call: Call, factor: float) -> tuple[torch.Tensor, AttentionCall | None] | None:
        """Calls a module again on a larger input; what is clamped there shows.

        Args:
            call (`Call`):
                Its call in the step.
            factor (`float`):
                How much larger.

        Returns:
            `tuple[torch.Tensor, AttentionCall | None]`: What it returned, and the attention in it; `None` if that is no
            tensor.
        """
        hidden = call.input
        assert hidden is not None, "an observed block has an input"

        def larger(value: Any) -> Any:
            return value * factor if value is hidden else value

        args, kwargs = tuple(map(larger, call.args)), {name: larger(value) for name, value in call.kwargs.items()}
        cache, seen = self.runner.cache, Observer()
        cache.begin(self.inputs.metadata)
        cache.observer = seen.attended
        try:
            output = first_tensor(call.module(*args, **kwargs))
        finally:
            cache.observer = None
            cache.abandon()
        return None if output is None else (output, seen.attentions[0] if seen.attentions else None)
