"""Callers' own processors: what they are given, what they may do, and that they fail alone."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from hf_paged.errors import EngineError, InvalidRequestError
from hf_paged.generation.request import Request, RequestExtras
from hf_paged.generation.sampling.features import SamplingFeatures
from hf_paged.generation.sampling.params import SamplingParams
from hf_paged.generation.sampling.row_processors import PerAnswer
from hf_paged.generation.sampling.sampler import Sampler

VOCAB_SIZE = 300


def make_request(name="a", processors=None, *, features=None, scores=False, **params):
    return Request(
        name, [1, 2, 3], SamplingParams(**{"temperature": 0} | params), max_tokens=50, seed=3,
        extras=RequestExtras(logits_processor=processors, features=features, scores=scores),
    )  # fmt: skip


def force(token_id, value=100.0):
    def processor(input_ids, scores):
        scores[:, token_id] = value
        return scores

    return processor


def test_what_a_processor_is_given():
    seen = []

    def processor(input_ids, scores):
        seen.append((input_ids, scores))
        assert not input_ids.is_inference() and not scores.is_inference() and not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        scores.add_(1.0)  # in place, and kept
        input_ids[0, 0] = 77
        return scores

    request = make_request(processors=[processor])
    torch.manual_seed(0)
    logits = torch.randn(2, VOCAB_SIZE).bfloat16()
    before, sampler = logits.clone(), Sampler(VOCAB_SIZE)
    for _ in range(2):
        request.token_ids += sampler.sample(logits, [request], [1]).token_ids
    (first_ids, first), (second_ids, second) = seen
    assert first_ids.tolist() == [[77, 2, 3]] and second_ids.tolist() == [[77, 2, 3, request.token_ids[3]]]
    assert first_ids.dtype == torch.int64 and first.dtype == torch.float32 and first.shape == (1, VOCAB_SIZE)
    assert first is not second and torch.equal(first, second)
    assert torch.equal(logits, before) and request.token_ids[:3] == [1, 2, 3]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 5, "top_p": 0.9}])
def test_order(params):
    """After our processors, before temperature: the caller sees suppressed tokens and has the last word on scores."""

    def processor(input_ids, scores):
        assert scores[0, 7] == -math.inf and scores[0, 8] == 5.0
        return torch.where(torch.arange(VOCAB_SIZE) == 9, scores, -math.inf)

    features = SamplingFeatures(suppress_tokens=(7,))
    request = make_request(processors=[processor], features=features, logit_bias={8: 5.0}, **params)
    assert Sampler(VOCAB_SIZE).sample(torch.zeros(1, VOCAB_SIZE), [request], [0]).token_ids == [9]


def test_several_are_called_in_order():
    requests = [make_request("a", [force(4), force(4, -100.0), force(6)]), make_request("b", [force(6), force(4)])]
    assert Sampler(VOCAB_SIZE).sample(torch.zeros(1, VOCAB_SIZE), requests, [0, 0]).token_ids == [6, 4]


def raising(input_ids, scores):
    raise KeyError("mine")


WRONG = {
    "raises": raising,
    "returns nothing": lambda input_ids, scores: None,
    "wrong shape": lambda input_ids, scores: scores[0],
    "fewer tokens": lambda input_ids, scores: scores[:, :-1],
    "whole numbers": lambda input_ids, scores: scores.long(),
    "needs more": lambda input_ids, scores, more: scores,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_processor_fails_alone(wrong):
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB_SIZE)
    rest = [make_request("x", temperature=1.0), make_request("y", [force(5)]), make_request("z", logprobs=2)]
    expected = Sampler(VOCAB_SIZE).sample(logits, rest, [0, 1, 2])
    request = make_request("wrong", [WRONG[wrong]], scores=True)
    result = Sampler(VOCAB_SIZE).sample(logits, [rest[0], request, *rest[1:]], [0, 3, 1, 2])
    assert list(result.errors) == [1] and result.failed_rows == []
    assert [result.token_ids[i] for i in (0, 2, 3)] == expected.token_ids
    assert result.logprobs[3] == expected.logprobs[2]
    error = result.errors[1]
    if wrong == "raises":
        assert type(error) is KeyError and error.args == ("mine",)
    elif wrong == "needs more":
        assert type(error) is TypeError
    else:
        assert type(error) is InvalidRequestError and f"(1, {VOCAB_SIZE})" in str(error)
    if wrong in ("raises", "needs more"):
        assert "request 'wrong'" in error.__notes__[0]


def test_an_error_keeps_no_scores_of_the_batch():
    logits = torch.randn(3, VOCAB_SIZE)
    kept = []

    def processor(input_ids, scores):
        kept.append(weakref.ref(scores))
        raise ValueError("no")

    error = Sampler(VOCAB_SIZE).sample(logits, [make_request(processors=[processor])], [0]).errors[0]
    names = []
    traceback = error.__traceback__
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert names == ["_processed", "processor"]
    del error, traceback
    gc.collect()
    assert kept[0]() is None


@pytest.mark.parametrize("raised", [SystemExit(7), GeneratorExit()])
def test_what_would_end_a_thread_fails_one_request(raised):
    def processor(input_ids, scores):
        raise raised

    requests = [make_request("a", [processor]), make_request("b")]
    result = Sampler(VOCAB_SIZE).sample(torch.zeros(2, VOCAB_SIZE), requests, [0, 0])
    assert list(result.errors) == [0] and type(result.errors[0]) is EngineError
    assert result.errors[0].__cause__ is raised and "request 'a' raised" in str(result.errors[0])


def test_interrupts_are_not_swallowed():
    def processor(input_ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sampler(VOCAB_SIZE).sample(torch.zeros(1, VOCAB_SIZE), [make_request(processors=[processor])], [0])


def test_other_floating_types_are_accepted():
    request = make_request(processors=[lambda i, s: s.double(), force(4), lambda i, s: s.half()], scores=True)
    result = Sampler(VOCAB_SIZE).sample(torch.zeros(1, VOCAB_SIZE), [request], [0])
    assert result.token_ids == [4] and result.scores[0].dtype == torch.float32


def test_an_infinite_score_forces_a_token_where_the_best_is_taken():
    logits = torch.zeros(1, VOCAB_SIZE)
    greedy, sampled = make_request("a", [force(4, math.inf)]), make_request("b", [force(4, math.inf)], temperature=1.0)
    result = Sampler(VOCAB_SIZE).sample(logits, [greedy, sampled], [0, 0])
    assert result.token_ids[0] == 4 and result.failed_rows == [1]


def test_a_processor_that_leaves_nothing_or_nan_fails_its_row():
    requests = [
        make_request("a", [lambda i, s: s - math.inf]), make_request("b", [force(4, math.nan)]), make_request("c"),
    ]  # fmt: skip
    result = Sampler(VOCAB_SIZE).sample(torch.zeros(1, VOCAB_SIZE), requests, [0, 0, 0])
    assert result.failed_rows == [0, 1] and not result.errors


def test_a_processor_may_mend_what_the_model_returned():
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 8] = math.nan
    requests = [
        make_request("a", [lambda i, s: s.nan_to_num(50.0)]), make_request("b", [lambda i, s: s]),
        make_request("c", features=SamplingFeatures(remove_invalid_values=True), logit_bias={9: 1.0}),
    ]  # fmt: skip
    result = Sampler(VOCAB_SIZE).sample(logits, requests, [0, 0, 0])
    assert result.token_ids == [8, 0, 9] and result.failed_rows == [1]


def test_state_belongs_to_an_answer():
    """Processors made for each answer keep their state whatever batch it is in, until it is forgotten."""
    made = []

    class Counter:
        def __init__(self, request):
            self.count = request.branch * 10
            made.append(request.branch)

        def __call__(self, input_ids, scores):
            self.count += 1
            scores[:, self.count] = 100.0
            return scores

    requests = [make_request("a", PerAnswer(lambda request: [Counter(request)])), make_request("b")]
    requests += [make_request("c", PerAnswer(lambda request: [Counter(request)]))]
    requests[2].branch = 1
    sampler, logits = Sampler(VOCAB_SIZE), torch.zeros(1, VOCAB_SIZE)
    assert sampler.sample(logits, requests, [0, 0, 0]).token_ids == [1, 0, 11]
    assert sampler.sample(logits, requests[2:], [0]).token_ids == [12]
    assert sampler.sample(logits, requests[::-1], [0, 0, 0]).token_ids == [13, 0, 2]
    assert made == [0, 1]
    sampler.forget("c")
    assert sampler.sample(logits, requests[2:], [0]).token_ids == [11]
