"""Callers' own reasons to end an answer."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_paged.errors import EngineError, InvalidRequestError
from hf_paged.generation.request import Request, RequestExtras
from hf_paged.generation.sampling.criteria import stops
from hf_paged.generation.sampling.params import SamplingParams
from tests.paged_models import assert_idle, paged


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


def test_what_would_end_a_thread():
    def my_criterion(input_ids, scores):
        raise SystemExit(3)

    with pytest.raises(EngineError, match=r"my_criterion.*'a' raised SystemExit\(3\)"):
        stops(make_request(my_criterion))


def test_interrupts_are_not_swallowed():
    def my_criterion(input_ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stops(make_request(my_criterion))


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria", "on_update"])
def test_system_exit_of_one_request_does_not_touch_another(where):
    """They share the steps, which the thread of either of them may be running."""

    def leave(*arguments):
        raise SystemExit(7)

    model = paged(block_size=4)
    engine, params = model.engine, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    alone = engine.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    own = {"on_update": leave} if where == "on_update" else {"extras": RequestExtras(**{where: [leave]})}
    with engine.requests() as states:
        states.append(engine.add_request([9, 8, 7], params, **own))
        states.append(engine.add_request([5, 6, 7], params))
        while engine.has_unfinished:
            engine.step()
    assert type(states[0].error) is EngineError and "SystemExit" in str(states[0].error)
    assert states[1].error is None and states[1].group.requests[0].token_ids[3:] == alone
    assert_idle(engine)
