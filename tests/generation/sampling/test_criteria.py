"""Callers' own reasons to end an answer."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_paged.errors import InvalidRequestError
from hf_paged.generation.request import Request, RequestExtras
from hf_paged.generation.sampling.criteria import stops
from hf_paged.generation.sampling.params import SamplingParams


def make_request(*criteria):
    return Request(
        "a", [1, 2, 3], SamplingParams(), max_tokens=50, extras=RequestExtras(stopping_criteria=criteria or None)
    )


def test_none_never_stop():
    assert stops(make_request()) is False


@pytest.mark.parametrize("answer", [True, False])
def test_answers_of_transformers_and_plain_ones(answer):
    for value in (answer, torch.tensor([answer]), torch.tensor(answer), torch.tensor([[answer]])):
        assert stops(make_request(lambda input_ids, scores, value=value: value)) is answer


def test_each_is_asked_with_all_tokens_and_the_scores():
    seen = []

    def criterion(input_ids, scores, **kwargs):
        assert not input_ids.is_inference()
        seen.append((input_ids.tolist(), input_ids.dtype, scores))
        return True

    request = make_request(criterion, criterion)
    request.token_ids.append(9)
    with torch.inference_mode():
        assert stops(request, "scores")
    assert seen == [([[1, 2, 3, 9]], torch.int64, "scores")] * 2


def test_criteria_of_transformers():
    request = make_request(MaxLengthCriteria(5), StoppingCriteriaList([EosTokenCriteria(7)]))
    assert not stops(request)
    request.token_ids.append(7)
    assert stops(request)
    request.token_ids.append(8)
    assert stops(request)
    request.token_ids[-2:] = [8]
    assert not stops(request)


@pytest.mark.parametrize(
    "answer", [None, 1, "yes", torch.tensor([1]), torch.tensor([True, False]), torch.zeros(0).bool()]
)
def test_what_is_no_answer(answer):
    def my_criterion(input_ids, scores):
        return answer

    with pytest.raises(InvalidRequestError, match="my_criterion"):
        stops(make_request(my_criterion))


def test_what_a_criterion_raises():
    def my_criterion(input_ids, scores):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as raised:
        stops(make_request(my_criterion))
    assert "my_criterion" in raised.value.__notes__[0]
