"""Quantized K/V: blocks of codes of one byte, and a float16 scale for each slot and head.

    codes[block, kv_head]     | slot 0: D codes | slot 1 | ... | slot block_size - 1 |
    scales[block, kv_head]    | slot 0: 1 scale | slot 1 | ... | slot block_size - 1 |

    number  code * scale
    scale   the largest absolute number of the head / the largest code that is used, when the token is stored

A slot depends on its token alone, so results do not depend on how prompts were cut into chunks, and a block can be
shared and copied as it is. A head that holds a NaN or an infinity becomes one of NaN.

The largest code of float8_e5m2 could be 57344, and the float16 scales of usual numbers would then be too small to be
exact; as its numbers are as close to each other at 448 as at 57344, it is used up to there, as float8_e4m3 is.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import torch

DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 448.0}
ALL_DTYPES = frozenset(LARGEST)
SCALE_DTYPE = torch.float16


def cache_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """Returns the dtype of the codes that a setting asks for; `None` if K/V are stored as they are.

    Args:
        kv_cache_dtype (`str`):
            `"auto"`, or a name in `DTYPES`.
    """
    return DTYPES.get(kv_cache_dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """The keys or the values of a layer as codes and scales, wherever a layer's tensor is expected.

    Args:
        codes (`torch.Tensor`):
            `[num_blocks, num_kv_heads, block_size, head_dim]`, contiguous, of one of `ALL_DTYPES`.
        scales (`torch.Tensor`):
            float16 `[num_blocks, num_kv_heads, block_size]`, contiguous.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """Returns `[num_blocks, num_kv_heads, block_size, head_dim]`."""
        return self.codes.shape


Blocks: TypeAlias = torch.Tensor | QuantizedBlocks


def split(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the tensor of numbers, or of codes and that of their scales.

    Args:
        blocks (`Blocks`):
            Keys or values of a layer.
    """
    return (blocks.codes, blocks.scales) if isinstance(blocks, QuantizedBlocks) else (blocks, None)


def tensors_of(*caches: Blocks) -> list[torch.Tensor]:
    """Returns all tensors, each `[num_blocks, ...]`.

    Args:
        caches (`Blocks`):
            Keys and values of layers.
    """
    return [tensor for blocks in caches for tensor in split(blocks) if tensor is not None]


def quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes, and a scale for each row.

    Args:
        x (`torch.Tensor`):
            `[..., head_dim]`.
        dtype (`torch.dtype`):
            Of the codes.

    Returns:
        Codes `[..., head_dim]`, and float16 scales `[...]`.
    """
    numbers, largest = x.float(), LARGEST[dtype]
    scales = (numbers.abs().amax(-1) / largest).to(SCALE_DTYPE)
    wide = scales.float().unsqueeze(-1)
    scaled = torch.where(wide > 0, numbers / wide, 0.0).nan_to_num(nan=0.0).clamp(-largest, largest)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales


def numbers(codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers that codes stand for, or what are numbers already.

    Args:
        codes (`torch.Tensor`):
            `[..., head_dim]`.
        scales (`torch.Tensor`, *optional*):
            `[...]`.
        dtype (`torch.dtype`):
            Of the result.
    """
    return codes.to(dtype) if scales is None else codes.to(dtype) * scales.to(dtype).unsqueeze(-1)


def picked(blocks: Blocks, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy of some blocks, as numbers, `[k, num_kv_heads, block_size, head_dim]`.

    Args:
        blocks (`Blocks`):
            Keys or values of a layer.
        block_ids (`torch.Tensor`):
            int64 `[k]`.
        dtype (`torch.dtype`):
            Of the result.
    """
    codes, scales = split(blocks)
    if scales is None:
        return codes.index_select(0, block_ids).to(dtype)
    return numbers(
        as_bytes(codes).index_select(0, block_ids).view(codes.dtype), scales.index_select(0, block_ids), dtype
    )


def write_rows(blocks: Blocks, rows: torch.Tensor, new: torch.Tensor) -> None:
    """Stores heads.

    Args:
        blocks (`Blocks`):
            Keys or values of a layer.
        rows (`torch.Tensor`):
            int64 `[k]`: (block * num_kv_heads + head) * block_size + slot.
        new (`torch.Tensor`):
            `[k, head_dim]`.
    """
    codes, scales = split(blocks)
    if scales is not None:
        new, new_scales = quantized(new, codes.dtype)
        scales.view(-1).index_copy_(0, rows, new_scales)
        codes, new = as_bytes(codes), as_bytes(new)
    codes.view(-1, codes.shape[3]).index_copy_(0, rows, new)


def as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Returns codes as signed bytes, which torch can pick and copy on every device; float8 it cannot.

    Args:
        codes (`torch.Tensor`):
            Of one of `ALL_DTYPES`.
    """
    return codes.view(torch.int8)
