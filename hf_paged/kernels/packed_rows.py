"""Quantized weights as operators read them: rows of codes, each group of codes behind its scale and its zero.

    a row     | float32 scale | float32 zero | codes of group 0 | scale | zero | codes of group 1 | ...
    number    (code - zero) * scale
    groups    equal, of a multiple of 32 numbers; or one for the whole row, filled up with zeros to a multiple of 32

    Q4        uint8            32 numbers in 16 bytes: byte i holds number i in its low half, number i + 16 in its high
    Q8        uint8            a signed byte each
    W8A8      int16            a signed byte each, one group; x is quantized too, token by token, and then multiplied
    E4M3      int8             a float8 each; the zero is 0. No float8 tensor: parameters of floating point decide a
                               model's dtype, and are converted with it

A packed weight is one tensor `[out_features, bytes of a row]`, so that whatever takes rows of a weight apart (fused
projections, shards) does so here too. Its dtype and the bytes of a row for `in_features` numbers say what it is: a row
of 4-bit codes is shorter than `in_features` bytes, one of 8-bit codes longer.
"""

from __future__ import annotations

import dataclasses
import enum

import torch

CHUNK = 32  # numbers of which groups are multiples
HEAD = 8  # bytes before a group's codes


class Codes(enum.Enum):
    """What stands for a number."""

    Q4 = 4
    Q8 = 8
    E4M3 = 9
    W8A8 = 10

    @property
    def bits(self) -> int:
        """Returns the bits of a code."""
        return 4 if self is Codes.Q4 else 8

    @property
    def tensor_dtype(self) -> torch.dtype:
        """Returns the dtype of packed rows."""
        return {Codes.E4M3: torch.int8, Codes.W8A8: torch.int16}.get(self, torch.uint8)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A quantized weight, taken apart.

    Args:
        codes (`torch.Tensor`):
            `[rows, k]`: uint8 below 16 (Q4), int8 (Q8, W8A8) or float8_e4m3fn (E4M3).
        scale (`torch.Tensor`):
            `[rows, groups]` float32.
        zero (`torch.Tensor`):
            `[rows, groups]` float32, in units of the codes; 0 for E4M3 and W8A8.
        kind (`Codes`):
            What the codes are.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    kind: Codes


def can_pack(in_features: int, num_groups: int) -> bool:
    """Returns whether rows of so many equal groups can be packed.

    Args:
        in_features (`int`):
            Numbers of a row.
        num_groups (`int`):
            Groups of a row.
    """
    return in_features > 0 and (num_groups == 1 or in_features % (num_groups * CHUNK) == 0)


def is_packed(weight: torch.Tensor) -> bool:
    """Returns whether a tensor where a weight is expected consists of packed rows.

    Args:
        weight (`torch.Tensor`):
            Any tensor.
    """
    return weight.dtype in (torch.uint8, torch.int8, torch.int16)


