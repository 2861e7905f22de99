"""Small whole numbers side by side in 32-bit words, as GPTQ, AWQ and compressed-tensors store them."""

from __future__ import annotations

import torch

_WORD = 32


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Takes words apart: a stream of `bits`-wide numbers, lowest bits first, that may cross from word to word.

        words    | w0 .......................... | w1 .......................... |
        3 bits   |v0 |v1 |v2 | ...  |v9 |  v10  |v11| ...

    Args:
        words (`torch.Tensor`):
            int32, of a length along `dim` that is a multiple of `bits` unless these divide 32.
        bits (`int`):
            1 to 8.
        dim (`int`):
            Along which numbers are packed.

    Returns:
        `torch.Tensor`: uint8, `32 / bits` times as long along `dim`.
    """
    words = words.movedim(dim, 0)
    period = 1 if _WORD % bits == 0 else bits  # words after which the pattern repeats
    count = period * _WORD // bits
    rows = words.reshape(words.shape[0] // period, period, *words.shape[1:])
    numbers = torch.empty(rows.shape[0], count, *words.shape[1:], dtype=torch.uint8, device=words.device)
    for number in range(count):
        word, offset = divmod(number * bits, _WORD)
        value = rows[:, word] >> offset
        if offset + bits > _WORD:
            low = value & ((1 << (_WORD - offset)) - 1)  # an int32's sign comes along with a shift
            value = low | (rows[:, word + 1] << (_WORD - offset))
        numbers[:, number] = (value & ((1 << bits) - 1)).to(torch.uint8)
    return numbers.flatten(0, 1).movedim(0, dim)


def pack(numbers: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The inverse of `unpack`; the last word is filled up with zeros.

    Args:
        numbers (`torch.Tensor`):
            uint8, each below `2 ** bits`.
        bits (`int`):
            1 to 8.
        dim (`int`):
            Along which to pack.

    Returns:
        `torch.Tensor`: int32.
    """
    numbers = numbers.movedim(dim, 0)
    period = 1 if _WORD % bits == 0 else bits
    count = period * _WORD // bits
    length = -(-numbers.shape[0] // count)
    padded = numbers.new_zeros(length * count, *numbers.shape[1:])
    padded[: numbers.shape[0]] = numbers
    rows = padded.view(length, count, *numbers.shape[1:])
    words = torch.zeros(length, period, *numbers.shape[1:], dtype=torch.int32, device=numbers.device)
    for number in range(count):
        word, offset = divmod(number * bits, _WORD)
        value = rows[:, number].to(torch.int32)
        words[:, word] |= value << offset
        if offset + bits > _WORD:
            words[:, word + 1] |= value >> (_WORD - offset)
    return words.flatten(0, 1).movedim(0, dim)
