"""Temperature, top-k, top-p and min-p against Transformers' own warpers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_paged.generation.sampling.chunks import chunk_maxima
from hf_paged.generation.sampling.truncation import Truncation, truncate


def transformers_scores(scores, temperature, top_k, top_p, min_p):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k:
        warpers.append(TopKLogitsWarper(int(top_k)))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(float(top_p)))
    if min_p:
        warpers.append(MinPLogitsWarper(float(min_p)))
    return warpers(None, scores.float())


def kept(scores, temperature, top_k, top_p, min_p):
    """Returns for each row (token ids, probabilities), best first."""
    settings = Truncation(*(np.asarray(value) for value in (temperature, top_k, top_p, min_p)))
    rows = {}
    for group in truncate(scores, chunk_maxima(scores), settings):
        for i, row in enumerate(group.rows):
            count = group.counts[i]
            one = group[np.full(1, i)]
            ids = [int(one.tokens_at(np.array([place]))[0]) for place in range(count)]
            rows[int(row)] = (ids, np.diff(group.cumulative[i, :count], prepend=0) / group.cumulative[i, count - 1])
    assert sorted(rows) == list(range(len(scores)))
    return [rows[row] for row in range(len(scores))]


GRID = [
    (t, k, p, m)
    for t, k, p, m in itertools.product(
        (1.0, 0.3, 1.7), (0, 1, 5, 50, 900, 5000), (1.0, 0.9, 0.3, 1e-6), (0, 0.05, 1.0)
    )
    if k or p < 1 or m
]


@pytest.mark.parametrize("scale", [0.01, 3.0, 12.0])
def test_same_tokens_and_probabilities_as_transformers(scale):
    torch.manual_seed(int(scale * 100))
    scores = torch.randn(len(GRID), 1000) * scale
    ours = kept(scores, *(np.array(column, dtype=d) for column, d in zip(zip(*GRID, strict=True), "fiff", strict=True)))
    for row, parameters in enumerate(GRID):
        expected = transformers_scores(scores[row : row + 1], *(float(np.float32(v)) for v in parameters))[0]
        ids, probabilities = ours[row]
        assert sorted(ids) == expected.isfinite().nonzero()[:, 0].tolist(), parameters
        torch.testing.assert_close(torch.tensor(probabilities), expected.double().softmax(-1)[ids], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_at_the_border(dtype):
    torch.manual_seed(0)
    scores = torch.randn(20, 4000).to(dtype)  # few different values
    for parameters in [(1.0, 50, 1.0, 0), (1.0, 0, 0.5, 0), (0.7, 100, 0.8, 0.1), (1.0, 0, 1.0, 0.3)]:
        ours = kept(scores, *(np.full(20, value) for value in parameters))
        expected = transformers_scores(scores, *parameters)
        for row, (ids, _) in enumerate(ours):
            remaining = scores[row].float()[expected[row].isfinite()]
            # top-p may cut among equal scores, and which of those remain is open in Transformers
            assert sorted(scores[row].float()[ids].tolist()) == sorted(remaining.tolist())
            assert len(set(ids)) == len(ids)


def test_ties_with_the_kth_all_remain():
    scores = torch.full((1, 400), -1.0)
    scores[0, 7::50] = 2.0
    ((ids, probabilities),) = kept(scores, [1.0], [3], [1.0], [0.0])
    assert ids == list(range(7, 400, 50))
    assert np.allclose(probabilities, 1 / 8)


def test_equal_scores_at_the_border_of_top_p_go_by_id():
    ((ids, _),) = kept(torch.zeros(1, 10), [1.0], [0], [0.5], [0.0])
    assert ids == [0, 1, 2, 3, 4]


def test_masked_tokens_are_never_kept():
    scores = torch.full((3, 1000), -torch.inf)
    scores[:, 10:14] = torch.arange(4.0)
    for ids, _ in kept(scores, [1.0] * 3, [50, 0, 0], [1.0, 0.999999, 1.0], [0, 0, 1e-9]):
        assert ids == [13, 12, 11, 10]


def test_extreme_temperatures():
    scores = torch.tensor([[1.0, 2.0, 3.0, 2.5]])
    ((ids, probabilities),) = kept(scores, [1e-40], [3], [1.0], [0.0])
    assert ids == [2] and probabilities.tolist() == [1.0]
    ((ids, probabilities),) = kept(scores, [1e38], [3], [1.0], [0.0])
    assert ids == [2, 3, 1] and np.allclose(probabilities, 1 / 3)


def test_flat_and_peaked_rows_together():
    """The guesses at top-p's threshold hold for one row, fail once for another, and twice for a third."""
    torch.manual_seed(1)
    scores = torch.stack([torch.randn(20000) * scale for scale in (8.0, 2.2, 0.001)])
    top_p = [0.9, 0.9, 0.3]
    ours = kept(scores, [1.0] * 3, [0] * 3, top_p, [0] * 3)
    expected = [int(transformers_scores(scores[i : i + 1], 1.0, 0, top_p[i], 0).isfinite().sum()) for i in range(3)]
    assert expected[0] < 300 < 3000 < expected[1] and 5900 < expected[2] < 6100
    for (ids, _), count, row in zip(ours, expected, scores, strict=True):
        # Transformers adds up 20,000 float32 probabilities; its border is that exact
        assert abs(len(ids) - count) <= 1
        assert set(ids) == set(row.topk(len(ids)).indices.tolist())
