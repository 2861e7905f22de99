"""The processors before temperature, singly and together, against Transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from hf_paged.generation.request import Request, RequestExtras
from hf_paged.generation.sampling.params import SamplingParams
from hf_paged.generation.sampling.processors import Batch
from hf_paged.generation.sampling.sampler import PROCESSORS, Sampler
from hf_paged.generation.sampling.token_counts import TokenCounts

VOCAB_SIZE = 200
EOS = (3, 9)


def make_request(prompt, output=(), *, bad_words_ids=(), stop_token_ids=EOS, request_id="a", **params):
    request = Request(
        request_id,
        list(prompt),
        SamplingParams(**params),
        max_tokens=100,
        stop_token_ids=frozenset(stop_token_ids),
        extras=RequestExtras(bad_words_ids=tuple(map(tuple, bad_words_ids))),
    )
    request.token_ids += output
    return request


def processed(scores, requests):
    scores = scores.clone()
    batch = Batch(requests, scores.shape[1], scores.device)
    for processor in (cls(batch) for cls in PROCESSORS):
        if processor.is_active():
            processor.apply(scores)
    return scores


def transformers_scores(scores, request):
    """One row by the processors that `_get_logits_processor` would make, in its order."""
    params, processors = request.params, LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[i], float(v)] for i, v in params.logit_bias.items()]))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if request.extras.bad_words_ids:
        processors.append(NoBadWordsLogitsProcessor([list(w) for w in request.extras.bad_words_ids], sorted(EOS)))
    if params.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(request.num_prompt_tokens, params.min_tokens, sorted(EOS)))
    return processors(torch.tensor([request.token_ids]), scores[None])[0]


FEATURES = {
    "bias": {"logit_bias": {5: 3.5, 9: -100.0, 199: 20.0}},
    "repetition": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.5},
    "bad words": {"bad_words_ids": [[7], [3], [4, 5, 8], [6, 8, 11], [5, 12], [6, 13], [1] * 40]},
    "min tokens": {"min_tokens": 3},
    "min tokens reached": {"min_tokens": 2},
    "nothing": {},
}
FEATURES["all"] = {name: value for feature in list(FEATURES.values()) for name, value in feature.items()} | {
    "min_tokens": 3
}


def feature_requests():
    return [
        make_request([1, 2, 2, 30, 4], [5, 6], request_id=name, **kwargs)
        if "bad words" not in name
        else make_request([1, 2, 4], [5], request_id=name, **kwargs)
        for name, kwargs in FEATURES.items()
    ]


def test_equal_to_transformers_in_one_batch():
    requests = feature_requests()
    torch.manual_seed(0)
    scores = torch.randn(len(requests), VOCAB_SIZE) * 4
    ours = processed(scores, requests)
    for row, request in enumerate(requests):
        expected = transformers_scores(scores[row], request)
        assert torch.equal(ours[row].isneginf(), expected.isneginf()), request
        torch.testing.assert_close(ours[row], expected, atol=1e-5, rtol=0)
    changed = (ours != scores).any(1).tolist()
    assert changed == [name not in ("nothing", "min tokens reached") for name in FEATURES]


def test_sampler_applies_them_all():
    """Greedy through the sampler is the argmax of what Transformers' processors leave."""
    requests = [
        make_request(
            r.prompt_token_ids, r.output_token_ids, request_id=r.request_id, temperature=0, **FEATURES[r.request_id]
        )
        for r in feature_requests()
    ]
    torch.manual_seed(5)
    logits = torch.randn(len(requests), VOCAB_SIZE).bfloat16() * 4
    before = logits.clone()
    result = Sampler(VOCAB_SIZE).sample(logits, requests, range(len(requests)))
    expected = [int(transformers_scores(logits[i].float(), r).argmax()) for i, r in enumerate(requests)]
    assert result.token_ids == expected and not result.failed_rows
    assert torch.equal(logits, before)


