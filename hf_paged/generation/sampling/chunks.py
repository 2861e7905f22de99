"""Finding the large entries of long rows quickly.

A row is cut into chunks and each chunk's maximum is taken, in one pass at memory speed. All later questions (the best
entry, the entries above a threshold) then read only the few chunks whose maximum is large enough:

    row     | 3 1 9 2 | 0 4 1 1 | 7 7 2 5 | 1 |        (the last chunk may be shorter)
    maxima  |    9    |    4    |    7    | 1 |
    >= 6    | read    |         | read    |   |

All work is row by row, so that a row's result has the same bits whatever other rows are beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

CHUNK_SIZE = 128
WIDE_CHUNK_SIZE = 1024  # where only the best entry is asked for: one chunk a row is read again, so fewer are better
BLOCK_NUMEL = 1 << 20  # numbers of a float32 copy at a time (4 MiB), so that memory is bounded and caches are used


def row_blocks(num_rows: int, row_size: int) -> Iterator[slice]:
    """Yields slices of rows that hold about `BLOCK_NUMEL` numbers each.

    Args:
        num_rows (`int`):
            How many rows there are.
        row_size (`int`):
            Numbers per row.
    """
    step = max(1, BLOCK_NUMEL // row_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def split_chunks(scores: torch.Tensor, chunk_size: int = CHUNK_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Views rows as whole chunks and a rest.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`, contiguous within a row.
        chunk_size (`int`, defaults to `CHUNK_SIZE`):
            Entries of a chunk.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[rows, vocab_size // chunk_size, chunk_size]` and
        `[rows, vocab_size % chunk_size]`, both views.
    """
    whole = scores.shape[1] // chunk_size * chunk_size
    return scores[:, :whole].unflatten(1, (whole // chunk_size, chunk_size)), scores[:, whole:]


def wide_maxima(scores: torch.Tensor) -> torch.Tensor:
    """Computes the maximum of each wide chunk; NaN if the chunk holds one.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`, any floating dtype; the maxima have the same.

    Returns:
        `torch.Tensor`: `[rows, ceil(vocab_size / WIDE_CHUNK_SIZE)]`.
    """
    return _reduce(scores, "amax", WIDE_CHUNK_SIZE)


def chunk_maxima(scores: torch.Tensor) -> torch.Tensor:
    """Computes the maximum of each chunk; NaN if the chunk holds one.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`, any floating dtype.

    Returns:
        `torch.Tensor`: `[rows, ceil(vocab_size / CHUNK_SIZE)]` float32.
    """
    # 16-bit numbers are widened first: exact, and faster than reducing them as they are.
    blocks = [_reduce(scores[block].float(), "amax") for block in row_blocks(*scores.shape)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def chunk_sums(values: torch.Tensor) -> torch.Tensor:
    """Computes the sum of each chunk.

    Args:
        values (`torch.Tensor`):
            `[rows, vocab_size]` float32.

    Returns:
        `torch.Tensor`: `[rows, ceil(vocab_size / CHUNK_SIZE)]` float32.
    """
    return _reduce(values, "sum")


def _reduce(values: torch.Tensor, operator: str, chunk_size: int = CHUNK_SIZE) -> torch.Tensor:
    chunks, rest = split_chunks(values, chunk_size)
    reduced = getattr(chunks, operator)(dim=2) if chunks.shape[1] else values[:, :0]
    if not rest.shape[1]:
        return reduced
    return torch.cat((reduced, getattr(rest, operator)(dim=1, keepdim=True)), dim=1)


def argmax_rows(scores: torch.Tensor, maxima: torch.Tensor, chunk_size: int = CHUNK_SIZE) -> torch.Tensor:
    """Finds the first of the largest entries of each row.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]` without NaN.
        maxima (`torch.Tensor`):
            Its `chunk_maxima`, or the maxima of chunks of another size.
        chunk_size (`int`, defaults to `CHUNK_SIZE`):
            Entries of a chunk.

    Returns:
        `torch.Tensor`: `[rows]` int64, on the device.
    """
    chunk = maxima.argmax(dim=1)
    values, columns = gather_chunks(scores, torch.arange(len(scores), device=scores.device), chunk, chunk_size)
    inside = values.argmax(dim=1, keepdim=True)
    return columns.gather(1, inside)[:, 0]


def gather_chunks(
    scores: torch.Tensor, rows: torch.Tensor, chunks: torch.Tensor, chunk_size: int = CHUNK_SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads one chunk for each (row, chunk) pair.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`.
        rows (`torch.Tensor`):
            `[n]` int64.
        chunks (`torch.Tensor`):
            `[n]` int64.
        chunk_size (`int`, defaults to `CHUNK_SIZE`):
            Entries of a chunk.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[n, chunk_size]` float32 values, -inf past the end of a row, and their
        columns (int64).
    """
    columns = chunks[:, None] * chunk_size + torch.arange(chunk_size, device=scores.device)
    last = scores.shape[1] - 1
    values = scores[rows[:, None], columns.clamp(max=last)].float()
    return values.masked_fill_(columns > last, -torch.inf), columns


def entries_above(
    scores: torch.Tensor, maxima: torch.Tensor, thresholds: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists the entries that are at least their row's threshold, by row and then by column.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]` without NaN.
        maxima (`torch.Tensor`):
            Its `chunk_maxima`.
        thresholds (`torch.Tensor`):
            `[rows]` float32.

    Returns:
        `tuple[np.ndarray, np.ndarray, np.ndarray]`: rows and columns (int64) and values (float32) of the entries.
    """
    chunks, rest = split_chunks(scores)
    row, chunk = (maxima[:, : chunks.shape[1]] >= thresholds[:, None]).nonzero(as_tuple=True)
    values = chunks[row, chunk].float()
    pair, offset = (values >= thresholds[row, None]).nonzero(as_tuple=True)
    found = [(row[pair], chunk[pair] * CHUNK_SIZE + offset, values[pair, offset])]
    if rest.shape[1]:
        rest = rest.float()
        row, offset = (rest >= thresholds[:, None]).nonzero(as_tuple=True)
        found.append((row, offset + chunks.shape[1] * CHUNK_SIZE, rest[row, offset]))
    rows, columns, entries = (torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True))
    order = np.argsort(rows, kind="stable")  # the rest's columns are the largest, so they stay ordered within a row
    return rows[order], columns[order], entries[order]
