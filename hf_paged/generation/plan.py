"""From what the user asked for, the model and the machine to what the engine will do: `EnginePlan`, printable."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache import budget, memory
from ..configuration import PagedConfig
from ..errors import NotEnoughMemoryError
from ..kernels.base import AttentionSpec
from ..modeling.layer_groups import LayerGroup, context_limit

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_SEQS = {"cpu": 64}
_DEFAULT_SEQS_ACCELERATOR = 256
# On CPUs a token costs the same in steps of 512, 1,024 and 2,048; larger ones bring a burst of prompts to its first
# tokens a tenth sooner, as fewer decoding tokens come between, and make those that are decoding wait longer for theirs.
_DEFAULT_TOKENS = {"cpu": 1024}
_DEFAULT_TOKENS_ACCELERATOR = 8192
_UNKNOWN_CONTEXT = 4096
_NO_NEEDS = budget.StepNeeds()


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """What was decided for one model on one machine. Every number here is in force.

    Args:
        model (`str`):
            The model's class.
        device (`str`):
            Where it runs.
        dtype (`str`):
            Dtype of the stored K/V.
        attn_backend (`str`):
            The attention backend.
        rejected_backends (`dict[str, str]`):
            Backends that were passed over, and why.
        call_layout (`str`):
            `"flat"`: all tokens of a step in one call; `"tiles"`: each request in calls of its own (batch-invariant).
        num_layers (`int`):
            Layers that store K/V.
        block_size (`int`):
            Tokens per block.
        num_blocks (`int`):
            Blocks in the pool.
        bytes_per_block (`int`):
            Bytes of one block over all layers.
        max_model_len (`int`):
            Prompt and answer together, in tokens.
        max_num_seqs (`int`):
            Requests that run at the same time.
        max_num_batched_tokens (`int`):
            Tokens per step.
        enable_prefix_caching (`bool`):
            Whether finished requests' blocks are kept and shared.
        enable_chunked_prefill (`bool`):
            Whether long prompts are computed in several steps.
        scheduling_policy (`str`):
            Who is next, and who is preempted.
        max_queue_size (`int`, *optional*):
            Waiting requests at most.
        batch_invariant (`bool`):
            Whether logits do not depend on batch mates.
        async_scheduling (`bool`):
            Whether a step is put together while the one before is running.
        huge_pages (`bool`):
            Whether weights and K/V are on 2 MiB pages.
        native (`str`, defaults to `"off"`):
            What of the model native operators compute.
        compiled (`str`, defaults to `"off"`):
            Which modules are compiled.
        cuda_graphs (`str`, defaults to `"off"`):
            Which decoding steps are captured as CUDA graphs, or why none is.
        cuda_graph_sizes (`tuple[int, ...]`):
            The numbers of requests that they are captured for.
        memory (`MemoryPlan`, *optional*):
            On an accelerator, what its memory is for.
        notes (`tuple[str, ...]`):
            Limits that became what fits, and why.
    """

    model: str
    device: str
    dtype: str
    attn_backend: str
    rejected_backends: dict[str, str]
    call_layout: str
    num_layers: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    scheduling_policy: str
    max_queue_size: int | None
    batch_invariant: bool
    async_scheduling: bool
    huge_pages: bool
    native: str = "off"
    compiled: str = "off"
    cuda_graphs: str = "off"
    cuda_graph_sizes: tuple[int, ...] = ()
    memory: budget.MemoryPlan | None = None
    notes: tuple[str, ...] = ()

    @property
    def pool_bytes(self) -> int:
        """Returns the bytes of the whole K/V pool."""
        return self.num_blocks * self.bytes_per_block

    @property
    def pool_tokens(self) -> int:
        """Returns the tokens that the pool can hold."""
        return self.num_blocks * self.block_size

    @property
    def graph_bytes(self) -> int:
        """Returns the bytes of an accelerator's memory that captured graphs may take together."""
        return self.memory.graphs if self.memory is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values, for JSON."""
        return {**dataclasses.asdict(self), "pool_bytes": self.pool_bytes, "pool_tokens": self.pool_tokens}

    def describe(self) -> str:
        """Returns the plan for people, a line each."""
        lines = {
            "model": f"{self.model} on {self.device}, {self.num_layers} layers, K/V in {self.dtype}",
            "attention": self.attn_backend
            + "".join(f"; not {name} ({why})" for name, why in self.rejected_backends.items()),
            "native": self.native,
            "compiled": self.compiled,
            "CUDA graphs": self.cuda_graphs,
            "pool": f"{self.num_blocks} blocks of {self.block_size} tokens ({self.pool_tokens} tokens, "
            f"{self.pool_bytes / _GIB:.2f} GiB{', huge pages' if self.huge_pages else ''})",
            "max_model_len": str(self.max_model_len),
            "max_num_seqs": str(self.max_num_seqs),
            "max_num_batched_tokens": str(self.max_num_batched_tokens),
            "prefix caching": "on" if self.enable_prefix_caching else "off",
            "chunked prefill": "on" if self.enable_chunked_prefill else "off",
            "policy": self.scheduling_policy,
            "async scheduling": "on" if self.async_scheduling else "off",
        }
        if self.memory is not None:
            lines["memory"] = self.memory.describe()
        width = max(map(len, lines))
        text = "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())
        return text + "".join(f"\nnote: {note}" for note in self.notes)


def attention_spec(groups: tuple[LayerGroup, ...], block_size: int, batch_invariant: bool) -> AttentionSpec:
    """Returns what the model's layers need of an attention backend.

    Args:
        groups (`tuple[LayerGroup, ...]`):
            The layers.
        block_size (`int`):
            Tokens per block.
        batch_invariant (`bool`):
            Whether logits must not depend on batch mates.
    """
    layers = [layer for group in groups for layer in group.layers]
    widest = max(layers, key=lambda layer: max(layer.key_dim, layer.value_dim))
    features = frozenset().union(*(layer.features for layer in layers))
    if batch_invariant:
        features |= {"batch_invariant"}
    return AttentionSpec(
        num_query_heads=widest.num_query_heads,
        num_kv_heads=widest.num_kv_heads,
        key_dim=widest.key_dim,
        value_dim=widest.value_dim,
        dtype=widest.dtype,
        device_type=widest.device.type,
        block_size=block_size,
        features=features,
        cache_dtype=widest.cache_dtype,
    )


def default_block_size(config: PagedConfig) -> int:
    """Returns the block size that a configuration leads to.

    Args:
        config (`PagedConfig`):
            What the user asked for.
    """
    return config.block_size or _DEFAULT_BLOCK_SIZE


def make_plan(
    model: PreTrainedModel,
    groups: tuple[LayerGroup, ...],
    config: PagedConfig,
    *,
    attn_backend: str,
    rejected_backends: dict[str, str],
    needs: budget.StepNeeds = _NO_NEEDS,
) -> EnginePlan:
    """Decides everything that a `PagedConfig` leaves open, and brings limits down to what fits.

    Args:
        model (`PreTrainedModel`):
            The model.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        config (`PagedConfig`):
            What the user asked for.
        attn_backend (`str`):
            Name of the chosen backend.
        rejected_backends (`dict[str, str]`):
            The others, and why not.
        needs (`StepNeeds`, defaults to nothing):
            On an accelerator, what steps need beyond weights and pool.

    Raises:
        NotEnoughMemoryError: If not even one block fits, or not as many as were asked for; states the numbers.
    """
    device = groups[0].device
    notes: list[str] = []
    block_size = default_block_size(config)
    bytes_per_block = block_size * sum(group.bytes_per_token for group in groups)
    max_num_seqs, tokens = step_limits(config, device)
    max_model_len = model_len(model, config, notes)
    useful_blocks = max_num_seqs * -(-max_model_len // block_size)
    room = _pool_budget(config, device, bytes_per_block, useful_blocks, needs)
    num_blocks = config.num_blocks or room.pool_bytes // bytes_per_block
    memory_plan = _memory_plan(room, needs, num_blocks * bytes_per_block, notes)
    if max_model_len > num_blocks * block_size:
        notes.append(
            f"max_model_len is {num_blocks * block_size} instead of {max_model_len}: "
            f"the pool has {num_blocks} blocks of {block_size} tokens"
        )
        max_model_len = num_blocks * block_size
    if not config.enable_chunked_prefill and tokens < max_model_len:
        notes.append(
            f"max_num_batched_tokens {tokens} limits prompts, as chunked prefill is off (max_model_len {max_model_len})"
        )
    if max_num_seqs > min(tokens, num_blocks):
        reason = f"the token budget is {tokens}" if tokens < num_blocks else f"the pool has {num_blocks} blocks"
        notes.append(f"max_num_seqs is {min(tokens, num_blocks)} instead of {max_num_seqs}: {reason}")
        max_num_seqs = min(tokens, num_blocks)
    if config.compile_parts and config.batch_invariant:
        notes.append("compile_parts is off: code that is compiled for one token and for several may round differently")
    async_scheduling = runs_ahead(config, device, notes)
    for note in notes:
        log_note(note, config)
    return EnginePlan(
        model=type(model).__name__,
        device=str(device),
        dtype=str(groups[0].layers[0].cache_dtype or groups[0].layers[0].dtype).removeprefix("torch."),
        attn_backend=attn_backend,
        rejected_backends=rejected_backends,
        call_layout="tiles" if config.batch_invariant else "flat",
        num_layers=sum(len(group.layers) for group in groups),
        block_size=block_size,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        scheduling_policy=config.scheduling_policy,
        max_queue_size=config.max_queue_size,
        batch_invariant=config.batch_invariant,
        async_scheduling=async_scheduling,
        huge_pages=device.type == "cpu" and memory.huge_pages_available(),
        memory=memory_plan,
        notes=tuple(notes),
    )


def log_note(note: str, config: PagedConfig) -> None:
    """Tells of a limit that became what fits: what a user asked for and does not get is worth a warning.

    Args:
        note (`str`):
            Begins with the name of a setting.
        config (`PagedConfig`):
            What the user asked for.
    """
    asked = getattr(config, note.split(" ", 1)[0], None) is not None  # a default that adapts is not
    logger.log(logging.WARNING if asked else logging.INFO, "%s", note)


def runs_ahead(config: PagedConfig, device: torch.device, notes: list[str]) -> bool:
    """Returns whether a step is put together while the one before is running.

    Args:
        config (`PagedConfig`):
            What the user asked for.
        device (`torch.device`):
            Where the model runs.
        notes (`list[str]`):
            Gets a line if it was asked for and is not done.
    """
    if config.async_scheduling and config.batch_invariant:
        notes.append("async_scheduling is off: batch-invariant steps are many calls, and the next one waits for them")
    default = device.type == "cuda"
    return not config.batch_invariant and (default if config.async_scheduling is None else config.async_scheduling)


def step_limits(config: PagedConfig, device: torch.device) -> tuple[int, int]:
    """Returns how many requests and tokens a step may have, before a small pool limits them further.

    Args:
        config (`PagedConfig`):
            What the user asked for.
        device (`torch.device`):
            Where the model runs.
    """
    return (
        config.max_num_seqs or _DEFAULT_SEQS.get(device.type, _DEFAULT_SEQS_ACCELERATOR),
        config.max_num_batched_tokens or _DEFAULT_TOKENS.get(device.type, _DEFAULT_TOKENS_ACCELERATOR),
    )


def model_len(model: PreTrainedModel, config: PagedConfig, notes: list[str]) -> int:
    """Returns how long a request may get, before a small pool limits it further.

    Args:
        model (`PreTrainedModel`):
            The model.
        config (`PagedConfig`):
            What the user asked for.
        notes (`list[str]`):
            Gets a line if it is not that.
    """
    limit, why = context_limit(model.config.get_text_config(decoder=True))
    if config.max_model_len is not None and (limit is None or config.max_model_len <= limit):
        return config.max_model_len
    if config.max_model_len is not None:
        notes.append(f"max_model_len is {limit} instead of {config.max_model_len}: {why or 'the model ends there'}")
    elif why:
        notes.append(f"max_model_len is {limit}: {why}")
    return limit or _UNKNOWN_CONTEXT


def _pool_budget(
    config: PagedConfig, device: torch.device, bytes_per_block: int, useful_blocks: int, needs: budget.StepNeeds
) -> budget.MemoryBudget:
    if config.num_blocks is not None:
        return budget.asked_budget(device, config.num_blocks, bytes_per_block, needs)
    useful = useful_blocks * bytes_per_block
    if memory.accelerator_of(device) is None:
        room = budget.cpu_budget(config.cpu_kv_cache_gib, useful)
    else:
        room = budget.accelerator_budget(device, config.gpu_memory_utilization, needs, useful)
    if room.pool_bytes < bytes_per_block:
        raise NotEnoughMemoryError(
            f"The K/V pool may take {room.pool_bytes / _GIB:.4f} GiB ({room.explanation}), but one block of the "
            f"model takes {bytes_per_block / _GIB:.4f} GiB. Raise the limit, or free memory."
        )
    return room


def _memory_plan(
    room: budget.MemoryBudget, needs: budget.StepNeeds, pool: int, notes: list[str]
) -> budget.MemoryPlan | None:
    if room.total is None or room.limit is None or room.used is None:
        return None
    plan = budget.MemoryPlan(room.total, room.limit, room.used, needs.activations, needs.graphs, pool)
    if plan.planned > room.total:  # the blocks that were asked for fit, but beside them not the largest step
        notes.append(
            f"num_blocks leaves too little memory for the largest steps: they need {needs.total / _GIB:.2f} GiB, and "
            f"{(room.total - room.used - pool) / _GIB:.2f} GiB are left; steps that run out of it are made smaller"
        )
    return plan
