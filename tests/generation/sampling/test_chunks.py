"""Chunked maxima and searches against plain torch, for sizes around the chunk's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_paged.generation.sampling.chunks import argmax_rows, chunk_maxima, entries_above


@pytest.mark.parametrize("vocab_size", [1, 5, 127, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_and_entries(vocab_size, dtype):
    torch.manual_seed(vocab_size)
    scores = (torch.randn(7, vocab_size) * 3).to(dtype)  # 16 bits: many ties
    maxima = chunk_maxima(scores)
    assert torch.equal(maxima.amax(1), scores.float().amax(1))
    assert argmax_rows(scores, maxima).tolist() == np.argmax(scores.float().numpy(), axis=1).tolist()
    thresholds = scores.float().median(dim=1).values
    rows, columns, values = entries_above(scores, maxima, thresholds)
    expected = (scores.float() >= thresholds[:, None]).nonzero()
    assert np.stack((rows, columns), axis=1).tolist() == expected.tolist()
    assert np.array_equal(values, scores.float()[expected[:, 0], expected[:, 1]].numpy())


def test_first_of_equal_maxima_wins():
    scores = torch.zeros(1, 300)
    scores[0, [130, 140, 290]] = 5
    assert argmax_rows(scores, chunk_maxima(scores)).tolist() == [130]


@pytest.mark.parametrize("column", [0, 127, 128, 299])
def test_nan_shows_in_the_maximum(column):
    scores = torch.zeros(2, 300)
    scores[1, column] = torch.nan
    assert chunk_maxima(scores).amax(1).isfinite().tolist() == [True, False]
