"""What is refused before it is captured, and that the stand-in for graphs replays what it recorded."""

from __future__ import annotations

import re

import pytest
import torch

from hf_paged.generation.graphs.capture import NotCapturableError, NothingFromHost, described
from tests.generation.graphs.recorder import RecordedGraphs

REFUSED = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.max()),
    "condition": lambda x: 1 if (x > 0).any() else 0,
    "contained": lambda x: 3 in x,
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "mask": lambda x: x[x > 0],
    "write by mask": lambda x: x.clone().__setitem__(x > 0, 1.0),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "argwhere": lambda x: torch.argwhere(x),
    "masked select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(torch.tensor([1, 2]), 0),
    "another device": lambda x: x.to("meta"),
}
ALLOWED = {
    "numbers of rows": lambda x: x.repeat_interleave(torch.tensor([1, 2]), 0, output_size=3),
    "index": lambda x: x[torch.tensor([1, 0])],
    "index copy": lambda x: x.clone().index_copy_(0, torch.tensor([1]), x[:1]),
    "choice": lambda x: torch.where(x > 0, x, 0.0),
    "masked fill": lambda x: x.masked_fill(x > 0, 1.0),
    "dtype": lambda x: x.to(torch.float64),
    "scalar": lambda x: x * torch.tensor(0.5),
    "product": lambda x: torch.nn.functional.linear(x, x),
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_needs_the_host_is_refused(what, inference):
    with torch.inference_mode(inference), torch.no_grad(), pytest.raises(NotCapturableError):
        RecordedGraphs().warm_up(lambda: REFUSED[what](torch.randn(2, 3)))


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("what", ALLOWED)
def test_any_other_call_is_not(what, inference):
    with torch.inference_mode(inference), torch.no_grad():
        assert RecordedGraphs().warm_up(lambda: ALLOWED[what](torch.randn(2, 3))) is not None


def test_what_happens_on_another_device_is_nobodys_business():
    with NothingFromHost("cuda"):
        assert torch.ones(3)[torch.tensor([True, False, True])].sum().item() == 2


def test_a_copy_from_the_host_is_refused():
    with NothingFromHost("meta"), pytest.raises(NotCapturableError, match="copies between"):
        torch.ones(3).to("meta")
    there = torch.ones(3, device="meta")
    with NothingFromHost("meta"), pytest.raises(NotCapturableError, match="copies between"):
        there.copy_(torch.ones(3))
    with NothingFromHost("meta"), pytest.raises(NotCapturableError, match="copies between"):
        there[torch.tensor([0, 1])]
    with NothingFromHost("meta"):
        assert (there * torch.tensor(2.0)).device.type == "meta"  # an argument of a kernel


def test_the_reason_says_where():
    with pytest.raises(NotCapturableError) as caught:
        RecordedGraphs().warm_up(lambda: torch.ones(1).sum().item())
    assert re.search(r"reads a number on the host, in test_capture.py, line \d+$", described(caught.value))


def test_a_replay_sees_new_inputs_and_new_weights():
    x, weight, output = torch.randn(2, 4), torch.randn(4, 4), torch.zeros(2, 4)
    cache = torch.zeros(8, 4)

    def call() -> torch.Tensor:
        hidden = torch.nn.functional.linear(x, weight).relu()
        scratch = torch.empty(2, 4)
        scratch.copy_(hidden)
        scratch += 1
        cache.index_copy_(0, torch.arange(2), scratch)
        first, second = scratch.split(2, dim=1)
        return torch.cat([second, first], dim=1)

    replay = RecordedGraphs().capture(lambda: output.copy_(call()))
    for _ in range(2):
        x.normal_()
        weight.normal_()
        cache.zero_()
        replay()
        replayed, stored = output.clone(), cache.clone()
        assert torch.equal(replayed, call()) and torch.equal(stored, cache)


def test_a_replay_does_not_see_what_python_would_do_now():
    number, output = [2.0], torch.zeros(3)
    replay = RecordedGraphs().capture(lambda: output.copy_(torch.ones(3) * number[0]))
    number[0] = 5.0
    replay()
    assert output.tolist() == [2.0, 2.0, 2.0]


def test_graphs_share_what_they_compute_in_between():
    maker, x = RecordedGraphs(), torch.ones(3)
    made = []
    first = maker.capture(lambda: made.append(x + 1))
    second = maker.capture(lambda: made.append(x + 2))
    first()
    assert made[0].tolist() == [2.0, 2.0, 2.0] and made[1].isnan().all()
    second()
    assert made[0].isnan().all() and made[1].tolist() == [3.0, 3.0, 3.0]
