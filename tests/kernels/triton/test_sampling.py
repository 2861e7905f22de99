from __future__ import annotations

import importlib.util

import pytest
import torch

from hf_paged.errors import NotSupportedError
from tests.kernels.triton.interpreted import run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_tokens_are_those_of_float64_whatever_the_batch():
    results = run_interpreted("-m", "tests.kernels.triton.run_sampling_cases")
    assert len(results) >= 18 and sum(result["rows"] for result in results) > 130
    assert not [result for result in results if result["wrong"]]


def test_what_cannot_be_sampled_is_refused():
    from hf_paged.kernels.triton.sampling import MAX_VOCAB_SIZE, argmax_tokens, draw_tokens

    scores, settings, keys = torch.zeros(2, 10), torch.zeros(2, 5), torch.zeros(2, 3, dtype=torch.int64)
    for wrong in (
        lambda: argmax_tokens(scores.double()),
        lambda: argmax_tokens(scores[0]),
        lambda: argmax_tokens(scores.T),
        lambda: argmax_tokens(torch.zeros(1, MAX_VOCAB_SIZE + 1)),
        lambda: draw_tokens(scores, settings[:1], keys),
        lambda: draw_tokens(scores, settings.long(), keys),
        lambda: draw_tokens(scores, settings, keys.int()),
        lambda: draw_tokens(scores, settings, keys[:, :2]),
    ):
        with pytest.raises(NotSupportedError):
            wrong()
    assert [tensor.shape for tensor in argmax_tokens(scores[:0])] == [(0,), (0,)]
