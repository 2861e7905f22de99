"""Rows that use Transformers' own warpers: their distribution, and that batch mates change no bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import LogitsProcessorList

from hf_paged.errors import InvalidRequestError
from hf_paged.generation.request import Request, RequestExtras
from hf_paged.generation.sampling.features import SamplingFeatures
from hf_paged.generation.sampling.params import SamplingParams
from hf_paged.generation.sampling.sampler import Sampler
from hf_paged.generation.sampling.warpers import WarperSettings, settings_of

CUTS = [
    ({"typical_p": 0.5}, {}),
    ({"top_h": 0.4}, {}),
    ({"epsilon_cutoff": 0.01}, {}),
    ({"eta_cutoff": 0.05}, {"temperature": 0.8}),
    ({"typical_p": 0.9, "renormalize_logits": True}, {"top_k": 12, "top_p": 0.95, "min_p": 0.02}),
    ({"renormalize_logits": True}, {"temperature": 1.5}),
]


def make_request(features, params, *, number=0, seed=None, scores=False):
    return Request(
        f"r{number}", [1, 2, 3], SamplingParams(**params), max_tokens=9, seed=number if seed is None else seed,
        extras=RequestExtras(features=SamplingFeatures(**features), scores=scores),
    )  # fmt: skip


@pytest.mark.parametrize(("features", "params"), CUTS, ids=str)
def test_draws_follow_the_distribution(features, params):
    torch.manual_seed(1)
    logits = torch.randn(1, 60) * 1.5
    draws = 6000
    first = make_request(features, params)
    requests = [Request(str(i), [1], first.params, max_tokens=9, seed=i, extras=first.extras) for i in range(draws)]
    warpers = LogitsProcessorList(settings_of(requests[0]).warpers("cpu"))
    probabilities = warpers(None, logits.clone())[0].softmax(-1).double().numpy()
    tokens = np.array(Sampler(60).sample(logits, requests, [0] * draws).token_ids)
    counts = np.bincount(tokens, minlength=60)
    assert not counts[probabilities == 0].any()
    likely = probabilities * draws >= 5
    expected = np.append(probabilities[likely], probabilities[~likely].sum()) * draws
    observed = np.append(counts[likely], counts[~likely].sum())
    keep = expected > 0
    statistic = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5  # five standard deviations


@pytest.mark.parametrize("threads", [1, 2])
def test_scores_have_the_same_bits_in_batches_of_any_size(threads):
    """With rows long enough for PyTorch to split a single one over threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(2)
        logits = torch.randn(40, 70_001) * 2
        cuts = [*CUTS, ({"eta_cutoff": 0.001, "top_h": 0.9, "typical_p": 0.95, "epsilon_cutoff": 1e-5}, {"top_p": 0.9})]
        features, params = cuts[-1]
        alike = [make_request(features, params, number=i, scores=True) for i in range(12)]
        mixed = [make_request(*cuts[i % len(cuts)], number=i, scores=True) for i in range(14)]
        for requests in (alike, mixed):
            together = Sampler(70_001).sample(logits, requests, range(len(requests)))
            for row, request in enumerate(requests):
                alone = Sampler(70_001).sample(logits, [request], [row])
                assert torch.equal(alone.scores[0], together.scores[row])
                assert alone.token_ids[0] == together.token_ids[row]
    finally:
        torch.set_num_threads(before)


def test_a_row_is_added_up_alike_alone_and_beside_others(monkeypatch):
    """PyTorch splits the sum of a single long row over its threads, which rounds otherwise."""
    monkeypatch.setattr(WarperSettings, "warpers", lambda *_: [lambda _, scores: scores - scores.sum(-1, keepdim=True)])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for seed in range(20):
            torch.manual_seed(seed)
            logits = torch.randn(3, 70_001)
            requests = [make_request({"renormalize_logits": True}, {}, number=i, scores=True) for i in range(3)]
            together = Sampler(70_001).sample(logits, requests, range(3)).scores
            for row in range(3):
                assert torch.equal(Sampler(70_001).sample(logits, [requests[row]], [row]).scores[0], together[row])
    finally:
        torch.set_num_threads(before)


def test_rows_that_cannot_be_used_fail_alone():
    torch.manual_seed(3)
    logits = torch.randn(4, 500)
    logits[1, 3], logits[2] = torch.nan, -torch.inf
    for features, params in CUTS:
        requests = [make_request(features, params, number=i) for i in range(4)]
        result = Sampler(500).sample(logits, requests, range(4))
        assert result.failed_rows == [1, 2]
        assert result.token_ids[3] == Sampler(500).sample(logits, requests[3:], [3]).token_ids[0]


def test_scores_are_copies_that_may_be_changed():
    logits = torch.randn(2, 500)
    plain = Request("p", [1], SamplingParams(temperature=0), max_tokens=3, extras=RequestExtras(scores=True))
    other = Request("q", [1], SamplingParams(temperature=0), max_tokens=3)
    result = Sampler(500).sample(logits, [other, plain], [0, 1])
    assert list(result.scores) == [1] and torch.equal(result.scores[1], logits[1])
    assert not result.scores[1].is_inference()
    result.scores[1].zero_()
    assert logits[1].any()


def test_scores_of_reduced_precision_are_float32():
    logits = torch.randn(1, 500).bfloat16()
    request = Request("p", [1], SamplingParams(temperature=0), max_tokens=3, extras=RequestExtras(scores=True))
    scores = Sampler(500).sample(logits, [request], [0]).scores[0]
    assert scores.dtype == torch.float32 and torch.equal(scores, logits[0].float())


def test_ties_at_the_border_of_top_p_are_drawn_from_what_the_scores_keep():
    """Half precision makes ties likely; the drawn token must be one whose returned score is finite."""
    torch.manual_seed(4)
    logits = (torch.randn(1, 4000) * 2).round()
    for seed in range(60):
        params = SamplingParams(top_p=0.6, temperature=1.3)
        request = Request("p", [1], params, max_tokens=3, seed=seed, extras=RequestExtras(scores=True))
        result = Sampler(4000).sample(logits, [request], [0])
        assert result.scores[0][result.token_ids[0]] > -torch.inf


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 1.0}, {"typical_p": 0}, {"top_h": 1.1}, {"top_h": "x"}, {"epsilon_cutoff": True},
        {"eta_cutoff": float("nan")}, {"no_repeat_ngram_size": -1}, {"no_repeat_ngram_size": 1.5},
        {"suppress_tokens": (-1,)}, {"suppress_tokens": [1]}, {"begin_index": -1}, {"forced_bos_token_id": -2},
        {"forced_eos_token_id": (3,)}, {"encoder_repetition_penalty": 0.0}, {"sequence_bias": (((), 1.0),)},
        {"sequence_bias": (((1,), float("nan")),)}, {"exponential_decay_length_penalty": (1,)},
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range(fields):
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        SamplingFeatures(**fields)
