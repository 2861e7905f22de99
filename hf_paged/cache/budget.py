"""How many bytes the K/V pool may take, beside everything else that lives in a device's memory.

total    | other programs, weights | a step | graphs | K/V pool ............. | what the limit leaves free |
limit    |<--------------- gpu_memory_utilization * total ------------------->|
"""

from __future__ import annotations

import dataclasses

import torch

from ..errors import NotEnoughMemoryError
from . import memory

_GIB = 1 << 30
# Of an accelerator's memory, for the graphs of decoding steps.
GRAPH_SHARE = 0.015


@dataclasses.dataclass(frozen=True)
class StepNeeds:
    """What steps need on an accelerator beyond weights and pool, in bytes.

    Args:
        activations (`int`, defaults to 0):
            The peak of the largest step: its inputs, activations, logits, and the choice of its tokens.
        graphs (`int`, defaults to 0):
            What is set aside for captured graphs.
    """

    activations: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        """Returns the bytes of both."""
        return self.activations + self.graphs


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """Bytes that the K/V pool may take, and how that came about.

    Args:
        pool_bytes (`int`):
            What the pool may take.
        explanation (`str`):
            The numbers that led there, for messages.
        limit (`int`, *optional*):
            On an accelerator, what all of its users together may come to.
        total (`int`, *optional*):
            On an accelerator, the size of its memory.
        used (`int`, *optional*):
            On an accelerator, what is in use without the pool and steps: weights and other programs.
    """

    pool_bytes: int
    explanation: str
    limit: int | None = None
    total: int | None = None
    used: int | None = None


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What an accelerator's memory is for, in bytes.

    Args:
        total (`int`):
            Its size.
        limit (`int`):
            What is promised not to be exceeded.
        used (`int`):
            Weights and other programs, when the plan was made.
        activations (`int`):
            A step's peak.
        graphs (`int`):
            Set aside for captured graphs.
        pool (`int`):
            The K/V pool.
    """

    total: int
    limit: int
    used: int
    activations: int
    graphs: int
    pool: int

    @property
    def planned(self) -> int:
        """Returns the sum of all that was planned; below the limit if the pool has no use for more."""
        return self.used + self.activations + self.graphs + self.pool

    def describe(self) -> str:
        """Returns the plan for people."""
        parts = {
            "weights and other programs": self.used,
            "pool": self.pool,
            "a step": self.activations,
            "graphs": self.graphs,
        }
        listed = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
        return f"{self.planned / _GIB:.2f} of {self.total / _GIB:.2f} GiB, at most {self.limit / _GIB:.2f}: {listed}"


def cpu_budget(cpu_kv_cache_gib: float | None, useful_bytes: int) -> MemoryBudget:
    """Returns the pool's budget on a CPU.

    Args:
        cpu_kv_cache_gib (`float`, *optional*):
            What the user asked for.
        useful_bytes (`int`):
            What the pool could use at most.

    Raises:
        NotEnoughMemoryError: If more was asked for than is free.
    """
    free = memory.free_memory(torch.device("cpu"))
    if cpu_kv_cache_gib is not None:
        if cpu_kv_cache_gib * _GIB > free:
            raise NotEnoughMemoryError(
                f"`cpu_kv_cache_gib` is {cpu_kv_cache_gib}, but only {free / _GIB:.2f} GiB are free. Ask for less."
            )
        return MemoryBudget(int(cpu_kv_cache_gib * _GIB), f"`cpu_kv_cache_gib` is {cpu_kv_cache_gib}")
    return MemoryBudget(
        min(free // 4, useful_bytes), f"a quarter of the {free / _GIB:.2f} GiB that are free; see `cpu_kv_cache_gib`"
    )


def accelerator_budget(
    device: torch.device, gpu_memory_utilization: float, needs: StepNeeds, useful_bytes: int
) -> MemoryBudget:
    """Returns the pool's budget on an accelerator: the allowed share less what is used and what steps need.

    Args:
        device (`torch.device`):
            The accelerator.
        gpu_memory_utilization (`float`):
            Share of its memory that this process may bring it to.
        needs (`StepNeeds`):
            What steps need beyond weights and pool.
        useful_bytes (`int`):
            What the pool could use at most.
    """
    free, total = memory.free_memory(device), memory.total_memory(device)
    limit = int(total * gpu_memory_utilization)
    room = limit - (total - free) - needs.total
    return MemoryBudget(
        max(min(room, useful_bytes), 0),
        f"`gpu_memory_utilization` {gpu_memory_utilization} of {total / _GIB:.2f} GiB, less "
        f"{(total - free) / _GIB:.2f} GiB in use (weights and other programs), "
        f"{needs.activations / _GIB:.2f} GiB for a step's activations and {needs.graphs / _GIB:.2f} GiB for graphs",
        limit=limit,
        total=total,
        used=total - free,
    )


def asked_budget(device: torch.device, num_blocks: int, bytes_per_block: int, needs: StepNeeds) -> MemoryBudget:
    """Returns the budget of a pool whose size the user has set, which need not keep to a share of the device.

    Args:
        device (`torch.device`):
            Where the pool will be.
        num_blocks (`int`):
            What the user asked for.
        bytes_per_block (`int`):
            Bytes of a block over all layers.
        needs (`StepNeeds`):
            What steps need beyond weights and pool; 0 on a CPU.

    Raises:
        NotEnoughMemoryError: If the pool does not fit into what is free.
    """
    free, pool = memory.free_memory(device), num_blocks * bytes_per_block
    if pool > free:
        raise NotEnoughMemoryError(
            f"`num_blocks` is {num_blocks}, of {bytes_per_block} bytes each: {pool / _GIB:.2f} GiB of K/V, but only "
            f"{free / _GIB:.2f} GiB are free on {device}. At most {free // bytes_per_block} blocks fit; ask for less, "
            "or free memory."
        )
    explanation = f"`num_blocks` is {num_blocks}"
    if memory.accelerator_of(device) is None:
        return MemoryBudget(pool, explanation)
    total = memory.total_memory(device)
    limit = min(total - free + pool + needs.total, total)
    return MemoryBudget(pool, explanation, limit=limit, total=total, used=total - free)
