"""The sampler as a whole: independence of batch mates, distributions, failures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_paged.generation.request import Request
from hf_paged.generation.sampling.chunks import chunk_maxima
from hf_paged.generation.sampling.params import SamplingParams
from hf_paged.generation.sampling.sampler import Sampler
from hf_paged.generation.sampling.truncation import chunk_weights

KINDS = [
    {},
    {"temperature": 0},
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    {"top_p": 0.9},
    {"top_p": 0.99, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_k": 1, "temperature": 3.0},
    {"top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"min_tokens": 5, "logprobs": 3},
    {"logit_bias": {5: 4.0}, "top_k": 300, "logprobs": 0},
    {"allowed_token_ids": [4, 7, 900]},
]


def make_request(number, *, output=(), seed=None, branch=0, **params):
    request = Request(
        f"request-{number}", [1, 2, 3 + number], SamplingParams(**params), max_tokens=1000,
        stop_token_ids=frozenset({0}), seed=number if seed is None else seed, branch=branch,
    )  # fmt: skip
    request.token_ids += output
    return request


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1000, 5000])
def test_same_token_alone_and_in_any_batch(dtype, vocab_size):
    """vllm-project/vllm#51226: batch mates and their order change nothing."""
    torch.manual_seed(0)
    requests = [make_request(i, output=[5, 7][: i % 3], **KINDS[i % len(KINDS)]) for i in range(3 * len(KINDS))]
    logits = (torch.randn(len(requests), vocab_size) * 2).to(dtype)
    alone = [Sampler(1000).sample(logits, [request], [i]) for i, request in enumerate(requests)]
    order = torch.randperm(len(requests)).tolist()
    sampler = Sampler(1000)
    for size in (2, 8, len(requests)):
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            result = sampler.sample(logits, [requests[row] for row in rows], rows)
            assert result.token_ids == [alone[row].token_ids[0] for row in rows]
            for i, row in enumerate(rows):
                expected = alone[row].logprobs[0] if alone[row].logprobs else None
                assert (result.logprobs[i] if result.logprobs else None) == expected


def test_probabilities_have_the_same_bits_in_any_batch():
    torch.manual_seed(0)
    scores = torch.randn(40, 5003)
    temperature = np.linspace(0.5, 2, 40)
    together = chunk_weights(scores, chunk_maxima(scores).amax(1), np.arange(40), temperature)
    for row in range(40):
        one = scores[row : row + 1]
        alone = chunk_weights(one, chunk_maxima(one).amax(1), np.zeros(1, dtype=np.int64), temperature[row : row + 1])
        assert np.array_equal(alone[0], together[row])


@pytest.mark.parametrize("fields", [{}, {"top_k": 9}, {"top_p": 0.9999}, {"min_p": 1e-6}])
def test_draws_follow_the_distribution(fields):
    probabilities = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.01, 0.01])
    logits = torch.full((1, 300), -math.inf)
    places = torch.arange(10) * 31 + 2  # in several chunks
    logits[0, places] = probabilities.log()
    sampler, counts = Sampler(300), torch.zeros(300)
    for step in range(20):  # 20,000 draws
        requests = [make_request(i, output=[0] * step, **fields) for i in range(1000)]
        result = sampler.sample(logits, requests, [0] * 1000)
        counts += torch.bincount(torch.tensor(result.token_ids), minlength=300)
    assert counts.sum() == counts[places].sum()
    if fields.get("top_k") == 9:  # the two last ones tie, so both remain
        assert (counts[places[-2:]] > 0).all()
    expected = probabilities * 20000
    assert ((counts[places] - expected) ** 2 / expected).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001


def test_branches_differ_and_repeat():
    torch.manual_seed(0)
    logits = torch.randn(1, 1000)

    def answers():
        sampler = Sampler(1000)
        requests = [make_request(i, seed=7, branch=i) for i in range(4)]
        for _ in range(12):
            for request, token in zip(requests, sampler.sample(logits, requests, [0] * 4).token_ids, strict=True):
                request.token_ids.append(token)
        return [tuple(request.output_token_ids) for request in requests]

    first = answers()
    assert len(set(first)) == 4
    assert first == answers()


