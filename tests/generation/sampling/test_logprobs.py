"""Log-probabilities and ranks against float64 and the formula of a full Transformers forward."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hf_paged.errors import NonFiniteLogitsError
from hf_paged.generation.sampling import chunks
from hf_paged.generation.sampling.logprobs import LOWEST_LOGPROB, prompt_logprobs, token_logprobs


def check_row(result, logits, token_id, k):
    expected = logits.double().log_softmax(-1)
    best = logits.topk(min(k, len(logits))).values.tolist()
    assert next(iter(result)) == token_id
    assert k <= len(result) <= k + 1
    for key, entry in result.items():
        assert entry.logprob == pytest.approx(float(expected[key]), abs=1e-5)
        assert entry.rank == 1 + int((logits > logits[key]).sum())
    others = [float(logits[key]) for key in result if key != token_id or float(logits[key]) in best]
    assert sorted(others, reverse=True)[:k] == pytest.approx(best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_ranks_and_number_of_entries(dtype, monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK_NUMEL", 4000)  # several blocks
    torch.manual_seed(0)
    logits = (torch.randn(12, 1000) * 4).to(dtype)
    token_ids = torch.randint(0, 1000, (12,)).tolist()
    token_ids[0] = int(logits[0].argmax())
    for k in (0, 1, 5, 20):
        results = token_logprobs(logits, token_ids, [k] * 12)
        for row in range(12):
            check_row(results[row], logits[row].float(), token_ids[row], k)
    mixed = token_logprobs(logits, token_ids, [0, 20, 3] * 4)
    assert mixed[1] == token_logprobs(logits[1:2], token_ids[1:2], [20])[0]
    assert [len(result) for result in mixed[3::3]] == [1, 1, 1]


def test_equal_tokens_share_a_rank():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]])
    (result,) = token_logprobs(logits, [4], [4])
    assert {token_id: entry.rank for token_id, entry in result.items()} == {4: 3, 1: 1, 3: 1, 2: 3}


def test_prompt_logprobs_equal_the_full_forward_formula():
    torch.manual_seed(3)
    logits = torch.randn(30, 500) * 3
    prompt = torch.randint(0, 500, (31,))
    expected = logits.log_softmax(-1).gather(1, prompt[1:, None])[:, 0]
    results = prompt_logprobs(logits, prompt[1:].tolist(), 2)
    values = torch.tensor([result[token].logprob for result, token in zip(results, prompt[1:].tolist(), strict=True)])
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    assert prompt_logprobs(logits[:0], [], 2) == []


def test_impossible_tokens_stay_valid_json():
    """vllm-project/vllm#10234"""
    logits = torch.full((1, 300), -math.inf)
    logits[0, [4, 290]] = 1.0
    (result,) = prompt_logprobs(logits, [0], 5)
    assert list(result) == [0, 4, 290]
    assert result[0].logprob == LOWEST_LOGPROB and result[0].rank == 3
    json.dumps([entry.logprob for entry in result.values()], allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_prompt_logits_that_are_not_finite(value):
    logits = torch.zeros(3, 300)
    logits[2, 299] = value
    with pytest.raises(NonFiniteLogitsError, match="number 2"):
        prompt_logprobs(logits, [0, 0, 0], 1)
