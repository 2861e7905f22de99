from __future__ import annotations

import itertools

import pytest

from hf_paged.cache.block_manager import BlockManager
from hf_paged.generation.request import Request
from hf_paged.generation.sampling.params import SamplingParams

_numbers = itertools.count()


def make(tokens, **kwargs) -> Request:
    params = SamplingParams(prompt_logprobs=kwargs.pop("prompt_logprobs", None))
    return Request(f"r{next(_numbers)}", list(tokens), params, max_tokens=8, **kwargs)


def compute(manager: BlockManager, request: Request, num_tokens: int | None = None) -> int:
    """Admits a request if needed, computes its tokens in one step, and returns how many were cached."""
    cached = 0
    if not manager.num_blocks_of(request):
        hit = manager.find_prefix(request)
        manager.admit(request, hit)
        cached = hit.num_tokens
    num_tokens = num_tokens or request.num_tokens - request.num_computed_tokens
    assert manager.allocate_slots(request, num_tokens) is not None
    manager.commit(request)
    request.num_computed_tokens += num_tokens
    return cached


def decode(manager: BlockManager, request: Request, token: int) -> None:
    request.token_ids.append(token)
    compute(manager, request)


def test_sizes():
    manager = BlockManager([5, 7], block_size=4)
    assert manager.num_blocks == manager.num_free_blocks == 5
    assert manager.usable_tokens == 20
    assert [manager.blocks_needed(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("length, cached", [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8)])
def test_a_hit_has_full_blocks_only_and_leaves_a_token_to_compute(length, cached):
    manager = BlockManager([16], block_size=4)
    compute(manager, make(range(12)))
    request = make(range(length))
    assert manager.find_prefix(request).num_tokens == cached
    assert compute(manager, request) == cached == request.num_computed_tokens - (length - cached)


def test_looking_for_a_prefix_changes_nothing():
    manager = BlockManager([4], block_size=4)
    first = make(range(9))
    compute(manager, first)
    manager.free(first)
    before = list(manager.pools[0]._free), list(manager.pools[0].ref_counts)
    hit = manager.find_prefix(make(range(9)))
    assert hit.num_tokens == 8 and hit.num_idle == (2,)
    assert (list(manager.pools[0]._free), list(manager.pools[0].ref_counts)) == before


def test_salts_separate_tenants():
    """LMCache/LMCache#2878"""
    manager = BlockManager([32], block_size=4)
    salts = [("a",), ("b",), ("a",)]
    assert [compute(manager, make(range(9), extra_keys=salt)) for salt in salts] == [0, 0, 8]


def test_an_adapter_label_without_its_identity_would_not_do():
    """vllm-project/vllm#30931"""
    manager = BlockManager([32], block_size=4)
    assert compute(manager, make(range(32 - 8), extra_keys=("label", 1))) == 0
    assert compute(manager, make(range(32 - 8), extra_keys=("label", 2))) == 0


def test_a_request_for_all_prompt_logits_finds_nothing_until_it_has_had_them():
    manager = BlockManager([32], block_size=4)
    compute(manager, make(range(9)))
    request = make(range(9), prompt_logprobs=1)
    assert manager.find_prefix(request).num_tokens == 0
    request.token_ids.append(5)  # its first output: all prompt logits were computed
    assert manager.find_prefix(request).num_tokens == 8


def test_reusing_a_block_drops_its_hash():
    """GeeeekExplorer/nano-vllm#163"""
    manager = BlockManager([6], block_size=4)
    first, second = make(range(24)), make(range(100, 124))
    compute(manager, first)
    manager.free(first)
    compute(manager, second)  # takes the whole pool
    manager.free(second)
    assert manager.find_prefix(make(range(24))).num_tokens == 0
    assert manager.find_prefix(make(range(100, 124))).num_tokens == 20
    assert all(block_hash.token_ids[0] >= 100 for _, block_hash in manager.indexes[0].items())


def test_a_partial_tail_is_never_registered_and_gets_one_hash_when_it_is_full():
    """vllm-project/vllm#49125"""
    manager = BlockManager([8], block_size=4)
    request = make(range(6))
    compute(manager, request)
    assert len(manager.indexes[0]) == 1
    tail = manager.block_table(request)[0][1]
    decode(manager, request, 50)
    assert tail not in manager.indexes[0]
    decode(manager, request, 51)
    decode(manager, request, 52)
    assert tail in manager.indexes[0] and len(manager.indexes[0]) == 2
    assert manager.find_prefix(make([*range(6), 7, 7, 7])).num_tokens == 4
    assert manager.find_prefix(make([*range(6), 50, 51, 7])).num_tokens == 8


def test_requests_of_one_step_share_what_the_first_of_them_fills():
    manager = BlockManager([8], block_size=4)
    first, second = make(range(9)), make(range(10))
    manager.admit(first, manager.find_prefix(first))
    manager.allocate_slots(first, 9)  # not committed: the step has not run
    assert manager.find_prefix(second).num_tokens == 8


def test_a_chunk_registers_only_what_it_fills():
    manager = BlockManager([8], block_size=4)
    request = make(range(20))
    compute(manager, request, 10)
    assert manager.find_prefix(make(range(20))).num_tokens == 8
    compute(manager, request, 3)
    assert manager.find_prefix(make(range(20))).num_tokens == 12


def test_a_failed_step_leaves_no_trace():
    manager = BlockManager([8], block_size=4)
    request = make(range(20))
    compute(manager, request, 6)
    table, hashes = [list(ids) for ids in manager.block_table(request)], len(manager.indexes[0])
    allocation = manager.allocate_slots(request, 9)
    assert len(allocation.new_block_ids[0]) == 2 and len(allocation.registered) == 2
    manager.rollback(request)
    assert manager.block_table(request) == table and len(manager.indexes[0]) == hashes
    assert manager.num_free_blocks == 6
    assert manager.find_prefix(make(range(20))).num_tokens == 4


def test_missing_blocks_change_nothing():
    manager = BlockManager([2], block_size=4)
    request = make(range(12))
    manager.admit(request, manager.find_prefix(request))
    assert manager.allocate_slots(request, 9) is None
    assert manager.num_free_blocks == 2 and manager.num_blocks_of(request) == 0
    assert manager.allocate_slots(request, 8) is not None


def test_a_request_that_needs_all_of_the_pool_is_admitted_and_one_token_more_is_not():
    manager = BlockManager([4], block_size=4)
    for length, fits in [(15, True), (16, True), (17, False)]:
        request = make(range(length))
        assert manager.can_admit(request, manager.find_prefix(request)) is fits
    assert not manager.can_admit(make(range(16)), manager.find_prefix(make([99])), num_reserved=1)


def test_idle_hits_count_as_blocks_that_are_taken():
    manager = BlockManager([3], block_size=4)
    first = make(range(8))
    compute(manager, first)
    manager.free(first)
    other = make([50, 51, 52])
    compute(manager, other)
    request = make(range(12))  # two idle hits and one more block; two blocks are free, and both are the hits
    hit = manager.find_prefix(request)
    assert hit.num_idle == (2,) and not manager.can_admit(request, hit)
    manager.free(other)
    assert manager.can_admit(request, manager.find_prefix(request))


def test_only_a_block_that_is_begun_and_not_filled_is_cleared():
    manager = BlockManager([8], block_size=4)
    request = make(range(20))
    manager.admit(request, manager.find_prefix(request))
    allocation = manager.allocate_slots(request, 6)
    assert list(allocation.cleared_blocks) == [manager.block_table(request)[0][1]]
    allocation = manager.allocate_slots(request, 8)  # the same step, given more: now it is filled
    assert list(allocation.cleared_blocks) == []
    manager.commit(request)
    request.num_computed_tokens = 8
    manager.allocate_slots(request, 1)
    manager.commit(request)
    request.num_computed_tokens = 9
    assert not manager.allocate_slots(request, 1).cleared_blocks, "it holds a token already"


def test_the_last_branch_to_write_keeps_the_original():
    manager = BlockManager([8], block_size=4)
    branches = [make(range(6)) for _ in range(3)]
    compute(manager, branches[0])
    for child in branches[1:]:
        manager.fork(branches[0], child)
        child.num_computed_tokens = 6
    full, partial = manager.block_table(branches[0])[0]
    assert manager.num_owners(0, partial) == 3 and manager.num_free_blocks == 6
    copies = []
    for token, branch in enumerate(branches):
        branch.token_ids.append(token)
        copies += manager.allocate_slots(branch, 1).block_copies
    tables = [manager.block_table(branch)[0] for branch in branches]
    assert [table[0] for table in tables] == [full] * 3
    assert tables[2][1] == partial and len({table[1] for table in tables}) == 3
    assert copies == [(partial, tables[0][1]), (partial, tables[1][1])]
    assert manager.pools[0].ref_counts[partial] == 3, "not to be reused before it is copied"
    for branch in branches:
        manager.commit(branch)
        branch.num_computed_tokens = 7
    assert manager.pools[0].ref_counts[partial] == 1


def test_a_copy_source_is_not_handed_out_before_the_step_is_over():
    manager = BlockManager([4], block_size=4)
    parent, child = make(range(6)), make(range(6))
    compute(manager, parent)
    manager.fork(parent, child)
    child.num_computed_tokens = 6
    parent.token_ids.append(1)
    ((source, _),) = manager.allocate_slots(parent, 1).block_copies
    manager.free(child)  # preempted in the same step
    assert manager.num_free_blocks == 1 and source not in manager.pools[0]._free
    manager.commit(parent)
    assert manager.num_free_blocks == 2 and source in manager.pools[0]._free


def test_a_copy_is_undone_with_its_step():
    manager = BlockManager([8], block_size=4)
    parent, child = make(range(6)), make(range(6))
    compute(manager, parent)
    manager.fork(parent, child)
    child.num_computed_tokens = 6
    table = list(manager.block_table(parent)[0])
    for request in (parent, child):
        request.token_ids.append(1)
        manager.allocate_slots(request, 1)
    for request in (parent, child):
        manager.rollback(request)
        assert manager.block_table(request)[0] == table
    assert manager.num_free_blocks == 6 and manager.num_owners(0, table[1]) == 2


def test_branches_at_a_block_boundary_copy_nothing():
    manager = BlockManager([8], block_size=4)
    parent, child = make(range(8)), make(range(8))
    compute(manager, parent)
    manager.fork(parent, child)
    child.num_computed_tokens = 8
    for request in (parent, child):
        request.token_ids.append(1)
        assert not manager.allocate_slots(request, 1).block_copies


def test_a_hit_counts_only_if_all_layer_groups_have_it():
    manager = BlockManager([8, 8], block_size=4)
    first = make(range(13))
    compute(manager, first)
    manager.indexes[1].forget(manager.block_table(first)[1][1])
    hit = manager.find_prefix(make(range(13)))
    assert hit.num_tokens == 4 and [len(ids) for ids in hit.block_ids] == [1, 1]


def test_after_new_weights_nothing_old_is_found_or_registered():
    manager = BlockManager([16], block_size=4)
    running = make(range(6))
    compute(manager, running)
    manager.reset_prefix_cache()
    for token in range(8):
        decode(manager, running, token)
    child = make(running.token_ids)
    manager.fork(running, child)
    child.num_computed_tokens = running.num_computed_tokens
    for token in range(4):
        decode(manager, child, token)
    assert len(manager.indexes[0]) == 0, "its K/V are partly of the old weights"
    compute(manager, make(range(6)))
    assert len(manager.indexes[0]) == 1


def test_without_prefix_caching_nothing_is_registered():
    manager = BlockManager([8], 4, enable_prefix_caching=False)
    compute(manager, make(range(9)))
    assert manager.find_prefix(make(range(9))).num_tokens == 0 and len(manager.indexes[0]) == 0


def test_counters_and_waste_count_shared_blocks_once():
    manager = BlockManager([16], block_size=4)
    first, second = make(range(9)), make(range(10))
    compute(manager, first)
    compute(manager, second)
    assert (manager.num_queried_tokens, manager.num_hit_tokens) == (19, 8)
    assert manager.num_blocks_held == 4  # two shared, a tail each
    assert manager.num_tokens_stored == 8 + 1 + 2
    assert manager.waste == pytest.approx(1 - 11 / 16)
    manager.free(first)
    manager.free(second)
    assert manager.num_blocks_held == manager.num_tokens_stored == 0 and manager.waste == 0.0


def test_an_undone_admission_leaves_the_counters_as_they_were():
    manager = BlockManager([16], block_size=4)
    compute(manager, make(range(9)))
    before = manager.num_queried_tokens, manager.num_hit_tokens
    request = make(range(9))
    manager.admit(request, manager.find_prefix(request))
    manager.undo_admission(request)
    assert (manager.num_queried_tokens, manager.num_hit_tokens) == before and not manager.num_blocks_of(request)


def test_freeing_a_request_without_blocks_is_no_error():
    BlockManager([2], 4).free(make([1]))


# --- other weights -------------------------------------------------------------------------------------------------


def answered(manager: BlockManager, tokens, **kwargs) -> int:
    request = make(tokens, **kwargs)
    cached = compute(manager, request)
    manager.free(request)
    return cached


def test_blocks_are_found_under_the_weights_that_computed_them():
    manager = BlockManager([32, 32], block_size=4)
    cached = []
    for key in ("a", "b", "a", "c", "b"):
        manager.switch_weights((key,))
        cached.append(answered(manager, range(9)))
        manager.confirm()
    assert cached == [0, 0, 8, 0, 8]
    manager.reset_prefix_cache()
    assert answered(manager, range(9)) == 0


def test_blocks_that_nobody_vouches_for_are_forgotten_at_a_switch():
    manager = BlockManager([32], block_size=4)
    manager.switch_weights(("a",))
    answered(manager, range(9))
    manager.confirm()
    answered(manager, range(50, 59))  # perhaps computed after the weights were switched away and back
    manager.switch_weights(("a",))
    assert answered(manager, range(9)) == 8
    assert answered(manager, range(50, 59)) == 0


def test_requests_that_run_across_a_switch_register_nothing_until_they_are_admitted_anew():
    manager = BlockManager([32], block_size=4)
    manager.switch_weights(("a",))
    running, waiting = make(range(9)), make(range(9))
    compute(manager, running)
    manager.confirm()
    manager.find_prefix(waiting)  # and so it has hashes of its blocks already
    manager.switch_weights(("b",))
    for token in range(9, 20):
        decode(manager, running, token)
    assert compute(manager, waiting) == 0
    assert answered(manager, range(20)) == 8  # what `waiting` computed, and no more
    manager.free(running)
    running.num_computed_tokens = 0  # as a preemption does
    assert compute(manager, running) == 16
    manager.switch_weights(("a",))
    assert answered(manager, range(20)) == 8


def test_users_keys_and_the_weights_both_count():
    manager = BlockManager([32], block_size=4)
    manager.switch_weights(("a",))
    assert [answered(manager, range(9), extra_keys=keys) for keys in (("x",), ("y",), ("x",), ())] == [0, 0, 8, 0]


# --------------------------------------------------------------------------------------- reassigning


def branches(manager: BlockManager, tokens, count: int) -> list[Request]:
    """Requests with the same tokens and blocks."""
    parent = make(tokens)
    compute(manager, parent)
    children = [make(tokens) for _ in range(count - 1)]
    for child in children:
        manager.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
    return [parent, *children]


def tables(manager: BlockManager, requests: list[Request]) -> list[list[int]]:
    return [list(manager.block_table(request)[0]) for request in requests]


@pytest.mark.parametrize("parents", itertools.product(range(3), repeat=3))
@pytest.mark.parametrize("groups", [1, 2])
def test_reassigning_moves_tables_all_at_once(parents, groups):
    manager = BlockManager([30] * groups, block_size=4)
    requests = branches(manager, range(10), 3)
    for place, request in enumerate(requests):
        for token in range(5):
            decode(manager, request, 100 * place + token)
    before = tables(manager, requests)
    manager.reassign([(requests[i], requests[parent]) for i, parent in enumerate(parents) if parent != i])
    assert tables(manager, requests) == [before[parent] for parent in parents]
    held = {block_id for table in tables(manager, requests) for block_id in table}
    assert manager.num_blocks_held == len(held)
    for group in range(groups):
        for block_id in held if group == 0 else ():
            owners = sum(block_id in table for table in tables(manager, requests))
            assert manager.num_owners(group, block_id) == owners
    for request in requests:
        manager.free(request)
    assert manager.num_blocks_held == 0
    assert all(pool.num_free == pool.num_blocks for pool in manager.pools)


def test_who_writes_into_a_reassigned_block_copies_it_and_the_last_keeps_it():
    manager = BlockManager([30], block_size=4)
    first, second, third = branches(manager, range(10), 3)
    decode(manager, first, 50)
    manager.reassign([(second, first), (third, first)])
    for request in (second, third):
        request.token_ids[:] = list(first.token_ids)
        request.num_computed_tokens = first.num_computed_tokens
    shared = manager.block_table(first)[0][2]
    copied = []
    for token, request in enumerate((first, second, third)):
        request.token_ids.append(token)
        allocation = manager.allocate_slots(request, 1)
        copied.append([source for source, _ in allocation.block_copies])
        manager.commit(request)
        request.num_computed_tokens += 1
    assert copied == [[shared], [shared], []]
    assert manager.block_table(third)[0][2] == shared
    assert len({manager.block_table(request)[0][2] for request in (first, second, third)}) == 3


def test_blocks_that_nobody_continues_can_be_found_until_they_are_used_again():
    manager = BlockManager([30], block_size=4)
    first, second = branches(manager, range(10), 2)
    for token in range(8):
        decode(manager, second, token + 100)
    lost = make(second.token_ids)
    manager.reassign([(second, first)])
    assert manager.find_prefix(lost).num_tokens == 16


def test_reassigning_in_the_middle_of_a_step_is_our_own_mistake():
    manager = BlockManager([30], block_size=4)
    first, second = branches(manager, range(10), 2)
    first.token_ids.append(5)
    manager.allocate_slots(first, 1)
    with pytest.raises(AssertionError, match="is part of a step"):
        manager.reassign([(second, first)])
