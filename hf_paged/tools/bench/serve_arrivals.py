"""When requests are sent."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Returns seconds from the start for each request; the last comes after `count / rate`.

    Gaps are drawn from a gamma distribution and scaled so that runs of different seeds offer the same load.

    Args:
        count (`int`):
            How many.
        rate (`float`):
            Requests per second; infinite: all at once.
        burstiness (`float`, defaults to 1.0):
            Shape of the distribution. 1: a Poisson process; less: bursts; more: evener; infinite: even.
        seed (`int`, defaults to 0):
            Fixes the gaps.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.ones(count) if math.isinf(burstiness) else np.random.default_rng(seed).gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    return list(times * (count / rate / times[-1]))
