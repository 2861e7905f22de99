"""Packed masks of allowed tokens, as grammars produce them."""

from __future__ import annotations

import torch

WORD_BITS = 32


def apply_bitmask(scores: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Removes the tokens whose bit is not set, in place.

        word        |            0             |            1             | ...
        bit         | 0 | 1 | 2 |     ...   31 | 0 | 1 |        ...    31 |
        token       | 0 | 1 | 2 |     ...   31 | 32| 33|        ...    63 |

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]` float32.
        bitmask (`torch.Tensor`):
            `[rows, ceil(vocab_size / 32)]` int32; a row of -1 allows all tokens.
    """
    num_rows, vocab_size = scores.shape
    expected = (num_rows, -(-vocab_size // WORD_BITS))
    assert tuple(bitmask.shape) == expected and bitmask.dtype == torch.int32, (
        f"the bitmask must be int32 of shape {expected}, got {bitmask.dtype} of shape {tuple(bitmask.shape)}"
    )
    bitmask = bitmask.to(scores.device)
    rows = (bitmask != -1).any(dim=1).nonzero()[:, 0]
    if not len(rows):
        return
    octets = bitmask[rows].contiguous().view(torch.uint8)  # little-endian, as all that torch runs on
    bits = torch.arange(256, device=scores.device)[:, None] >> torch.arange(8, device=scores.device) & 1
    # Adding 0 or -inf, looked up eight at a time, is several times faster than a masked fill.
    terms = torch.where(bits == 1, 0.0, -torch.inf).index_select(0, octets.flatten().int())
    terms = terms.view(len(rows), -1)[:, :vocab_size]
    if len(rows) == num_rows:
        scores += terms
    else:
        scores[rows] += terms
