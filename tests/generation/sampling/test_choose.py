"""Native code and torch choose the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_paged.generation.request import Request
from hf_paged.generation.sampling import choose
from hf_paged.generation.sampling.params import SamplingParams
from hf_paged.generation.sampling.sampler import Sampler
from hf_paged.kernels.cpu import sampling as native

SETTINGS = [
    {"temperature": 0},
    {"temperature": 1.2},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 400},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 7, "min_p": 0.2},
]


def make_requests(num_requests: int, settings: list[dict]) -> list[Request]:
    return [
        Request(f"r{i}", [1, 2], SamplingParams(max_tokens=9, **settings[i % len(settings)]), max_tokens=9, seed=i)
        for i in range(num_requests)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [SETTINGS[:1], SETTINGS, SETTINGS[1:]], ids=["greedy", "mixed", "drawn"])
def test_native_and_torch_choose_the_same_tokens(dtype, settings, monkeypatch):
    if not native.load():
        pytest.skip("no native library on this machine")
    scores = (torch.randn(63, 3001, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    scores[3] = torch.nan
    scores[4] = -torch.inf
    requests = make_requests(63, settings)
    with_native = Sampler(3001).sample(scores, requests, range(63))
    monkeypatch.setattr(choose.native, "takes", lambda scores: False)
    assert Sampler(3001).sample(scores, requests, range(63)) == with_native
    assert with_native.failed_rows == [3, 4]


def test_what_native_code_does_not_take(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: True)
    scores = torch.zeros(4, 6)
    assert native.takes(scores) and native.takes(scores[:, 1:4])
    assert not native.takes(scores.double()) and not native.takes(scores.to("meta")) and not native.takes(scores.T)


def test_positions_move_on_without_a_new_plan():
    requests = make_requests(2, SETTINGS[1:2])
    sampler, scores = Sampler(500), torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    drawn = []
    for _ in range(30):
        drawn.append(sampler.sample(scores, requests, [0, 1]).token_ids)
        for request in requests:
            request.token_ids.append(0)
    assert len({tuple(tokens) for tokens in drawn}) > 10
    first = make_requests(2, SETTINGS[1:2])
    assert np.array_equal(Sampler(500).sample(scores, first, [0, 1]).token_ids, drawn[0])


@pytest.mark.parametrize("has_native", [True, False])
@pytest.mark.parametrize("settings", [SETTINGS[:1], SETTINGS, SETTINGS[1:]], ids=["greedy", "mixed", "drawn"])
@pytest.mark.parametrize("rows", [list(range(1, 10)), [0, 2, 2, 2, 5, 6, 7, 8, 9]], ids=["side by side", "shared"])
def test_what_was_sent_before_chooses_the_same_tokens(rows, settings, has_native, monkeypatch):
    if not has_native:
        monkeypatch.setattr(choose.native, "takes", lambda scores: False)
    scores = torch.randn(10, 700, generator=torch.Generator().manual_seed(2)) * 4
    requests = make_requests(9, settings)
    expected = Sampler(700).sample(scores, requests, rows)
    sampler = Sampler(700)
    wanted = sampler.wanted(requests, rows)
    assert set(wanted) == ({"settings", "keys"} if settings != SETTINGS[:1] else set()) | (
        {"rows"} if rows[0] == 0 else set()
    )
    sent = {name: torch.from_numpy(array) for name, array in choose.padded_sampling(wanted, 16).items()}
    assert all(len(tensor) == 16 for tensor in sent.values())
    if has_native and native.load():
        monkeypatch.setattr(choose, "to_device", None)  # nothing else goes there

    assert sampler.start(scores, requests, rows, sent).wait().token_ids == expected.token_ids


def test_what_was_sent_for_logits_of_another_width_is_not_used():
    requests = make_requests(4, [{"temperature": 5.0, "top_k": 600}])
    scores = torch.randn(4, 1000, generator=torch.Generator().manual_seed(2))
    sampler, expected = Sampler(500), Sampler(500).sample(scores, requests, range(4)).token_ids
    for position in range(2):  # at first it takes the logits to be as wide as the vocabulary
        wanted = sampler.wanted(requests, range(4))
        assert wanted["settings"][0, 2] == (0, 600)[position]
        sent = {name: torch.from_numpy(array) for name, array in wanted.items()}
        assert sampler.start(scores, requests, range(4), sent).wait().token_ids == expected


def test_nothing_is_wanted_for_nobody():
    sampler = Sampler(50)
    assert sampler.wanted([], []) == {} and sampler.start(torch.zeros(0, 50), [], [], {}).wait().token_ids == []
