"""How long tokens took lately: medians and worst cases of the last five minutes, five seconds at a time."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable

SECONDS = 5  # of one slot
NUM_SLOTS = 60
_PER_DECADE = 20  # a latency is known to an eighth
# From a tenth of a millisecond to a quarter of an hour.
_BOUNDS = tuple(10 ** (power / _PER_DECADE) for power in range(-4 * _PER_DECADE, 3 * _PER_DECADE + 1))

Point = tuple[int, float, float, int]  # slot, p50, p99, how many were seen


class RecentLatencies:
    """Counts latencies of one kind in a ring of slots; the oldest slot makes room for the newest.

    Observing takes half a microsecond and no lock: one thread at a time may do it. Quantiles are made when somebody
    asks, and those of a slot that is over are made once.

    Args:
        clock (`Callable[[], float]`, defaults to `time.monotonic`):
            Tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._slots: dict[int, list[int]] = {}
        self._newest = -1
        self._over: dict[int, Point] = {}  # slots that are over

    @property
    def slot(self) -> int:
        """Returns the number of the slot of now."""
        return int(self._clock() / SECONDS)

    def observe(self, seconds: float, times: int = 1) -> None:
        """Counts a latency.

        Args:
            seconds (`float`):
                The latency.
            times (`int`, defaults to 1):
                How often it was seen.
        """
        slot = self.slot
        if slot != self._newest:
            self._begin(slot)
        self._slots[slot][bisect.bisect_left(_BOUNDS, seconds)] += times

    def _begin(self, slot: int) -> None:
        self._newest = slot
        self._forget(slot)
        self._slots.setdefault(slot, [0] * (len(_BOUNDS) + 1))

    def _forget(self, slot: int) -> None:
        for kept in (self._slots, self._over):
            for old in [number for number in kept if number <= slot - NUM_SLOTS]:
                del kept[old]

    def points(self) -> list[Point]:
        """Returns the slots in which something was seen, oldest first: slot, median, 99th percentile, count."""
        now = self.slot
        self._forget(now)
        for slot, counts in self._slots.items():
            if slot not in self._over:
                point = (slot, quantile(counts, 0.5), quantile(counts, 0.99), sum(counts))
                if slot < now:
                    self._over[slot] = point
                else:
                    return [*self._over.values(), point]
        return list(self._over.values())


def quantile(counts: list[int], q: float) -> float:
    """Returns about the value that a share of the counted ones do not exceed.

    Args:
        counts (`list[int]`):
            By bucket; not all 0.
        q (`float`):
            The share.
    """
    wanted, seen = q * sum(counts), 0
    for index, count in enumerate(counts):
        if count and seen + count >= wanted:
            low = _BOUNDS[max(0, index - 1)]
            high = _BOUNDS[min(index, len(_BOUNDS) - 1)]
            return low * (high / low) ** ((wanted - seen) / count)
        seen += count
    return _BOUNDS[-1]
