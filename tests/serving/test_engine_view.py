"""What a watcher puts together is what the engine's books say, whatever happens and however much is left out."""

from __future__ import annotations

import json
import random

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from hf_paged.generation.request import RequestStatus
from hf_paged.serving.engine_view import MAX_WAITING, Picture, difference, held_and_waiting
from tests.generation.fake_runner import Bench
from tests.generation.test_scheduler_properties import SchedulerMachine
from tests.serving.watched import Watched


def look(bench: Bench) -> Picture:
    about = {"num_blocks": [pool.num_blocks for pool in bench.blocks.pools]}
    return Picture(about, {"now": 0}, latencies={}, **held_and_waiting(bench.scheduler, bench.blocks))


def told(watched: Watched, old: Picture | None, new: Picture) -> int:
    """Tells a watcher what is new; returns the bytes that it took."""
    event = orjson.dumps(difference(old, new))
    watched.take(json.loads(event))
    return len(event)


def check(watched: Watched, bench: Bench) -> None:
    for group, (pool, index) in enumerate(zip(bench.blocks.pools, bench.blocks.indexes, strict=True)):
        assert watched.owners(group) == pool.ref_counts
        assert watched.marks[group] == {block for block, _ in index.items()}
    requests = bench.scheduler.requests
    assert watched.requests.keys() == requests.keys()
    for name, (status, prompt, computed, generated, limit, _, preemptions, _) in watched.requests.items():
        request = requests[name]
        assert status == request.status.value
        assert (name in watched.tables) == (request.status is RequestStatus.RUNNING)
        assert (prompt, computed, generated) == (
            request.num_prompt_tokens,
            request.num_computed_tokens,
            request.num_output_tokens,
        )
        assert (limit, preemptions) == (request.max_tokens, request.metrics.num_preemptions)
        if name in watched.tables:
            assert watched.tables[name] == bench.blocks.block_table(request)


class WatchedMachine(SchedulerMachine):
    """Random traffic with two watchers: one is told everything, the other now and then, or from the beginning."""

    groups = 2

    def start_watching(self):
        self.watchers = [(Watched(), None), (Watched(), None)]

    @invariant()
    @precondition(lambda self: hasattr(self, "bench"))
    def the_quick_watcher_knows_all(self):
        if not hasattr(self, "watchers"):
            self.start_watching()
        self.tell(0)

    @rule(anew=st.booleans())
    @precondition(lambda self: hasattr(self, "watchers"))
    def tell_the_slow_watcher(self, anew):
        if anew:
            self.watchers[1] = (Watched(), None)
        self.tell(1)

    def tell(self, which):
        watched, seen = self.watchers[which]
        picture = look(self.bench)
        told(watched, seen, picture)
        self.watchers[which] = (watched, picture)
        check(watched, self.bench)


TestWatchedTraffic = WatchedMachine.TestCase
TestWatchedTraffic.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_what_did_not_change_is_not_told_again():
    bench = Bench(num_blocks=2000, block_size=4, max_num_seqs=40, max_num_batched_tokens=4000, max_model_len=400)
    source = random.Random(0)
    for _ in range(40):
        bench.add([source.randrange(1, 9) for _ in range(150)], max_tokens=100)
    watched, seen, sizes = Watched(), None, []
    for _ in range(12):
        bench.run_step()
        picture = look(bench)
        sizes.append(told(watched, seen, picture))
        seen = picture
        check(watched, bench)
    assert bench.scheduler.num_running == 40
    assert max(sizes[4:]) < sizes[0] / 2, "a table is told once, and then where it grows"
    assert difference(seen, look(bench)) == {"figures": {"now": 0}}


def test_of_many_waiting_requests_the_first_are_named():
    bench = Bench(num_blocks=8, block_size=4, max_num_seqs=1)
    for number in range(MAX_WAITING + 50):
        bench.add([1, 2, 3], max_tokens=3, group_id=f"r{number}")
    bench.run_step()
    picture = look(bench)
    assert list(picture.requests) == [f"r{number}" for number in range(MAX_WAITING + 1)]
    assert list(picture.tables) == ["r0"]


def test_another_pool_is_told_from_the_beginning():
    small, large = Bench(num_blocks=8, block_size=4), Bench(num_blocks=16, block_size=4)
    watched, old = Watched(), None
    for bench in (small, large):
        bench.add([1, 2, 3, 4, 5], max_tokens=3)
        bench.run_step()
        new = look(bench)
        told(watched, old, new)
        old = new
        check(watched, bench)
    assert len(watched.owners(0)) == 16


def test_a_block_that_was_shared_and_copied_is_told():
    bench = Bench(num_blocks=16, block_size=4)
    bench.add([1, 2, 3, 4, 5], n=2, max_tokens=6)
    watched, old, tables = Watched(), None, []
    while bench.scheduler.has_unfinished:
        bench.run_step()
        new = look(bench)
        told(watched, old, new)
        old = new
        check(watched, bench)
        tables.append(watched.tables.copy())
    assert tables[0]["g1-0"] == tables[0]["g1-1"] and tables[1]["g1-0"] != tables[1]["g1-1"]
