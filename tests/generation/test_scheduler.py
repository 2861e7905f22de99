from __future__ import annotations

import dataclasses

import pytest

from hf_paged.errors import ConfigurationError, InvalidRequestError, PromptTooLongError
from hf_paged.generation.policies import FCFSPolicy
from hf_paged.generation.request import FinishReason, RequestStatus
from hf_paged.generation.sampling.params import SamplingParams
from hf_paged.generation.scheduler_config import SchedulerConfig

from .fake_runner import Bench, expected_output


def shares(output) -> dict[str, int]:
    return {share.request_id: share.num_scheduled_tokens for share in output.scheduled}


def finish_all(bench: Bench) -> None:
    bench.run_to_end()
    bench.check_idle()
    bench.check_outputs()


# --- limits ------------------------------------------------------------------------------------------------------


def test_limits_below_one_are_refused_and_the_configuration_is_frozen():
    with pytest.raises(ConfigurationError, match="`max_num_seqs` must be at least 1, got 0"):
        SchedulerConfig(0, 1, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulerConfig(1, 1, 1).max_num_seqs = 2


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_no_prompt_length_around_a_block_boundary_is_special(length):
    """InfiniTensor/InfiniLM#378"""
    bench = Bench(num_blocks=8, block_size=16)
    bench.add(range(length))
    finish_all(bench)


@pytest.mark.parametrize("length, fits", [(15, True), (16, True), (17, False), (20, False)])
def test_the_whole_pool_is_usable_and_what_exceeds_it_is_refused_at_once(length, fits):
    """RBLN-SW/vllm-rbln#957, vllm-project/vllm#35541"""
    bench = Bench(num_blocks=4, block_size=4, max_model_len=100)
    if fits:
        bench.add(range(length), max_tokens=1)
    else:
        with pytest.raises(PromptTooLongError, match="needs 5 K/V blocks, the pool has 4 of 4 tokens"):
            bench.add(range(length), max_tokens=1)
    bench.add([1, 2])
    finish_all(bench)


def test_prompt_and_answer_together_must_fit_the_pool():
    bench = Bench(num_blocks=4, block_size=4, max_model_len=100)
    bench.add(range(10), max_tokens=7)  # stores 16: the last token is not stored
    with pytest.raises(PromptTooLongError, match="`max_tokens` = 8 needs 5"):
        bench.add(range(10), max_tokens=8)
    finish_all(bench)
    assert bench.scheduler.can_ever_fit(16) and not bench.scheduler.can_ever_fit(17)


@pytest.mark.parametrize("length, num_output", [(6, 2), (7, 1), (8, 1)])
def test_no_answer_grows_beyond_max_model_len(length, num_output):
    """A prompt of exactly that length still yields one token (and the logits of its prompt)."""
    bench = Bench(max_model_len=8)
    group = bench.add(range(length), max_tokens=50)
    finish_all(bench)
    assert group.requests[0].num_output_tokens == num_output
    assert group.requests[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(PromptTooLongError, match="9 tokens; `max_model_len` = 8 allow 8"):
        bench.add(range(9))


def test_more_branches_than_seats_and_used_ids_are_refused():
    bench = Bench(max_num_seqs=2)
    with pytest.raises(InvalidRequestError, match="`n` is 3, but at most `max_num_seqs` = 2"):
        bench.add([1], n=3)
    bench.add([1], group_id="a")
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        bench.add([2], group_id="a")
    finish_all(bench)
    bench.all_requests.clear()
    bench.add([2], group_id="a")
    finish_all(bench)


# --- endings -----------------------------------------------------------------------------------------------------


def drive(bench: Bench, tokens: list[int]) -> None:
    for token in tokens:
        output = bench.scheduler.schedule()
        bench.scheduler.update_from_output(output, {i: token for share in output.scheduled for i in share.sample_ids})


def test_stop_tokens_end_a_request_and_only_those_asked_for_are_the_stop_reason():
    bench = Bench()
    params = SamplingParams(max_tokens=9, stop_token_ids=[7])
    ended_by_stop = bench.add([1, 2], stop=(7, 0), params=params, max_tokens=9).requests[0]
    drive(bench, [5, 7])
    assert (ended_by_stop.finish_reason, ended_by_stop.stop_reason) == (FinishReason.STOP, 7)
    assert ended_by_stop.output_token_ids == [5, 7]
    ended_by_eos = bench.add([1, 2], stop=(7, 0), params=params, max_tokens=9).requests[0]
    drive(bench, [5, 0])
    assert (ended_by_eos.finish_reason, ended_by_eos.stop_reason) == (FinishReason.STOP, None)


def test_no_stop_before_min_tokens():
    bench = Bench()
    request = bench.add([1], stop=(7,), params=SamplingParams(min_tokens=3), max_tokens=9).requests[0]
    drive(bench, [7, 7])
    assert not request.is_finished
    drive(bench, [7])
    assert request.finish_reason is FinishReason.STOP and request.num_output_tokens == 3


def test_max_tokens_ends_with_length_and_frees_the_blocks_at_once():
    bench = Bench()
    request = bench.add([1, 2, 3], max_tokens=2).requests[0]
    drive(bench, [5, 5])
    assert request.finish_reason is FinishReason.LENGTH and request.metrics.finished_time is not None
    assert bench.blocks.num_blocks_held == 0 and bench.scheduler.num_finished[FinishReason.LENGTH] == 1


def test_a_missing_token_is_our_own_bug():
    bench = Bench()
    bench.add([1])
    output = bench.scheduler.schedule()
    with pytest.raises(AssertionError, match="g1 got no token"):
        bench.scheduler.update_from_output(output, {})


def test_a_failed_request_needs_no_token():
    bench = Bench()
    bad, good = (bench.add([1, token]).requests[0] for token in (1, 2))
    output = bench.scheduler.schedule()
    error = RuntimeError("its logits were not finite")
    bench.scheduler.finish(bad, FinishReason.ERROR, error=error)
    assert bench.blocks.num_blocks_of(bad) == 1, "its blocks are in use until the step is over"
    assert bench.scheduler.update_from_output(output, {good.request_id: 4}) == [good]
    assert bad.error is error and bad.output_token_ids == [] and bench.blocks.num_blocks_of(bad) == 0


def test_aborting_what_is_unknown_or_ended_is_no_error():
    """tenstorrent/vllm#145"""
    bench = Bench()
    assert bench.scheduler.abort("nobody") == []
    request = bench.add([1, 2]).requests[0]
    assert bench.scheduler.abort("g1") == [request] and bench.scheduler.abort("g1") == []
    bench.scheduler.finish(request, FinishReason.STOP)
    assert request.finish_reason is FinishReason.ABORT
    assert bench.scheduler.num_finished[FinishReason.ABORT] == 1
    assert not bench.scheduler.schedule().scheduled
    bench.check_idle()


def test_dropped_requests_leave_their_seats():
    """raullenchai/Rapid-MLX#1759"""
    bench = Bench(max_num_seqs=4)
    for _ in range(60):
        group = bench.add(range(9), max_tokens=50)
        bench.run_step()
        bench.scheduler.abort(group.group_id)
    last = bench.add([1, 2]).requests[0]
    bench.run_step()
    assert last.num_output_tokens == 1
    finish_all(bench)


# --- admission and fairness --------------------------------------------------------------------------------------


def test_a_lone_long_prompt_gets_the_whole_budget():
    bench = Bench(max_num_batched_tokens=20)
    bench.add(range(50))
    assert [shares(bench.run_step())["g1"] for _ in range(3)] == [20, 20, 10]
    finish_all(bench)


def test_long_prompts_share_the_budget_and_short_ones_pass():
    bench = Bench(max_num_batched_tokens=40, max_partial_prefills=2)
    bench.add(range(100))
    bench.add(range(200, 210))
    bench.add(range(300, 400))
    assert shares(bench.run_step()) == {"g1": 20, "g2": 10, "g3": 10}
    finish_all(bench)


def test_what_nobody_else_takes_goes_to_the_prompt_that_was_held_back():
    bench = Bench(max_num_batched_tokens=40)
    bench.add(range(100))
    bench.add(range(200, 205))
    assert shares(bench.run_step()) == {"g1": 35, "g2": 5}
    finish_all(bench)


def test_no_more_than_max_partial_prefills_are_begun():
    bench = Bench(num_blocks=200, max_num_batched_tokens=40, max_partial_prefills=2)
    for group in range(4):
        bench.add(range(100 * group, 100 * group + 100))
    while bench.scheduler.has_unfinished:
        output = bench.run_step()
        left = [r for r in bench.scheduler.requests.values() if 0 < r.num_computed_tokens < r.num_prompt_tokens]
        assert len(left) <= 2 and (not output.scheduled or output.num_scheduled_tokens > 0)
    finish_all(bench)


def test_decoding_requests_get_their_token_before_any_prompt():
    bench = Bench(max_num_batched_tokens=8)
    for token in range(4):
        bench.add([token], max_tokens=10)
    bench.run_step()
    bench.add(range(40))
    assert shares(bench.run_step()) == {"g1": 1, "g2": 1, "g3": 1, "g4": 1, "g5": 4}
    finish_all(bench)


def test_without_chunks_a_prompt_waits_for_a_step_with_room_for_all_of_it():
    bench = Bench(max_num_batched_tokens=16, enable_chunked_prefill=False)
    bench.add(range(10))
    bench.add(range(50, 60))
    assert shares(bench.run_step()) == {"g1": 10}
    assert shares(bench.run_step()) == {"g1": 1, "g2": 10}
    with pytest.raises(PromptTooLongError, match="`max_num_batched_tokens` = 16 allow 16"):
        bench.add(range(17))
    finish_all(bench)


def test_without_chunks_a_preempted_request_that_outgrew_the_budget_still_ends():
    bench = Bench(num_blocks=8, block_size=4, max_num_batched_tokens=8, enable_chunked_prefill=False)
    for token in range(3):
        bench.add([token] * 4, max_tokens=20)
    finish_all(bench)
    assert bench.scheduler.num_preemptions > 0


def test_a_request_for_prompt_logits_is_computed_in_small_chunks_without_hits():
    bench = Bench(prompt_logits_chunk=5)
    bench.add(range(12))
    bench.run_to_end()
    bench.add(range(12), params=SamplingParams(prompt_logprobs=1))
    outputs = [bench.run_step().scheduled[0] for _ in range(3)]
    assert [(s.num_computed_tokens, s.num_scheduled_tokens, s.prompt_logits) for s in outputs] == [
        (0, 5, True),
        (5, 5, True),
        (10, 2, True),
    ]
    assert not bench.run_step().scheduled[0].prompt_logits
    finish_all(bench)


def test_requests_that_are_not_ready_hold_up_nobody():
    """vllm-project/vllm#53130"""
    bench = Bench(max_num_seqs=2)
    deferred = [bench.add([1, token], ready=False).requests[0] for token in range(3)]
    bench.add([9, 9])
    assert list(shares(bench.run_step())) == ["g4"] and bench.scheduler.num_waiting == 3
    bench.scheduler.set_ready(deferred[1])
    assert "g2" in shares(bench.run_step())
    bench.scheduler.abort("g1")
    bench.scheduler.set_ready(deferred[2])
    finish_all(bench)


def test_a_group_is_queued_when_all_its_branches_are_ready():
    bench = Bench()
    group = bench.add([1, 2], n=2, ready=False)
    bench.scheduler.set_ready(group.requests[0])
    assert not bench.scheduler.schedule().scheduled
    bench.scheduler.set_ready(group.requests[1])
    finish_all(bench)


def test_a_step_looks_at_no_more_waiting_requests_than_it_needs(monkeypatch):
    bench = Bench(num_blocks=64, max_num_seqs=4)
    for token in range(2000):
        bench.add([token, 1], max_tokens=50)
    bench.run_step()
    calls = 0
    peek, find_prefix = FCFSPolicy.peek, bench.blocks.find_prefix

    def counting_peek(policy):
        nonlocal calls
        calls += 1
        return peek(policy)

    monkeypatch.setattr(FCFSPolicy, "peek", counting_peek)
    monkeypatch.setattr(bench.blocks, "find_prefix", lambda request: pytest.fail("there is no seat to fill"))
    output = bench.scheduler.schedule()
    assert len(output.scheduled) == 4 and calls <= 1
    monkeypatch.setattr(bench.blocks, "find_prefix", find_prefix)
    bench.scheduler.update_from_output(output, bench.runner.run(output, bench.scheduler.requests))


def test_an_empty_schedule_says_nothing_and_forgets_nothing():
    bench = Bench()
    bench.add([1, 2], max_tokens=1)
    bench.run_step()
    empty = bench.scheduler.schedule()
    assert not empty.scheduled and not empty.removed_ids
    assert bench.scheduler.update_from_output(empty, {}) == []
    bench.scheduler.cancel(empty)
    bench.add([1, 2], max_tokens=1)
    assert bench.run_step().removed_ids == ("g1",)


# --- prefix hits -------------------------------------------------------------------------------------------------


def test_prompts_of_the_same_step_share_their_beginning():
    bench = Bench(block_size=4)
    bench.add(range(9))
    second = bench.add([*range(8), 50, 51])
    assert shares(bench.run_step()) == {"g1": 9, "g2": 2}
    assert second.requests[0].metrics.num_cached_tokens == 8
    finish_all(bench)


@pytest.mark.parametrize("keys, cached", [([("a",), ("b",), ("a",)], [0, 0, 8]), ([(), ("x",), ()], [0, 0, 8])])
def test_extra_keys_keep_requests_apart(keys, cached):
    bench = Bench(block_size=4)
    groups = []
    for extra_keys in keys:
        groups.append(bench.add(range(9), extra_keys=extra_keys))
        bench.run_to_end()
    assert [group.requests[0].metrics.num_cached_tokens for group in groups] == cached
    finish_all(bench)


def test_the_cached_count_survives_preemption_and_never_exceeds_the_prompt():
    """vllm-project/vllm#36757"""
    bench = Bench(num_blocks=7, block_size=4)
    bench.add(range(5), max_tokens=1)
    bench.run_to_end()
    old, young = (bench.add([*range(5), token], max_tokens=18).requests[0] for token in (70, 80))
    finish_all(bench)
    assert young.metrics.num_preemptions > 0 and old.metrics.num_preemptions == 0
    assert old.metrics.num_cached_tokens == young.metrics.num_cached_tokens == 4


# --- preemption --------------------------------------------------------------------------------------------------


def test_preemption_does_not_show_in_the_answers():
    """vllm-project/vllm#16832, huggingface/transformers#43150"""
    tight, roomy = Bench(num_blocks=10, block_size=4), Bench(num_blocks=1000, block_size=4, max_model_len=40)
    for bench in (tight, roomy):
        for token in range(20):
            bench.add([token, *range(token)], max_tokens=20)
        finish_all(bench)
    assert tight.scheduler.num_preemptions >= 5 and roomy.scheduler.num_preemptions == 0
    pairs = zip(tight.all_requests, roomy.all_requests, strict=True)
    assert all(a.output_token_ids == b.output_token_ids for a, b in pairs)


def test_equal_priorities_are_served_in_order_and_nobody_loses_for_ever():
    """vllm-project/vllm#41951. Who is preempted comes back only after an older request has ended."""
    for policy in ("fcfs", "priority"):
        bench = Bench(num_blocks=12, block_size=4, policy=policy, max_num_seqs=6)
        for token in range(50):
            bench.add([token] * (1 + token % 7), max_tokens=12)
        finish_all(bench)
        preemptions = [request.metrics.num_preemptions for request in bench.all_requests]
        assert sum(preemptions) > 5 and max(preemptions) < 6
        first_scheduled = [request.metrics.first_scheduled_time for request in bench.all_requests]
        assert first_scheduled == sorted(first_scheduled), "admitted in the order of arrival"


def test_the_oldest_is_never_preempted_for_a_younger_one():
    bench = Bench(num_blocks=8, block_size=2, max_num_seqs=4)
    first = bench.add([1, 2, 3], max_tokens=12).requests[0]
    for token in range(6):
        bench.add([token, 5], max_tokens=12)
    finish_all(bench)
    assert first.metrics.num_preemptions == 0 and bench.scheduler.num_preemptions > 0


def test_the_urgent_one_is_served_first_and_the_least_urgent_gives_way():
    bench = Bench(num_blocks=6, block_size=2, policy="priority", max_num_seqs=2)
    calm = bench.add([1, 1, 1], max_tokens=8, priority=5).requests[0]
    urgent = bench.add([2, 2, 2], max_tokens=8, priority=-5).requests[0]
    late = bench.add([3, 3, 3], max_tokens=8, priority=-9).requests[0]
    assert list(shares(bench.run_step())) == [late.request_id, urgent.request_id]
    finish_all(bench)
    assert urgent.metrics.num_preemptions > 0 and late.metrics.num_preemptions == 0
    assert calm.metrics.first_token_time > late.metrics.finished_time


def test_a_preempted_request_waits_before_later_arrivals_and_is_told_anew():
    bench = Bench(num_blocks=6, block_size=2, max_num_seqs=2)
    bench.add([1, 1, 1], max_tokens=8)
    young = bench.add([2, 2, 2], max_tokens=8).requests[0]
    bench.add([3], max_tokens=1)
    outputs = [bench.run_step() for _ in range(5)]
    assert young.status is RequestStatus.PREEMPTED and young.num_computed_tokens == 0
    assert young.request_id in outputs[-1].removed_ids
    for _ in range(5):
        output = bench.run_step()
        if young.status is not RequestStatus.PREEMPTED:
            break
        assert "g3" not in shares(output)
    share = next(share for share in output.scheduled if share.request_id == young.request_id)
    assert share.is_new and share.new_token_ids == tuple(young.token_ids[: len(share.new_token_ids)])
    finish_all(bench)


def test_who_loses_its_blocks_in_the_step_that_would_have_filled_them_leaves_no_hash_behind():
    bench = Bench(num_blocks=40, block_size=2, policy="priority", max_num_batched_tokens=12)
    calm = bench.add(range(30), priority=5).requests[0]
    bench.run_step()
    bench.add(range(50, 62), priority=-5)
    bench.run_step()
    pool, index = bench.blocks.pools[0], bench.blocks.indexes[0]
    others = pool.allocate(pool.num_free - 4)  # leaves the calm one its three blocks, and one for the urgent one
    output = bench.scheduler.schedule()
    assert list(shares(output)) == ["g2"] and calm.status is RequestStatus.PREEMPTED
    # Nine of its blocks were computed; the three that this step was to fill were not.
    assert not any(index.block_id(block_hash.digest) is not None for block_hash in calm.block_hashes[9:])
    bench.scheduler.update_from_output(output, bench.runner.run(output, bench.scheduler.requests))
    pool.free(others)
    finish_all(bench)


def test_a_step_that_preempts_admits_nobody():
    bench = Bench(num_blocks=5, block_size=2, policy="priority", max_num_seqs=3)
    calm = bench.add([1, 1, 1], max_tokens=8, priority=5).requests[0]
    bench.run_step()
    urgent = bench.add([2, 2, 2], max_tokens=8, priority=-5).requests[0]
    bench.run_step()
    bench.run_step()
    short = bench.add([3], max_tokens=1, priority=0).requests[0]
    output = bench.run_step()
    assert list(shares(output)) == [urgent.request_id] and calm.status is RequestStatus.PREEMPTED
    assert short.status is RequestStatus.WAITING
    finish_all(bench)


def test_an_admission_leaves_the_running_requests_room_to_grow():
    bench = Bench(num_blocks=4, block_size=4)
    bench.add([1], max_tokens=3)
    bench.add(range(50, 62), max_tokens=1)
    bench.add(range(70, 78), max_tokens=1)
    assert shares(bench.run_step()) == {"g1": 1}
    bench.scheduler.abort("g2")
    assert shares(bench.run_step()) == {"g1": 1, "g3": 8}
    finish_all(bench)


# --- branches ----------------------------------------------------------------------------------------------------


def test_branches_fork_when_the_prompt_is_done_and_copy_when_they_write():
    bench = Bench(block_size=4, max_num_batched_tokens=4)
    group = bench.add(range(6), n=3, max_tokens=4)
    first, second = bench.run_step(), bench.run_step()
    assert first.scheduled[0].sample_ids == ()
    assert second.scheduled[0].sample_ids == ("g1-0", "g1-1", "g1-2")
    assert [r.num_computed_tokens for r in group.requests] == [6, 6, 6]
    assert [r.num_output_tokens for r in group.requests] == [1, 1, 1]
    assert bench.blocks.num_blocks_held == 2
    third = bench.run_step()
    assert len(third.block_copies[0]) == 2 and bench.blocks.num_blocks_held == 4
    assert [share.is_new for share in third.scheduled] == [True, True, True]
    assert not bench.run_step().block_copies[0]
    finish_all(bench)


def test_a_group_takes_its_seats_from_the_start():
    bench = Bench(max_num_seqs=4, max_num_batched_tokens=4)
    bench.add(range(10), n=3)
    bench.add([1], n=2)
    bench.add([2])
    for _ in range(3):
        assert {i[:2] for i in shares(bench.run_step())} == {"g1"}, "two seats are not free, and nobody jumps the queue"
    finish_all(bench)


@pytest.mark.parametrize("running", [False, True])
def test_the_next_branch_takes_over_if_the_first_ends_before_the_fork(running):
    bench = Bench(max_num_batched_tokens=4)
    group = bench.add(range(10), n=3)
    bench.add([1])
    if running:
        bench.run_step()
    bench.scheduler.abort("g1-0")
    bench.scheduler.abort("g1-2")
    assert "g1-1" in shares(bench.run_step())
    finish_all(bench)
    assert group.requests[1].num_output_tokens == 4


def test_aborting_a_group_ends_all_its_branches_wherever_they_are():
    for steps in range(4):
        bench = Bench(max_num_batched_tokens=4)
        group = bench.add(range(6), n=3)
        for _ in range(steps):
            bench.run_step()
        assert bench.scheduler.abort("g1") == group.requests
        bench.check_idle()
        bench.check_blocks()


def test_branches_lose_their_blocks_one_by_one():
    bench = Bench(num_blocks=8, block_size=2, max_num_seqs=4)
    bench.add(range(5), n=4, max_tokens=8)
    finish_all(bench)
    assert bench.scheduler.num_preemptions > 0 and bench.all_requests[0].metrics.num_preemptions == 0


# --- steps that fail ---------------------------------------------------------------------------------------------


def test_a_failed_step_is_scheduled_again_and_told_anew():
    bench = Bench(block_size=4)
    request = bench.add(range(9)).requests[0]
    bench.run_step()
    output = bench.scheduler.schedule()
    bench.runner.half_run(output)
    bench.scheduler.cancel(output)
    assert request.status is RequestStatus.RUNNING and request.num_computed_tokens == 9
    again = bench.run_step().scheduled[0]
    assert again.is_new and again.num_computed_tokens == 9 and again.new_token_ids == tuple(request.token_ids[:10])
    finish_all(bench)


def test_blocks_of_a_failed_step_are_not_found():
    bench = Bench(block_size=4)
    first, second = (bench.add([*range(9), token]).requests[0] for token in (70, 80))
    output = bench.scheduler.schedule()
    assert second.num_computed_tokens == 8
    bench.runner.half_run(output)
    bench.scheduler.cancel(output)
    assert (first.status, second.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    assert bench.blocks.num_hit_tokens == bench.blocks.num_queried_tokens == bench.blocks.num_blocks_held == 0
    bench.scheduler.abort(first.request_id)  # who would have filled the blocks is gone
    assert shares(bench.run_step()) == {second.request_id: 10}
    finish_all(bench)


def test_a_fork_of_a_failed_step_is_undone():
    bench = Bench(block_size=4)
    group = bench.add(range(6), n=3)
    output = bench.scheduler.schedule()
    bench.runner.half_run(output)
    bench.scheduler.abort("g1-0")
    bench.scheduler.cancel(output)
    bench.check_blocks()
    assert bench.run_step().scheduled[0].sample_ids == ("g1-1", "g1-2")
    finish_all(bench)
    assert [r.num_output_tokens for r in group.requests] == [0, 4, 4]


def test_who_was_removed_in_a_failed_step_is_removed_in_the_next():
    bench = Bench()
    bench.add([1, 2], max_tokens=1)
    bench.add([3, 4], max_tokens=5)
    bench.run_step()
    output = bench.scheduler.schedule()
    assert output.removed_ids == ("g1",)
    bench.scheduler.cancel(output)
    assert "g1" in bench.run_step().removed_ids
    finish_all(bench)


def test_a_step_in_flight_must_come_back_first():
    bench = Bench()
    bench.add([1])
    bench.scheduler.schedule()
    with pytest.raises(AssertionError, match="still in flight"):
        bench.scheduler.schedule()


def test_the_bookkeeping_needs_neither_torch_nor_numpy():
    import subprocess
    import sys

    code = (
        "import sys, hf_paged.generation.scheduler, hf_paged.generation.policies; "
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_oracle_itself_depends_on_every_token():
    bench = Bench()
    outputs = {
        tuple(expected_output(bench.add([token, 2, 3, 4], max_tokens=9).requests[0], frozenset(), 99))
        for token in range(5)
    }
    assert len(outputs) > 1


# --------------------------------------------------------------------------------------- sessions


def run_sessions(bench: Bench, max_steps: int = 500, parents=None) -> int:
    """Runs until nobody is left; whoever can choose tokens does so at once."""
    sessions = {request.session for request in bench.all_requests if request.session is not None}
    for step in range(max_steps):
        if not bench.scheduler.has_unfinished:
            return step
        output = bench.run_step()
        ready = [s for s in sessions if not (s.awaits_logits or s.is_blocked or s.is_over)]
        assert output.scheduled or ready, "everybody waits"
        for session in ready:
            session.proceed(parents)
    raise AssertionError("it goes on and on")


def test_rows_of_a_session_stand_still_until_tokens_are_chosen():
    bench = Bench(20, 4)
    session = bench.add_session([[1, 2, 3], [4, 5]], num_each=2, rounds=2)
    assert bench.run_step().num_scheduled_tokens == 5  # each prompt once
    assert session.is_choosing and bench.run_step().scheduled == ()
    session.proceed([1, 0, 2, 2])
    output = bench.run_step()
    assert output.num_scheduled_tokens == 4 and len(output.block_copies[0]) == 2
    run_sessions(bench)
    bench.check_idle()


def test_sessions_that_hold_each_others_seats_take_turns():
    """Each has some of its rows running, and none has all."""
    bench = Bench(40, 4, max_num_seqs=3)
    first, second = (bench.add_session([[i, 1], [i, 2]], rounds=2) for i in (1, 2))
    output = bench.run_step()
    assert [share.request_id for share in output.scheduled] == ["g1", "g2", "g3"]
    assert not first.awaits_logits and second.awaits_logits
    run_sessions(bench)
    bench.check_idle()
    bench = Bench(40, 4, max_num_seqs=4, max_num_batched_tokens=4)
    for i in (1, 2, 3):
        bench.add_session([[i, 1], [i, 2], [i, 3]], rounds=2)
    run_sessions(bench)
    bench.check_idle()


def test_a_session_that_thinks_too_long_makes_room_and_others_go_on():
    bench = Bench(20, 4, max_num_seqs=2)
    session = bench.add_session([[1, 2, 3], [4, 5]], rounds=2)
    bench.run_step()
    request = bench.add([7, 8, 9], max_tokens=5).requests[0]
    session.is_blocked = True
    assert bench.run_step().scheduled == ()  # it may go on any moment
    session.is_patient = False
    for _ in range(5):
        bench.run_step()
    assert request.is_finished
    bench.check_outputs([request])
    session.is_blocked = False
    run_sessions(bench)
    bench.check_idle()
    assert bench.scheduler.num_preemptions > 0


def test_rows_that_lost_their_blocks_wait_for_nobody_and_hold_up_nobody():
    bench = Bench(20, 4, max_num_seqs=2)
    session = bench.add_session([[1, 2, 3], [4, 5]], rounds=2)
    bench.run_step()
    for row in session.rows:
        bench.scheduler._take_blocks(row)
    assert bench.scheduler.num_waiting == 2 and bench.run_step().scheduled == ()
    for i in range(4):  # more than there are seats, and all behind the rows
        bench.add([7 + i, 8], max_tokens=3)
    while bench.scheduler.num_waiting > 2 or bench.scheduler.num_running:
        assert bench.run_step().scheduled
    session.proceed([0, 0])
    assert len(bench.run_step().scheduled) == 2
    run_sessions(bench)
    bench.check_idle()
    bench.check_outputs()


@pytest.mark.parametrize("lost", [[], [0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("parents", [[0, 0, 0], [1, 2, 0], [2, 2, 1], [0, 1, 2]])
@pytest.mark.parametrize("caching", [True, False])
def test_reordering_rows_of_which_some_lost_their_blocks(lost, parents, caching):
    bench = Bench(30, 4, caching=caching)
    session = bench.add_session([[1, 2, 3, 4, 5, 6]], num_each=3, rounds=3)
    bench.run_step()
    for _ in range(3):
        for place in lost:
            if session.rows[place].request_id in bench.scheduler._running:
                bench.scheduler._take_blocks(session.rows[place])
        session.proceed(parents)
        bench.check_blocks()
        while session.awaits_logits:
            assert bench.run_step().scheduled
    session.proceed()
    assert session.is_over
    bench.check_idle()


def test_rows_that_end_while_they_wait_leave_nothing():
    bench = Bench(20, 4)
    session = bench.add_session([[1, 2, 3], [4, 5]], num_each=2, rounds=2)
    bench.run_step()
    bench.scheduler._take_blocks(session.rows[1])
    session.end()
    bench.check_idle()


def test_a_step_that_takes_blocks_from_rows_that_stand_still_is_not_empty():
    """The row that gave way may be admitted again at once: nobody in the step shares what it lost."""
    bench = Bench(6, 2, max_num_seqs=4)
    first = bench.add_session([[1] * 4], num_each=1, rounds=4)
    second = bench.add_session([[2] * 3, [3] * 3], rounds=3)
    for _ in range(60):
        output = bench.run_step()
        ready = [session for session in (first, second) if not (session.awaits_logits or session.is_over)]
        assert output.scheduled or ready or not bench.scheduler.has_unfinished
        for session in ready:
            session.proceed()
    bench.check_idle()
