from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.errors import UnknownNameError
from hf_paged.generation.policies import SCHEDULING_POLICIES, FCFSPolicy, PriorityPolicy
from hf_paged.generation.request import Request
from hf_paged.generation.sampling.params import SamplingParams

PARAMS = SamplingParams()


def make(arrival, priority=0) -> Request:
    request = Request(f"r{arrival}", [1], PARAMS, max_tokens=1, priority=priority)
    request.arrival_number = arrival
    return request


def drain(policy) -> list[int]:
    return [policy.pop().arrival_number for _ in range(len(policy))]


def test_the_registry_knows_both_and_names_them_in_its_error():
    assert SCHEDULING_POLICIES.get("fcfs") is FCFSPolicy and SCHEDULING_POLICIES.get("priority") is PriorityPolicy
    with pytest.raises(UnknownNameError, match="fcfs, priority"):
        SCHEDULING_POLICIES.get("fifo")


@given(st.lists(st.integers(-3, 3), max_size=20), st.randoms())
def test_the_queue_is_sorted_by_the_documented_order(priorities, random):
    requests = [make(arrival, priority) for arrival, priority in enumerate(priorities)]
    expected = {
        FCFSPolicy: sorted(requests, key=lambda r: r.arrival_number),
        PriorityPolicy: sorted(requests, key=lambda r: (r.priority, r.arrival_number)),
    }
    random.shuffle(requests)
    for policy_class, ordered in expected.items():
        policy = policy_class()
        for request in requests:
            policy.push(request)
        assert drain(policy) == [request.arrival_number for request in ordered]
        if requests:
            assert policy.victim(requests) is ordered[-1], "who is served last gives way first"


def test_a_preempted_request_returns_before_later_arrivals():
    policy = FCFSPolicy()
    requests = [make(arrival) for arrival in range(3)]
    for request in requests:
        policy.push(request)
    first = policy.pop()
    policy.push(first)
    assert drain(policy) == [0, 1, 2]


def test_removed_requests_do_not_come_up_again():
    policy = FCFSPolicy()
    requests = [make(arrival) for arrival in range(4)]
    for request in requests:
        policy.push(request)
    policy.remove(requests[0])
    policy.remove(requests[2])
    policy.remove(requests[2])
    assert len(policy) == 2 and drain(policy) == [1, 3] and policy.peek() is None
    policy.push(requests[0])
    assert policy.peek() is requests[0]


def test_what_was_removed_is_not_kept_for_ever():
    policy = FCFSPolicy()
    policy.push(make(0))
    for arrival in range(1, 5000):
        request = make(arrival)
        policy.push(request)
        policy.remove(request)
    assert len(policy) == 1 and len(policy._heap) < 100


def test_the_next_of_very_many_is_found_without_looking_at_all(monkeypatch):
    calls = 0

    class Counting(FCFSPolicy):
        def order(self, request):
            nonlocal calls
            calls += 1
            return super().order(request)

    policy = Counting()
    for arrival in range(10_000):
        policy.push(make(arrival))
    calls = 0
    assert [policy.pop().arrival_number for _ in range(5)] == [0, 1, 2, 3, 4]
    assert calls == 0, "popping compares keys that were made once"
