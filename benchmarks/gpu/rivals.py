"""Attention by others on the same numbers, K/V in one piece each: SDPA, FlashAttention, FlexAttention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from .problems import PagedProblem

Calls = list[Callable[[], torch.Tensor]]


class RivalUnavailableError(Exception):
    """A rival cannot run here; the message says why."""


def sdpa(paged: PagedProblem) -> Calls:
    """Returns calls of torch's SDPA: its flash kernel on a GPU, whatever it has on a CPU.

    Args:
        paged (`PagedProblem`):
            The numbers.
    """
    problem = paged.problem
    query = paged.dense_query()
    kernels = [SDPBackend.FLASH_ATTENTION] if paged.device != "cpu" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    same = problem.query_len == problem.context
    mask = None if same or problem.is_decode else causal_lower_right(problem.query_len, problem.context)

    def make(keys: torch.Tensor, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with sdpa_kernel(kernels):
                return functional.scaled_dot_product_attention(
                    query, keys, values, attn_mask=mask, is_causal=same and not problem.is_decode, enable_gqa=grouped
                )

        return call

    grouped = problem.num_heads != problem.num_kv_heads
    calls = _each(paged, make)
    try:
        calls[0]()
    except (RuntimeError, ValueError):
        # No kernel for groups with this mask: heads are repeated, which costs it nothing that is measured.
        grouped, group = False, problem.num_heads // problem.num_kv_heads
        calls = _each(paged, lambda k, v: make(k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    return calls


def flash_attention(paged: PagedProblem) -> Calls:
    """Returns calls of the package flash-attn, of its newest generation that is installed.

    Args:
        paged (`PagedProblem`):
            The numbers.

    Raises:
        RivalUnavailableError: If none is installed, or this is a CPU.
    """
    if paged.device == "cpu":
        raise RivalUnavailableError("has no kernel for a CPU")
    name = next((n for n in ("flash_attn_interface", "flash_attn") if importlib.util.find_spec(n)), None)
    if name is None:
        raise RivalUnavailableError("flash-attn is not installed")
    attend = importlib.import_module(name).flash_attn_func
    query = paged.dense_query().transpose(1, 2)

    def make(keys: torch.Tensor, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        keys, values = (x.transpose(1, 2).contiguous() for x in (keys, values))

        def call() -> torch.Tensor:
            found = attend(query, keys, values, causal=True)
            return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

        return call

    return _each(paged, make)


def flex_attention(paged: PagedProblem) -> Calls:
    """Returns calls of torch's FlexAttention, compiled on a GPU (which takes long), as it is on a CPU.

    Args:
        paged (`PagedProblem`):
            The numbers.
    """
    from torch.nn.attention import flex_attention as flex

    problem = paged.problem
    offset = problem.context - problem.query_len

    def causal(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return row + offset >= column

    mask = None
    if not problem.is_decode:
        mask = flex.create_block_mask(causal, None, None, problem.query_len, problem.context, device=paged.device)
    attend: Any = flex.flex_attention
    if paged.device != "cpu":
        attend = torch.compile(attend, dynamic=False)
    query = paged.dense_query().contiguous()
    grouped = problem.num_heads != problem.num_kv_heads

    def make(keys: torch.Tensor, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: attend(query, keys, values, block_mask=mask, enable_gqa=grouped)

    return _each(paged, make)


# Name, calls, and the seconds that the first call may take (to compile).
RIVALS: dict[str, tuple[Callable[[PagedProblem], Calls], float]] = {
    "sdpa": (sdpa, 0.5),
    "flash_attention": (flash_attention, 0.5),
    "flex_attention": (flex_attention, 20.0),
}


def _each(paged: PagedProblem, make: Callable[[torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]) -> Calls:
    return [make(*paged.dense(number)) for number in range(len(paged.tables))]
