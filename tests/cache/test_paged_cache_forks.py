"""Forks and copies of a `PagedCache`: one prefix in memory, continuations that never meet."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from transformers import DynamicCache

from hf_paged import InvalidRequestError, PagedCache
from hf_paged.compat import cache_argument
from tests.cache.test_paged_cache import forward, tokens_of
from tests.families import tiny_model


def whole(model, *parts: torch.Tensor) -> torch.Tensor:
    """The logits of the last part, computed without any cache of ours."""
    return forward(model, torch.cat(parts, dim=1), DynamicCache())[:, -parts[-1].shape[1] :]


def held(*caches: PagedCache) -> int:
    """Blocks that any of the caches holds, each counted once."""
    return len({block_id for cache in caches for row in cache.tables for block_id in row})


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "deepseek_v3"])
def test_forks_continue_on_their_own_and_share_the_prefix(family):
    model, prefix = tiny_model(family), tokens_of(2, 40)
    cache = PagedCache(model.config)
    forward(model, prefix, cache)
    caches = [cache, *cache.fork(3)]
    assert held(*caches) == 6 == cache.num_blocks - cache.num_blocks_free
    for step in range(2):  # in turns, so that one would see what another wrote
        for number, each in enumerate(caches):
            new = [tokens_of(2, 5, seed=10 * number + i) for i in range(step + 1)]
            torch.testing.assert_close(forward(model, new[-1], each), whole(model, prefix, *new), atol=1e-5, rtol=1e-5)
    # Two full blocks of each row stay shared; the third was copied for all that part from the last one.
    assert held(*caches) == 2 * (2 + 4 * 2) == cache.num_blocks - cache.num_blocks_free


def test_fork_at_a_blocks_end_copies_nothing():
    model = tiny_model("llama")
    cache = PagedCache(model.config)
    forward(model, tokens_of(1, 32), cache)
    (fork,) = cache.fork()
    forward(model, tokens_of(1, 1), fork)
    assert (cache.num_blocks_held, fork.num_blocks_held, held(cache, fork)) == (2, 3, 3)


def test_fork_of_an_empty_cache_is_an_empty_cache():
    model = tiny_model("llama")
    cache = PagedCache(model.config, block_size=4)
    (fork,) = cache.fork(1)
    assert fork.get_seq_length() == 0 and fork.batch_size == -1 and fork.block_size == 4
    for each, rows in ((cache, 1), (fork, 3)):
        tokens = tokens_of(rows, 7)
        torch.testing.assert_close(forward(model, tokens, each), whole(model, tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2"])
def test_number_of_forks_must_be_positive(n):
    with pytest.raises(InvalidRequestError, match="`n` must be a whole number"):
        PagedCache().fork(n)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(-9),
        lambda cache: cache.reset(),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
    ],
    ids=["crop", "reset", "reorder", "repeat", "select"],
)
@pytest.mark.parametrize("changes_fork", [True, False])
def test_what_is_done_to_one_leaves_the_other_alone(change, changes_fork):
    model, prefix, new = tiny_model("llama"), tokens_of(2, 27), tokens_of(2, 4, seed=1)
    cache, reference = PagedCache(model.config, block_size=8), DynamicCache()
    for each in (cache, reference):
        forward(model, prefix, each)
    (fork,) = cache.fork()
    changed, other = (fork, cache) if changes_fork else (cache, fork)
    change(changed)
    if changed.get_seq_length():
        change(reference)
    else:
        reference = DynamicCache()  # its own `reset` keeps zeros before Transformers 5.24
    rows = max(changed.batch_size, 2) if changed.batch_size != 1 else 1
    more = tokens_of(rows, 5, seed=2)
    torch.testing.assert_close(forward(model, more, changed), forward(model, more, reference), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(forward(model, new, other), whole(model, prefix, new), atol=1e-5, rtol=1e-5)


def test_memory_grows_for_all_forks_and_is_freed_with_the_last():
    model = tiny_model("llama")
    cache = PagedCache(model.config, block_size=1)
    forward(model, tokens_of(1, 20), cache)
    forks = cache.fork(3)
    for number, fork in enumerate(forks):
        forward(model, tokens_of(1, 60, seed=number), fork)
    assert cache.num_blocks - cache.num_blocks_free == 20 + 3 * 60
    memory = weakref.ref(cache.layers[0].tables.store.layers[0][0])
    gc.disable()  # nothing waits for the collector
    try:
        del fork
        forks.pop()
        assert cache.num_blocks - cache.num_blocks_free == 20 + 2 * 60
        del cache
        assert memory() is not None
        torch.testing.assert_close(
            forward(model, tokens_of(1, 3), forks[0]),
            whole(model, tokens_of(1, 20), tokens_of(1, 60), tokens_of(1, 3)),
            atol=1e-5,
            rtol=1e-5,
        )
        forks.clear()
        assert memory() is None
    finally:
        gc.enable()


def test_forks_made_in_inference_mode_continue_outside_and_back():
    model, prefix = tiny_model("llama"), tokens_of(1, 21)
    cache = PagedCache(model.config)
    with torch.inference_mode():
        forward(model, prefix, cache)
        first, second = cache.fork(2)
        twin = copy.deepcopy(cache)
        forward(model, tokens_of(1, 2, seed=1), first)
    for each, parts in ((first, [tokens_of(1, 2, seed=1)]), (second, []), (twin, []), (cache, [])):
        new = tokens_of(1, 5, seed=4)
        logits = model(new, use_cache=True, **{cache_argument(model): each}).logits  # gradients on
        logits.sum().backward()
        torch.testing.assert_close(logits.detach(), whole(model, prefix, *parts, new), atol=1e-5, rtol=1e-5)
        assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
        with torch.inference_mode():
            torch.testing.assert_close(
                forward(model, new, each), whole(model, prefix, *parts, new, new), atol=1e-5, rtol=1e-5
            )


def test_forks_of_a_cache_with_gradients_share_its_graph():
    model, prefix = tiny_model("llama"), tokens_of(1, 11)
    new = [tokens_of(1, 4, seed=seed) for seed in (1, 2)]
    weight = model.model.layers[0].self_attn.k_proj.weight
    cache = PagedCache(model.config)
    model(prefix, use_cache=True, **{cache_argument(model): cache})
    forks = [cache.fork()[0], copy.deepcopy(cache)]
    losses = [
        model(tokens, use_cache=True, **{cache_argument(model): fork}).logits.square().mean()
        for tokens, fork in zip(new, forks, strict=True)
    ]
    (losses[0] + losses[1]).backward()
    gradient, weight.grad = weight.grad, None
    for tokens in new:
        model(torch.cat([prefix, tokens], dim=1)).logits[:, 11:].square().mean().backward()
    torch.testing.assert_close(gradient, weight.grad, atol=1e-5, rtol=1e-4)


def test_forks_in_threads_get_what_they_would_get_alone():
    model, prefix = tiny_model("llama"), tokens_of(1, 30)
    cache = PagedCache(model.config, block_size=4)
    forward(model, prefix, cache)
    answers = {}

    def continue_alone(number: int, fork: PagedCache) -> None:
        for step in range(9):
            logits = forward(model, tokens_of(1, 2, seed=100 * number + step), fork)
            (fork,) = fork.fork()  # the one before dies
        answers[number] = logits

    threads = [threading.Thread(target=continue_alone, args=pair) for pair in enumerate(cache.fork(6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        new = [tokens_of(1, 2, seed=100 * number + step) for step in range(9)]
        torch.testing.assert_close(answers[number], whole(model, prefix, *new), atol=1e-4, rtol=1e-4)
    del threads
    assert cache.num_blocks - cache.num_blocks_free == 8  # those of the prefix


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_hold_their_own_blocks_only(copied):
    model, prefix = tiny_model("llama"), tokens_of(2, 21)
    cache = PagedCache(model.config, block_size=8)
    forward(model, prefix, cache)
    cache.batch_repeat_interleave(2)
    (fork,) = cache.fork()
    forward(model, tokens_of(4, 100), cache)
    twin = copied(fork)
    assert twin.num_blocks == twin.num_blocks_held == fork.num_blocks_held == 6 and twin.num_blocks_free == 0
    for left, right in zip(twin.layers, fork.layers, strict=True):
        assert torch.equal(left.keys, right.keys) and torch.equal(left.values, right.values)
    new = tokens_of(4, 6, seed=1)
    expected = whole(model, prefix.repeat_interleave(2, dim=0), new)
    for each in (twin, fork):
        torch.testing.assert_close(forward(model, new, each), expected, atol=1e-5, rtol=1e-5)


def test_deepcopy_follows_the_memo_and_keeps_other_attributes():
    cache = PagedCache()
    cache.note = ["mine"]
    pair = copy.deepcopy([cache, cache])
    assert pair[0] is pair[1] and pair[0] is not cache
    assert pair[0].note == ["mine"] and pair[0].note is not cache.note


class CachesAgainstLists(RuleBasedStateMachine):
    """Any sequence of operations on a family of caches: each holds what a plain list of tokens would."""

    caches = Bundle("caches")

    def __init__(self):
        super().__init__()
        self.known: dict[int, tuple[PagedCache, list[list[int]]]] = {}
        self.next = 0

    def _know(self, cache: PagedCache, rows: list[list[int]]) -> int:
        self.next += 1
        self.known[self.next] = (cache, rows)
        return self.next

    @rule(target=caches, rows=st.integers(1, 3), length=st.integers(1, 9))
    def make(self, rows, length):
        name = self._know(PagedCache(block_size=4), [[] for _ in range(rows)])
        self.append(name, length, 0)
        return name

    @rule(name=caches, length=st.integers(1, 9), seed=st.integers(0, 9))
    def append(self, name, length, seed):
        if name not in self.known:
            return
        cache, rows = self.known[name]
        new = torch.randint(0, 1000, (len(rows), length), generator=torch.Generator().manual_seed(seed))
        for row, tokens in zip(rows, new.tolist(), strict=True):
            row += tokens
        states = new[:, None, :, None].float()
        with torch.no_grad():
            for layer in range(2):
                cache.update(states + layer, -states.expand(-1, -1, -1, 2), layer)

    @rule(target=caches, name=caches, n=st.integers(1, 2))
    def fork(self, name, n):
        if name not in self.known:
            return multiple()
        cache, rows = self.known[name]
        return multiple(*(self._know(fork, [list(row) for row in rows]) for fork in cache.fork(n)))

    @rule(name=caches, count=st.integers(0, 12))
    def crop(self, name, count):
        if name in self.known:
            cache, rows = self.known[name]
            cache.crop(-count)
            for row in rows:
                del row[max(len(row) - count, 0) :]

    @rule(name=caches, picks=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def select(self, name, picks):
        if name in self.known:
            cache, rows = self.known[name]
            picks = [pick % len(rows) for pick in picks]
            cache.batch_select_indices(torch.tensor(picks))
            rows[:] = [list(rows[pick]) for pick in picks]

    @rule(name=caches)
    def delete(self, name):
        self.known.pop(name, None)

    @invariant()
    def caches_hold_their_tokens(self):
        for cache, rows in self.known.values():
            assert cache.get_seq_length() == len(rows[0])
            if rows[0]:
                expected = torch.tensor(rows)[:, None, :, None].float()
                for layer in range(2):
                    assert torch.equal(cache.layers[layer].keys, expected + layer)
                    assert torch.equal(cache.layers[layer].values, -expected.expand(-1, -1, -1, 2))

    @invariant()
    def blocks_are_held_or_free(self):
        stores = {id(cache.layers[0].tables.store): [] for cache, _ in self.known.values()}
        for cache, _ in self.known.values():
            stores[id(cache.layers[0].tables.store)].append(cache)
        for caches in stores.values():
            assert held(*caches) == caches[0].num_blocks - caches[0].num_blocks_free


TestCachesAgainstLists = CachesAgainstLists.TestCase
TestCachesAgainstLists.settings = settings(max_examples=25, stateful_step_count=20, deadline=None, database=None)
