"""Rotary position embedding by native code, alone or together with the store of K/V into their blocks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Literal

import torch

from ..quantized_blocks import Blocks, split
from . import library

MAX_ROTARY_DIM = 1024
Pairs = Literal["half", "interleaved", "interleaved_to_half"]
_PAIRS: dict[Pairs, int] = {"half": 0, "interleaved": 1, "interleaved_to_half": 2}


@dataclasses.dataclass(frozen=True)
class RopeLayout:
    """Which numbers of a head turn together, and where their angles stand.

        half                  (x[i], x[i + n/2])     Llama and most others (`rotate_half`)
        interleaved           (x[2i], x[2i + 1])     GPT-J, Cohere, GLM, Ernie 4.5, Llama 4
        interleaved_to_half   read as interleaved, written as half     DeepSeek-V3's `apply_rotary_pos_emb_interleave`

    Args:
        rotary_dim (`int`):
            How many numbers of a head rotate (n above), even, at most 1024; the others are copied.
        pairs (`str`, defaults to `"half"`):
            One of the three above.
        rotary_begin (`int`, defaults to 0):
            The first number that rotates; `head_dim - rotary_dim` where the last ones do (DeepSeek-V4).
        cos_step (`int`, defaults to 1):
            The angle of pair i is at `i * cos_step` of the tables: 1 for tables of `n / 2` numbers and for two equal
            halves (Llama, GLM), 2 where each number stands twice in a row (Cohere).
        reverse (`bool`, defaults to `False`):
            Whether the angles turn the other way (nanochat).
    """

    rotary_dim: int
    pairs: Pairs = "half"
    rotary_begin: int = 0
    cos_step: int = 1
    reverse: bool = False

    def arguments(self) -> tuple[int, int, int, int, float]:
        """Returns the layout as the operators take it."""
        return (
            _PAIRS[self.pairs],
            self.rotary_begin,
            self.rotary_dim,
            self.cos_step,
            -1.0 if self.reverse else 1.0,
        )


def possible_layouts(head_dim: int, table_dim: int) -> Iterator[RopeLayout]:
    """Yields the layouts that a model may use, the common ones first; which one it is shows on random numbers.

    Args:
        head_dim (`int`):
            Size of a query and key head.
        table_dim (`int`):
            Numbers of a token in cos and sin.
    """
    for pairs, reverse in itertools.product(_PAIRS, (False, True)):
        for rotary_dim, cos_step in ((table_dim, 1), (2 * table_dim, 1), (table_dim, 2)):
            begins = sorted({0, head_dim - rotary_dim})
            if rotary_dim % 2 == 0 and rotary_dim <= min(head_dim, MAX_ROTARY_DIM):
                yield from (RopeLayout(rotary_dim, pairs, begin, cos_step, reverse) for begin in begins)


@functools.cache
def load() -> bool:
    """Makes the operators of this file available, and returns whether they are."""
    if not library.load():
        return False
    _register_fakes()
    return True


def complex_angles(freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tables of models that keep angles as complex numbers (Llama 4, DeepSeek-V2), without a copy.

    Args:
        freqs_cis (`torch.Tensor`):
            `[..., rotary_dim / 2]` complex64.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: cos and sin, float32 views of the same shape; `cos_step` is 1.
    """
    parts = torch.view_as_real(freqs_cis)
    return parts[..., 0], parts[..., 1]


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RopeLayout) -> torch.Tensor:
    """Rotates heads, in float32, rounded once.

    Args:
        x (`torch.Tensor`):
            `[..., tokens, heads, head_dim]` float32, bfloat16 or float16 on the CPU.
        cos (`torch.Tensor`):
            `[..., tokens, n]` as the model's rotary module returns it; leading dimensions of 1 stand for all of x's.
        sin (`torch.Tensor`):
            Like cos.
        layout (`RopeLayout`):
            How the model pairs numbers and angles.

    Returns:
        `torch.Tensor`: A new contiguous tensor of x's shape and dtype.

    Raises:
        RuntimeError: If a shape or dtype does not fit.
    """
    lead = x.shape[:-2]
    y = torch.ops.hf_paged.rope(_heads(x), _table(cos, lead), _table(sin, lead), *layout.arguments())
    return y.view(x.shape)


def rope_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    layout: RopeLayout,
    caches: tuple[Blocks, Blocks],
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Rotates queries and keys, and writes keys and values into their slots.

    Args:
        query (`torch.Tensor`):
            `[..., tokens, num_query_heads, key_dim]` float32, bfloat16 or float16 on the CPU; the heads may be views
            into a merged projection.
        key (`torch.Tensor`):
            `[..., tokens, num_kv_heads, key_dim]`, of the query's dtype.
        value (`torch.Tensor`):
            `[..., tokens, num_kv_heads, value_dim]`, of the query's dtype.
        angles (`tuple[torch.Tensor, torch.Tensor]`, *optional*):
            cos and sin, `[..., tokens, n]`, as the model's rotary module returns them; none in layers without
            positions, whose queries and keys are only copied.
        layout (`RopeLayout`):
            How the model pairs numbers and angles.
        caches (`tuple[Blocks, Blocks]`):
            Keys and values, `[num_blocks, num_kv_heads, block_size, head_dim]` of one dtype, written in place;
            quantized ones have heads of at most 1024.
        slot_mapping (`torch.Tensor`):
            int64 `[tokens]`, contiguous: `block_id * block_size + offset`, or a negative number for a token that is
            not stored. No slot may occur twice.

    Returns:
        `torch.Tensor`: The rotated queries, a new contiguous tensor of the query's shape and dtype.

    Raises:
        RuntimeError: If a shape, a dtype or a slot does not fit.
    """
    lead = query.shape[:-2]
    cos, sin = (None, None) if angles is None else (_table(angles[0], lead), _table(angles[1], lead))
    (keys, key_scales), (values, value_scales) = map(split, caches)
    rotated = torch.ops.hf_paged.rope_store(
        *map(_heads, (query, key, value)),
        cos,
        sin,
        keys,
        values,
        key_scales,
        value_scales,
        slot_mapping,
        *layout.arguments(),
    )
    return rotated.view(query.shape)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """Returns x as `[tokens, heads, head_dim]`, copied only if its strides need it."""
    heads = x if x.dim() == 3 else x.reshape(math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1])
    return heads if heads.shape[-1] <= 1 or heads.stride(-1) == 1 else heads.contiguous()


def _table(table: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """Returns cos or sin as `[tokens, n]`."""
    if table.dim() == 2 and len(lead) == 1:
        return table
    return table.expand(*lead, table.shape[-1]).reshape(math.prod(lead), table.shape[-1])


def _register_fakes() -> None:
    """Tells torch.compile the shapes and dtypes of the results."""

    def like(x: torch.Tensor, *_: object) -> torch.Tensor:
        return x.new_empty(x.shape)

    torch.library.register_fake("hf_paged::rope", like)
    torch.library.register_fake("hf_paged::rope_store", like)
