"""N-grams are remembered from step to step, and forgotten when their tokens are taken back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from hf_paged.generation.request import Request, RequestExtras
from hf_paged.generation.sampling.features import SamplingFeatures
from hf_paged.generation.sampling.ngrams import NGrams
from hf_paged.generation.sampling.params import SamplingParams
from hf_paged.generation.sampling.sampler import Sampler

VOCAB_SIZE = 12
TOKENS = st.integers(0, VOCAB_SIZE - 1)


def banned_by(processor, request):
    scores = processor(torch.tensor([request.token_ids]), torch.zeros(1, VOCAB_SIZE))
    return set(scores[0].isneginf().nonzero()[:, 0].tolist())


@settings(max_examples=80, deadline=None)
@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=10),
    edits=st.lists(st.tuples(st.integers(0, 3), st.lists(TOKENS, max_size=3)), max_size=8),
    size=st.integers(1, 4),
)
def test_equal_to_transformers_while_tokens_come_and_go(prompt, edits, size):
    request = Request("a", prompt, SamplingParams(), max_tokens=99)
    all_tokens, prompt_only = NGrams(request, size, False), NGrams(request, size, True)
    encoder = EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([prompt]))
    for taken_back, new in [(0, []), *edits]:
        keep = max(len(request.token_ids) - taken_back, len(prompt))
        request.token_ids[keep:] = new
        assert all_tokens.following() == banned_by(NoRepeatNGramLogitsProcessor(size), request)
        if len(request.token_ids) >= size - 1:
            assert prompt_only.following() == banned_by(encoder, request)


def test_each_token_is_read_once(monkeypatch):
    read = []
    original = NGrams.read
    monkeypatch.setattr(NGrams, "read", lambda self, index: (read.append(index), original(self, index)))

    def make_request(name):
        extras = RequestExtras(features=SamplingFeatures(no_repeat_ngram_size=2))
        return Request(name, [1, 2, 3, 4], SamplingParams(temperature=0), max_tokens=99, extras=extras)

    sampler, logits = Sampler(VOCAB_SIZE), torch.zeros(1, VOCAB_SIZE)
    request, other = make_request("a"), make_request("b")
    for _ in range(3):
        request.token_ids += sampler.sample(logits, [request], [0]).token_ids
    assert read == list(range(6))
    sampler.sample(logits, [other, request], [0, 0])  # another batch
    assert read == [*range(6), *range(4), 6]
    sampler.forget("a")
    sampler.sample(logits, [request], [0])
    assert read == [*range(6), *range(4), 6, *range(7)]
