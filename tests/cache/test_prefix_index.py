from __future__ import annotations

import pytest

from hf_paged.cache.prefix_index import BlockHash, PrefixIndex, extend_block_hashes


def hashes(tokens, block_size=4, extra_keys=(), **kwargs) -> list[BlockHash]:
    result: list[BlockHash] = []
    extend_block_hashes(result, tokens, block_size, len(tokens) // block_size, extra_keys, **kwargs)
    return result


def filled(block_hashes, first=10) -> PrefixIndex:
    index = PrefixIndex()
    for block_id, block_hash in enumerate(block_hashes, first):
        assert index.register(block_hash, block_id)
    return index


def test_the_longest_known_beginning_is_found():
    index = filled(hashes(range(12)))
    assert index.find(hashes(range(12))) == [10, 11, 12]
    assert index.find(hashes([*range(8), 99, 98, 97, 96])) == [10, 11]
    assert index.find(hashes([99, *range(1, 12)])) == []


def test_equal_blocks_after_different_beginnings_are_different():
    index = filled(hashes([1, 1, 1, 1, 2, 2, 2, 2]))
    assert index.find(hashes([2, 2, 2, 2])) == []


def test_hashes_are_extended_as_tokens_arrive_and_only_for_full_blocks():
    some = hashes(range(7))
    assert len(some) == 1
    extend_block_hashes(some, list(range(9)), 4, 2)
    assert [h.digest for h in some] == [h.digest for h in hashes(range(8))]
    with pytest.raises(AssertionError, match="only full blocks"):
        extend_block_hashes(some, list(range(9)), 4, 3)


@pytest.mark.parametrize("change", [(31, -1), (-31, 1), (1, -31), (-1, 31)])
@pytest.mark.parametrize("position", range(3))
def test_algebraic_neighbours_do_not_collide(position, change):
    """A polynomial rolling hash keeps its value under such changes; NVIDIA/Megatron-LM#4158."""
    tokens = [100, 200, 300, 400]
    forged = list(tokens)
    forged[position] += change[0]
    forged[position + 1] += change[1]
    assert hashes(forged)[0].digest != hashes(tokens)[0].digest
    assert filled(hashes(tokens)).find(hashes(forged)) == []


@pytest.mark.parametrize(
    "mine, theirs",
    [
        (("salt", "a"), ("salt", "b")),
        (("adapter", "name a", 1), ("adapter", "name a", 2)),
        (("embeddings", b"\x01"), ("embeddings", b"\x02")),
        (("a",), ()),
    ],
)
def test_extra_keys_separate_equal_tokens(mine, theirs):
    index = filled(hashes(range(8), extra_keys=mine))
    assert index.find(hashes(range(8), extra_keys=mine)) == [10, 11]
    assert index.find(hashes(range(8), extra_keys=theirs)) == []


def one_for_all(data: bytes) -> bytes:
    return b"collision"


def test_a_hit_is_decided_by_tokens_even_if_all_hashes_collide():
    index = filled(hashes([1, 2, 3, 4], hash_function=one_for_all))
    assert index.find(hashes([1, 2, 3, 4], hash_function=one_for_all)) == [10]
    assert index.find(hashes([1, 2, 3, 5], hash_function=one_for_all)) == []
    assert index.find(hashes([1, 2, 3, 4], extra_keys=("a",), hash_function=one_for_all)) == []


def test_a_colliding_parent_does_not_lead_to_a_foreign_continuation():
    """Equal second blocks with equal parent hashes, but the parents hold different tokens."""

    def only_first_token(data: bytes) -> bytes:
        return data[-10:-2]  # the last token of a block; the extra keys' repr is two bytes

    mine = hashes([1, 2, 3, 9, 5, 5, 5, 5], hash_function=only_first_token)
    theirs = hashes([4, 4, 4, 9, 5, 5, 5, 5], hash_function=only_first_token)
    assert [h.digest for h in mine] == [h.digest for h in theirs]
    index = filled(mine)
    index.forget(10)
    assert index.register(theirs[0], 20)  # now the other parent is found under the hash ...
    assert index.find(theirs) == [20]  # ... but not my continuation of it


def test_a_continuation_is_found_again_after_its_beginning_was_lost_and_recomputed():
    index = filled(hashes(range(8)))
    index.forget(10)
    assert index.find(hashes(range(8))) == []
    assert index.register(hashes(range(8))[0], 30)
    assert index.find(hashes(range(8))) == [30, 11]


def test_one_block_per_hash_and_one_hash_per_block():
    index = PrefixIndex()
    first, second = hashes(range(8))
    assert index.register(first, 1)
    assert not index.register(hashes(range(4))[0], 2), "the first block of equal content stays"
    assert not index.register(second, 1), "a block keeps its first hash"
    assert list(index.items()) == [(1, first)] and 2 not in index


def test_forgetting_and_clearing():
    index = filled(hashes(range(8)))
    index.forget(11)
    index.forget(11)
    index.forget(999)
    assert index.find(hashes(range(8))) == [10] and len(index) == 1
    index.clear()
    assert len(index) == 0 and index.find(hashes(range(8))) == []


def test_comparing_long_equal_prefixes_stops_at_the_shared_parent():
    index = filled(hashes(range(4000)))
    mine = hashes(range(4000))
    assert len(index.find(mine)) == 1000
    assert all(h is index._hashes[block_id] for block_id, h in enumerate(mine, 10))