def test_top_k_one_is_greedy_whatever_the_temperature():
    torch.manual_seed(2)
    logits = torch.randn(50, 1000).bfloat16()
    requests = [make_request(i, **({"top_k": 1, "temperature": 5.0}, {"temperature": 0})[i % 2]) for i in range(50)]
    expected = [int(row.float().numpy().argmax()) for row in logits]
    assert Sampler(1000).sample(logits, requests, range(50)).token_ids == expected
    mixed = [*requests, make_request(99)]
    assert Sampler(1000).sample(logits, mixed, [*range(50), 0]).token_ids[:50] == expected


@pytest.mark.parametrize("top_k", [0, -1, None])
def test_spellings_of_no_top_k(top_k):
    torch.manual_seed(3)
    logits = torch.randn(1, 1000)
    expected = Sampler(1000).sample(logits, [make_request(5)], [0]).token_ids
    assert Sampler(1000).sample(logits, [make_request(5, top_k=top_k)], [0]).token_ids == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, "all masked"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bad_rows_fail_alone(value, kind):
    torch.manual_seed(4)
    logits = torch.randn(5, 1000)
    good = Sampler(1000).sample(logits, [make_request(i, **KINDS[i]) for i in range(5)], range(5))
    if value == "all masked":
        logits[2] = -math.inf
    else:
        logits[2, 700] = value
    requests = [make_request(i, **(kind if i == 2 else KINDS[i])) for i in range(5)]
    result = Sampler(1000).sample(logits, requests, range(5))
    assert result.failed_rows == [2]
    for i in (0, 1, 3, 4):
        assert result.token_ids[i] == good.token_ids[i]
    assert result.logprobs is None or result.logprobs[2] is None


def test_processors_that_leave_nothing_fail_the_row():
    requests = [
        make_request(0, allowed_token_ids=[0], min_tokens=3),
        make_request(1, allowed_token_ids=[0]),
    ]
    result = Sampler(1000).sample(torch.zeros(2, 1000), requests, [0, 1])
    assert result.failed_rows == [0] and result.token_ids[1] == 0


def test_logprobs_are_of_the_raw_distribution():
    torch.manual_seed(5)
    logits = torch.randn(1, 1000)
    request = make_request(0, temperature=0, logit_bias={17: 100.0}, logprobs=2)
    result = Sampler(1000).sample(logits, [request], [0])
    assert result.token_ids == [17]
    assert result.logprobs[0][17].logprob == pytest.approx(float(logits.log_softmax(-1)[0, 17]), abs=1e-5)
    assert len(result.logprobs[0]) == 3


def test_masked_tokens_are_never_drawn():
    logits = torch.full((1, 1000), -math.inf)
    logits[0, [3, 500]] = torch.tensor([0.0, -30.0])
    requests = [
        make_request(i, **(KINDS[i % 7] | {"temperature": 100.0})) for i in range(700)
    ]  # fmt: skip
    assert set(Sampler(1000).sample(logits, requests, [0] * 700).token_ids) == {3, 500}


def test_state_is_forgotten():
    sampler = Sampler(1000)
    request = make_request(0, repetition_penalty=1.5, temperature=0)
    sampler.sample(torch.randn(1, 1000), [request], [0])
    assert sampler._memory and sampler._plan
    sampler.forget("request-0")
    sampler.forget("unknown")
    assert not sampler._memory and not sampler._plan


def test_another_request_with_the_same_id_starts_anew():
    sampler = Sampler(1000)
    logits = torch.zeros(1, 1000)
    logits[0, [50, 60]] = torch.tensor([2.0, 1.9])
    first = make_request(0, output=[50], presence_penalty=2.0, temperature=0)
    second = make_request(0, output=[60], presence_penalty=2.0, temperature=0)
    assert sampler.sample(logits, [first], [0]).token_ids == [60]
    assert sampler.sample(logits, [second], [0]).token_ids == [50]


def test_no_requests():
    assert Sampler(1000).sample(torch.zeros(0, 1000), [], []).token_ids == []
