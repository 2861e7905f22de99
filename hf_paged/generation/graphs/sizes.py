"""Which decoding steps graphs are captured for: steps of other sizes are padded to the next.

    requests       1  2  4  8  16  24 ... 64  80 ... 128  160  192 ...  max_num_seqs
    contexts       512         2048           8192        ...           max_model_len

A graph fixes how many programs each kernel has. That depends on the requests, and, where attention divides a request's
keys, on the longest context; how much of it each program does is read on the device. So contexts need few steps: a part
without keys ends at once, and a wider block table costs a few bytes more on the way to the device.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

SMALLEST_CONTEXT = 512
CONTEXT_FACTOR = 4
# From a size on, sizes lie so far apart; below the first, by factors of two.
_DISTANCES = ((8, 8), (64, 16), (128, 32))


class GraphShape(NamedTuple):
    """The steps that a graph can run: up to so many requests, with contexts of up to so many blocks.

    Args:
        num_requests (`int`):
            Requests, padding included.
        table_width (`int`):
            Blocks of a request, padding included.
    """

    num_requests: int
    table_width: int


def batch_sizes(max_num_seqs: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns the numbers of requests that graphs are captured for, ascending.

    Args:
        max_num_seqs (`int`):
            Requests that run at the same time.
        asked (`Sequence[int]`, *optional*):
            What the user wants; those beyond `max_num_seqs` are left out.
    """
    if asked is not None:
        return tuple(sorted({size for size in asked if size <= max_num_seqs}))
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + next(distance for start, distance in reversed(_DISTANCES) if sizes[-1] >= start))
    return tuple(size for size in sizes if size < max_num_seqs) + (max_num_seqs,)


def table_widths(max_model_len: int, block_size: int) -> tuple[int, ...]:
    """Returns the widths of block tables, in blocks, that graphs are captured for, ascending.

    Args:
        max_model_len (`int`):
            The longest context.
        block_size (`int`):
            Tokens per block.
    """
    widest = -(-max_model_len // block_size)
    widths, width = [], max(SMALLEST_CONTEXT // block_size, 1)
    while 2 * width <= widest:  # else the widest serves as well
        widths.append(width)
        width *= CONTEXT_FACTOR
    return (*widths, widest)


class ShapeTable:
    """Finds the shape that a step is padded to.

    Args:
        sizes (`Sequence[int]`):
            Of `batch_sizes`.
        widths (`Sequence[int]`):
            Of `table_widths`.
    """

    def __init__(self, sizes: Sequence[int], widths: Sequence[int]):
        self.sizes = tuple(sizes)
        self.widths = tuple(widths)

    def all(self) -> list[GraphShape]:
        """Returns all shapes, the largest first: later ones fit into the memory of the first."""
        return sorted((GraphShape(size, width) for size in self.sizes for width in self.widths), reverse=True)

    def fitting(self, num_requests: int, table_width: int) -> list[GraphShape]:
        """Returns the shapes that a step may be padded to, the best first: none of more than twice its least size.

        Args:
            num_requests (`int`):
                Requests of the step.
            table_width (`int`):
                Blocks of its longest request.
        """
        first = bisect.bisect_left(self.sizes, num_requests)
        sizes = [size for size in self.sizes[first:] if size <= 2 * self.sizes[first]]
        widths = self.widths[bisect.bisect_left(self.widths, table_width) :]
        return [GraphShape(size, width) for size in sizes for width in widths]
