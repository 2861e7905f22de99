from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.cache.block_pool import BlockPool


def test_all_blocks_are_usable_and_none_is_reserved():
    pool = BlockPool(3)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert pool.num_free == 0 and pool.num_used == 3


def test_more_than_there_is_is_our_own_bug():
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        BlockPool(3).allocate(4)


def test_a_double_free_is_noticed():
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.free([block_id])
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free([block_id])


def test_a_shared_block_is_free_only_when_its_last_owner_lets_go():
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.touch(block_ids)
    pool.free(block_ids)
    assert pool.num_free == 0
    pool.free(block_ids)
    assert pool.num_free == 1


def test_a_free_block_that_is_touched_is_held_again_and_not_handed_out():
    pool = BlockPool(2)
    first = pool.allocate(1)
    pool.free(first, cached=first)
    pool.touch(first)
    assert pool.ref_counts[first[0]] == 1
    assert pool.allocate(1) != first and pool.num_free == 0


def test_a_pool_that_grows_keeps_its_blocks_and_hands_out_new_ones_before_cached_ones():
    pool = BlockPool(2)
    held, cached = pool.allocate(1), pool.allocate(1)
    pool.free(cached, cached=cached)
    pool.grow(3)
    assert pool.num_blocks == 5 and pool.num_free == 4 and pool.ref_counts[held[0]] == 1
    assert pool.allocate(4) == [2, 3, 4, *cached]


def test_blocks_without_a_hash_are_reused_before_cached_ones():
    pool = BlockPool(4)
    block_ids = pool.allocate(4)
    pool.free(block_ids, cached=block_ids[:2])
    assert set(pool.allocate(2)) == set(block_ids[2:])


def test_cached_blocks_are_reused_oldest_first_and_tails_before_heads():
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    pool.free(old, cached=old)
    pool.free(new, cached=new)
    assert pool.allocate(4) == [old[1], old[0], new[1], new[0]]


def test_using_a_cached_block_makes_it_the_newest():
    pool = BlockPool(2)
    block_ids = pool.allocate(2)
    pool.free(block_ids[:1], cached=block_ids)
    pool.free(block_ids[1:], cached=block_ids)
    pool.touch(block_ids[:1])
    pool.free(block_ids[:1], cached=block_ids)
    assert pool.allocate(2) == [block_ids[1], block_ids[0]]


@given(st.lists(st.tuples(st.sampled_from(["allocate", "touch", "free"]), st.integers(0, 7), st.booleans())))
def test_free_and_used_add_up_and_counts_follow_the_owners(operations):
    pool, owners = BlockPool(4), []
    for name, number, cached in operations:
        if name == "allocate" and number <= pool.num_free:
            owners += pool.allocate(number)
        elif name == "touch":
            pool.touch([number % 4])
            owners.append(number % 4)
        elif name == "free" and owners:
            block_id = owners.pop(number % len(owners))
            pool.free([block_id], cached=[block_id] if cached else ())
        assert pool.ref_counts == [owners.count(block_id) for block_id in range(4)]
        assert pool.num_used == len(set(owners)) and pool.num_free + pool.num_used == 4
