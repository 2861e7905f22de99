"""Philox against the vectors published with it, and what the uniform numbers depend on."""

from __future__ import annotations

import numpy as np
import pytest

from hf_paged.generation.sampling import random
from hf_paged.generation.sampling.random import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter, key, expected):
    def words(text):
        return np.array([[int(word, 16) for word in text.split()]], dtype=np.uint64)

    assert philox4x32(words(counter), words(key)).tolist() == words(expected).tolist()


def test_numbers_do_not_depend_on_their_neighbours():
    seeds = np.array([0, 1, 2**64 - 1, 12345], dtype=np.uint64)
    branches = np.array([0, 3, 1, 0], dtype=np.uint64)
    positions = np.array([0, 7, 2**31, 5], dtype=np.uint64)
    together = uniforms(seeds, branches, positions)
    alone = [uniforms(seeds[i : i + 1], branches[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone


def test_seed_branch_and_position_all_matter():
    grid = np.array([(s, b, p) for s in (0, 1, 2**32) for b in range(4) for p in range(4)], dtype=np.uint64)
    assert len(set(uniforms(*grid.T).tolist())) == len(grid)


def test_uniform_in_the_open_interval():
    numbers = uniforms(np.full(20000, 9, np.uint64), np.zeros(20000, np.uint64), np.arange(20000, dtype=np.uint64))
    assert numbers.min() > 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


def test_largest_words_do_not_round_to_one(monkeypatch):
    monkeypatch.setattr(random, "philox4x32", lambda counters, keys: np.full((len(counters), 4), 2**32 - 1, np.uint32))
    assert random.uniforms(*np.zeros((3, 1), np.uint64))[0] < 1