def pack_rows(numbers: Numbers) -> torch.Tensor:
    """Packs a weight.

    Args:
        numbers (`Numbers`):
            The weight; `can_pack` must hold.

    Returns:
        `torch.Tensor`: `[rows, bytes of a row]` in the dtype of the kind.
    """
    rows, k = numbers.codes.shape
    num_groups = numbers.scale.shape[1]
    padded = -(-k // CHUNK) * CHUNK
    codes = numbers.codes.contiguous().view(torch.uint8)
    if padded > k:  # only with one group; whatever they stand for is multiplied with zeros
        codes = torch.nn.functional.pad(codes, (0, padded - k))
    codes = codes.view(rows, num_groups, -1)
    if numbers.kind is Codes.Q4:
        chunks = codes.view(rows, num_groups, -1, 2, CHUNK // 2)
        codes = (chunks[..., 0, :] | chunks[..., 1, :] << 4).flatten(2)
    head = torch.stack([numbers.scale.float(), numbers.zero.float()], dim=-1).contiguous().view(torch.uint8)
    return torch.cat([head, codes], dim=-1).flatten(1).view(numbers.kind.tensor_dtype)


def unpack_rows(packed: torch.Tensor, in_features: int) -> Numbers:
    """Takes a packed weight apart: the inverse of `pack_rows`.

    Args:
        packed (`torch.Tensor`):
            `[rows, bytes of a row]`.
        in_features (`int`):
            Numbers of a row.

    Returns:
        `Numbers`: The weight.

    Raises:
        ValueError: If a row of so many bytes cannot hold so many numbers.
    """
    kind, num_groups = format_of(packed, in_features)
    padded = -(-in_features // CHUNK) * CHUNK
    groups = packed.contiguous().view(torch.uint8).view(len(packed), num_groups, -1)
    scale, zero = groups[..., :HEAD].contiguous().view(torch.float32).unbind(-1)
    codes = groups[..., HEAD:]
    if kind is Codes.Q4:
        chunks = codes.unflatten(-1, (-1, CHUNK // 2))
        codes = torch.stack([chunks & 15, chunks >> 4], dim=-2)
    codes = codes.reshape(len(packed), padded)[:, :in_features].contiguous()
    codes = codes.view({Codes.Q4: torch.uint8, Codes.E4M3: torch.float8_e4m3fn}.get(kind, torch.int8))
    return Numbers(codes, scale.contiguous(), zero.contiguous(), kind)


def format_of(packed: torch.Tensor, in_features: int) -> tuple[Codes, int]:
    """Returns the codes and the number of groups of packed rows.

    Args:
        packed (`torch.Tensor`):
            `[..., bytes of a row]`.
        in_features (`int`):
            Numbers of a row.

    Raises:
        ValueError: If a row of so many bytes cannot hold so many numbers.
    """
    size, padded = packed.shape[-1] * packed.element_size(), -(-in_features // CHUNK) * CHUNK
    by_size = Codes.Q8 if size > padded else Codes.Q4
    kind = {torch.int8: Codes.E4M3, torch.int16: Codes.W8A8}.get(packed.dtype, by_size)
    rest = size - padded * kind.bits // 8
    if rest <= 0 or rest % HEAD or not can_pack(in_features, rest // HEAD):
        raise ValueError(f"Packed rows of {size} bytes cannot hold {in_features} numbers each.")
    return kind, rest // HEAD


def dequantized(packed: torch.Tensor, in_features: int) -> torch.Tensor:
    """Returns the weight in float32, `[rows, in_features]`.

    Args:
        packed (`torch.Tensor`):
            `[rows, bytes of a row]`.
        in_features (`int`):
            Numbers of a row.
    """
    numbers = unpack_rows(packed, in_features)
    num_groups = numbers.scale.shape[1]
    weight = numbers.codes.float().view(len(packed), num_groups, -1)
    weight.sub_(numbers.zero[..., None]).mul_(numbers.scale[..., None])
    return weight.view(len(packed), in_features)


def rounded_tokens(x: torch.Tensor) -> torch.Tensor:
    """Returns activations as W8A8 multiplies them: a token's largest absolute number is 127.

    Args:
        x (`torch.Tensor`):
            `[..., in_features]`.

    Returns:
        `torch.Tensor`: The same in x's dtype, float32 at least.
    """
    x = x if x.dtype == torch.float64 else x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale == 0, x, (x / scale).round() * scale)


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies with packed rows in plain torch: what native operators are tested against, and used without them.

    Args:
        x (`torch.Tensor`):
            `[..., in_features]`.
        weight (`torch.Tensor`):
            `[out_features, bytes of a row]`.
        bias (`torch.Tensor`, *optional*):
            `[out_features]`.

    Returns:
        `torch.Tensor`: `[..., out_features]` in x's dtype.
    """
    dense = dequantized(weight, x.shape[-1])
    bias = None if bias is None else bias.to(x.dtype)
    if format_of(weight, x.shape[-1])[0] is not Codes.W8A8:
        return torch.nn.functional.linear(x, dense.to(x.dtype), bias)
    rounded = rounded_tokens(x)
    product = torch.nn.functional.linear(rounded, dense.to(rounded.dtype)).to(x.dtype)
    return product if bias is None else product + bias