def test_presence_and_frequency_count_the_answer_only():
    """vllm-project/vllm-metal#69: the prompt must not count."""
    fields = {"presence_penalty": 1.5, "frequency_penalty": 0.25}
    scores = torch.zeros(2, VOCAB_SIZE)
    first = make_request([8, 8, 8], request_id="first", **fields)
    later = make_request([8, 8, 8], [4, 5, 4, 4], request_id="later", **fields)
    ours = processed(scores, [first, later])
    expected = torch.zeros(2, VOCAB_SIZE)
    expected[1, 4], expected[1, 5] = -1.5 - 0.75, -1.5 - 0.25
    torch.testing.assert_close(ours, expected)


def test_repetition_comes_before_presence():
    request = make_request([8], [4], repetition_penalty=2.0, presence_penalty=1.0)
    scores = torch.zeros(1, VOCAB_SIZE)
    scores[0, [4, 8]] = torch.tensor([3.0, -3.0])
    ours = processed(scores, [request])
    assert ours[0, 4] == 0.5 and ours[0, 8] == -6.0


def test_allowed_token_ids():
    requests = [make_request([1], allowed_token_ids=[7, 150, 5000]), make_request([1])]
    scores = torch.randn(2, VOCAB_SIZE)
    ours = processed(scores, requests)
    assert ours[0].isfinite().nonzero()[:, 0].tolist() == [7, 150]
    assert torch.equal(ours[0, [7, 150]], scores[0, [7, 150]]) and torch.equal(ours[1], scores[1])


def test_tokens_beyond_the_logits_are_ignored():
    request = make_request(
        [1, 900], [901], repetition_penalty=1.2, logit_bias={902: 1.0, 2: 1.0}, bad_words_ids=[[903]], min_tokens=5,
        stop_token_ids=[904],
    )  # fmt: skip
    scores = torch.ones(2, VOCAB_SIZE)
    ours = processed(scores, [make_request([1]), request])
    assert torch.equal(ours[0], scores[0])
    assert (ours[1] != 1).nonzero()[:, 0].tolist() == [1, 2]


def test_counts_follow_growing_and_replaced_tokens():
    generator = np.random.default_rng(0)
    request = make_request(generator.integers(0, 90, 50).tolist())
    with_prompt, answer_only = TokenCounts(request, True), TokenCounts(request, False)

    def check():
        for counts, listed in ((with_prompt, request.token_ids), (answer_only, request.output_token_ids)):
            counts.update()
            output = request.output_token_ids
            assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == {
                token_id: output.count(token_id) for token_id in set(listed)
            }

    for _ in range(30):
        request.token_ids += generator.integers(0, 150, generator.integers(0, 4)).tolist()
        check()
    request.token_ids[-3:] = [7]  # taken back, as after a rejected draft
    check()
    request.token_ids[-2:] = [8, 9, 10, 11]
    check()


@pytest.mark.parametrize("vocab_size", [32, 33, 64, 200])
def test_bitmask(vocab_size):
    torch.manual_seed(vocab_size)
    allowed = torch.rand(4, vocab_size) < 0.3
    allowed[1] = True
    allowed[3] = False
    allowed[:3, vocab_size - 1] = True
    padded = torch.zeros(4, -(-vocab_size // 32) * 32, dtype=torch.int64)
    padded[:, :vocab_size] = allowed
    words = (padded.view(4, -1, 32) << torch.arange(32)).sum(-1)
    bitmask = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    bitmask[1] = -1
    logits = torch.randn(2, vocab_size)
    rows = [0, 1, 0, 1]
    requests = [make_request([1], request_id=str(i), temperature=0) for i in range(4)]
    result = Sampler(vocab_size).sample(logits, requests, rows, bitmask)
    expected = [int(logits[rows[i]].masked_fill(~allowed[i], -torch.inf).argmax()) for i in range(3)]
    assert result.token_ids[:3] == expected
    assert result.failed_rows == [3]  # nothing is left
