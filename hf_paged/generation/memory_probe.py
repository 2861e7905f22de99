"""Measures at load what the largest steps take of an accelerator's memory, beside weights and K/V pool.

    reserved by torch   | weights | pool of the probe | inputs, activations, logits, choice of tokens |
                                                  start                                            peak

The steps are those of an engine at its limits: all tokens that a step may have, spread over all seats; as many in one
prompt that ends at the longest context; all seats decoding. They run over a few blocks that all tables name again and
again, since what is computed does not matter. What torch keeps of one step between calls counts, as it does later on.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache import memory
from ..cache.budget import GRAPH_SHARE, StepNeeds
from ..configuration import PagedConfig
from ..errors import NotEnoughMemoryError
from ..kernels.base import PagedAttentionBackend
from ..modeling.layer_groups import LayerGroup
from .graphs.settings import obstacle_to_graphs
from .model_runner import ModelRunner
from .plan import default_block_size, model_len, runs_ahead, step_limits
from .request import Request
from .sampling.params import SamplingParams
from .sampling.sampler import Sampler
from .step import ScheduledRequest, SchedulerOutput

_GIB = 1 << 30
_NUM_BLOCKS = 64
# What takes most: a copy in float32 for the penalty, log-probabilities, and a draw from some tokens.
_PARAMS = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.0, repetition_penalty=1.1, logprobs=1, seed=0, max_tokens=1
)
_DRAW = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.0, seed=0, max_tokens=1)
Share = tuple[int, int]  # tokens computed before, and in this step


@torch.inference_mode()
def step_needs(
    model: PreTrainedModel, groups: tuple[LayerGroup, ...], backend: PagedAttentionBackend, config: PagedConfig
) -> StepNeeds:
    """Returns what steps need beyond weights and pool; nothing on a CPU, whose steps come out of free memory.

    Args:
        model (`PreTrainedModel`):
            The model.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        backend (`PagedAttentionBackend`):
            The attention backend.
        config (`PagedConfig`):
            Gives the limits of a step.

    Raises:
        NotEnoughMemoryError: If such a step does not fit beside the weights; states the numbers.
    """
    device = groups[0].device
    accelerator = memory.accelerator_of(device)
    if accelerator is None:
        return StepNeeds()
    steps = _Steps(model, groups, config)
    memory.give_back(device)
    before, free = accelerator.memory_reserved(device), memory.free_memory(device)
    try:
        activations = steps.run(backend, accelerator)
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # whose variables hold what filled the memory
        raise NotEnoughMemoryError(
            f"A step of {steps.num_tokens} tokens and {steps.num_seats} requests does not fit into the "
            f"{free / _GIB:.2f} GiB of {memory.total_memory(device) / _GIB:.2f} GiB that are free on {device} beside "
            "the weights and other programs. Lower `max_num_batched_tokens` or `max_num_seqs`, or free memory."
        ) from error
    memory.give_back(device)
    # What stays (workspaces of libraries) is in use when the pool's budget is made, and must not count twice.
    lasting = accelerator.memory_reserved(device) - before
    return StepNeeds(max(activations - lasting, 0), _graph_bytes(config, backend, device))


def _graph_bytes(config: PagedConfig, backend: PagedAttentionBackend, device: torch.device) -> int:
    return 0 if obstacle_to_graphs(config, backend) else int(memory.total_memory(device) * GRAPH_SHARE)


class _Steps:
    """The largest steps of a model.

    Args:
        model (`PreTrainedModel`):
            The model.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        config (`PagedConfig`):
            Gives the limits of a step.
    """

    def __init__(self, model: PreTrainedModel, groups: tuple[LayerGroup, ...], config: PagedConfig):
        self._model, self._groups = model, groups
        self._device = groups[0].device
        self._block_size = default_block_size(config)
        seats, self.num_tokens = step_limits(config, self._device)
        self.num_seats = min(seats, self.num_tokens)
        self._runs_ahead = runs_ahead(config, self._device, [])
        room = self._affordable_tokens(config)
        self._longest = max(min(model_len(model, config, []), room), 1)
        self._usual = max(min(self._longest, room // self.num_seats), 1)

    def _affordable_tokens(self, config: PagedConfig) -> int:
        """How many tokens the pool will hold, or a few more."""
        if config.num_blocks is not None:
            return config.num_blocks * self._block_size
        free, total = memory.free_memory(self._device), memory.total_memory(self._device)
        room = int(total * config.gpu_memory_utilization) - (total - free)
        return max(room, 0) // sum(group.bytes_per_token for group in self._groups)

    def run(self, backend: PagedAttentionBackend, accelerator: Any) -> int:
        """Runs the steps and returns the peak of what they took, in bytes."""
        runner = ModelRunner(
            self._model,
            self._groups,
            backend,
            num_blocks=_NUM_BLOCKS,
            block_size=self._block_size,
            max_num_seqs=self.num_seats,
            max_model_len=self._longest,
        )
        sampler = Sampler(self._model.config.get_text_config(decoder=True).vocab_size, self._device)
        accelerator.reset_peak_memory_stats(self._device)
        start = accelerator.memory_reserved(self._device)
        for shares in (self._short_prompts(), self._long_prompt(), self._decodes()):
            sampler.sample(self._logits(runner, shares), _requests(_PARAMS, len(shares)), range(len(shares)))
        if self._runs_ahead:  # then the logits of a step are there while the next one runs, whose tokens are just drawn
            kept, shares = self._logits(runner, self._decodes()), self._short_prompts()
            sampler.start(self._logits(runner, shares), _requests(_DRAW, len(shares)), range(len(shares)))
            del kept
        accelerator.synchronize(self._device)
        peak = accelerator.max_memory_reserved(self._device)
        return int(peak - start)

    def _logits(self, runner: ModelRunner, shares: list[Share]) -> torch.Tensor:
        output = SchedulerOutput(0, tuple(self._scheduled(place, *share) for place, share in enumerate(shares)))
        return runner.collect(runner.launch(output)).logits

    def _short_prompts(self) -> list[Share]:
        """The token budget, spread over all seats."""
        counts = [self.num_tokens // self.num_seats] * self.num_seats
        counts[0] += self.num_tokens - sum(counts)
        return [(0, min(count, self._longest)) for count in counts]

    def _long_prompt(self) -> list[Share]:
        """The token budget at the end of the longest context."""
        count = min(self.num_tokens, self._longest)
        return [(self._longest - count, count)]

    def _decodes(self) -> list[Share]:
        """One token in each seat, one of them after the longest context, so that the block tables are widest."""
        return [(self._longest - 1, 1), *[(self._usual - 1, 1)] * (self.num_seats - 1)]

    def _scheduled(self, place: int, computed: int, count: int) -> ScheduledRequest:
        # Neighbours' tables begin with different blocks, or they would be taken for requests that share a prefix.
        num_blocks = -(-(computed + count) // self._block_size)
        table = tuple((place + number) % _NUM_BLOCKS for number in range(num_blocks))
        request_id = str(place)
        return ScheduledRequest(
            request_id,
            computed,
            count,
            (0,) * (computed + count),
            tuple(table for _ in self._groups),
            is_new=True,
            sample_ids=(request_id,),
        )


def _requests(params: SamplingParams, count: int) -> list[Request]:
    return [Request(str(place), [0], params, max_tokens=1) for place in range(count)]
