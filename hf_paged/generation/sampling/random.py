"""Random numbers that depend on (seed, branch, position) alone: no generator, no state, no batch mates."""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Computes Philox4x32-10, a counter-based random number generator.

    Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Args:
        counters (`np.ndarray`):
            `[n, 4]` words of 32 bits, in any unsigned dtype that holds them.
        keys (`np.ndarray`):
            `[n, 2]` words of 32 bits.

    Returns:
        `np.ndarray`: `[n, 4]` uint32, random words.
    """
    c0, c1, c2, c3 = counters.astype(np.uint64).T
    k0, k1 = keys.astype(np.uint64).T
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW, (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniforms(seeds: np.ndarray, branches: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draws one uniform number for each (seed, branch, position).

    Args:
        seeds (`np.ndarray`):
            `[n]` uint64, a request's seed (modulo 2**64); the key of the generator.
        branches (`np.ndarray`):
            `[n]` which of the prompt's answers; a word of the counter.
        positions (`np.ndarray`):
            `[n]` how many tokens the answer has; a word of the counter.

    Returns:
        `np.ndarray`: `[n]` float64, each strictly between 0 and 1, with 52 random bits.
    """
    counters = np.zeros((len(seeds), 4), dtype=np.uint64)
    counters[:, 0] = positions
    counters[:, 1] = branches
    keys = np.stack((seeds & _LOW, seeds >> _HALF), axis=1)
    words = philox4x32(counters, keys).astype(np.float64)
    # 52 bits and a half: with one bit more the largest value would round to 1.
    return (np.floor(words[:, 0] / 64) * 2.0**26 + np.floor(words[:, 1] / 64) + 0.5) * 2.0**-52
