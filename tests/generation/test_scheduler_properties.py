"""Random traffic against a runner that believes only what the steps say: same answers, no leaks, everybody ends."""

from __future__ import annotations

import hashlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged.generation.loop_call import _Rows
from hf_paged.generation.request import FinishReason
from hf_paged.generation.sampling.params import SamplingParams

from .fake_runner import Bench


def one_of_four(data: bytes) -> bytes:
    """A hash that collides all the time."""
    return bytes([hashlib.blake2b(data).digest()[0] % 4])


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, steps and failed steps in any order, in pools so small that requests lose their blocks."""

    hash_function = None
    groups = 1

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        policy=st.sampled_from(["fcfs", "priority"]),
        chunked=st.booleans(),
        max_partial=st.integers(1, 3),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, policy, chunked, max_partial, caching):
        self.bench = Bench(
            num_blocks,
            block_size,
            policy=policy,
            groups=self.groups,
            hash_function=self.hash_function,
            caching=caching,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=chunked,
            max_partial_prefills=max_partial,
            prompt_logits_chunk=3,
        )
        self.seen_logits = {}
        self.sessions = []

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=24),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 9),
        priority=st.integers(0, 2),
        salt=st.sampled_from([(), (), ("a",)]),
        ready=st.sampled_from([True, True, True, False]),
        min_tokens=st.integers(0, 3),
        stop=st.sampled_from([(), (1,), (1, 2)]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
    )
    def add(self, prompt, n, max_tokens, priority, salt, ready, min_tokens, stop, prompt_logprobs):
        scheduler, config = self.bench.scheduler, self.bench.scheduler.config
        limit = config.max_model_len
        if not config.enable_chunked_prefill and prompt_logprobs is None:
            limit = min(limit, config.max_num_batched_tokens)
        prompt = prompt[:limit]
        params = SamplingParams(
            max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), prompt_logprobs=prompt_logprobs
        )
        self.bench.add(
            prompt,
            n=min(n, config.max_num_seqs),
            max_tokens=max_tokens,
            params=params,
            priority=priority,
            extra_keys=salt,
            ready=ready,
            stop=stop,
        )
        assert scheduler.has_unfinished

    @rule(data=st.data(), more=st.lists(st.integers(1, 2), max_size=3))
    @precondition(lambda self: self.bench.scheduler.has_unfinished)
    def add_a_twin(self, data, more):
        """Somebody asks what another is just asking, perhaps a little more: they meet in the middle of a block."""
        twin = data.draw(st.sampled_from(list(self.bench.scheduler.requests.values())))
        config = self.bench.scheduler.config
        limit = config.max_model_len if config.enable_chunked_prefill else config.max_num_batched_tokens
        prompt = (twin.prompt_token_ids + more)[: min(limit, config.max_model_len)]
        self.bench.add(prompt, max_tokens=2, params=SamplingParams(max_tokens=2), extra_keys=twin.extra_keys)

    @rule(data=st.data())
    @precondition(lambda self: self.bench.scheduler.has_unfinished)
    def abort(self, data):
        requests = list(self.bench.scheduler.requests.values())
        request = data.draw(st.sampled_from(requests))
        any_id = data.draw(st.sampled_from([request.request_id, request.group.group_id, "nobody"]))
        for ended in self.bench.scheduler.abort(any_id):
            assert ended.finish_reason is FinishReason.ABORT
        assert self.bench.scheduler.abort(any_id) == []
        self.bench.check_blocks()

    @rule()
    def make_ready(self):
        """What requests were waiting for is there."""
        for request in list(self.bench.scheduler.requests.values()):
            if not request.ready:
                self.bench.scheduler.set_ready(request)

    @rule(count=st.integers(1, 4))
    def steps(self, count):
        for _ in range(count):
            self.run(self.bench.scheduler.schedule())

    @rule(data=st.data(), applied=st.booleans(), fails=st.booleans())
    def disturbed_step(self, data, applied, fails):
        """Requests end while the step is in flight; the step itself may fail, having run half or not at all."""
        output = self.bench.scheduler.schedule()
        before = {r.request_id: r for r in self.bench.scheduler.requests.values()}
        for request in data.draw(st.lists(st.sampled_from(list(before.values())), max_size=2)) if before else ():
            self.bench.scheduler.finish(request, FinishReason.ABORT)
        if fails:
            if applied and output.scheduled:
                self.bench.runner.half_run(output)
            self.bench.scheduler.cancel(output)
        elif output.scheduled:
            self.note_prompt_logits(output)
            self.bench.update(output, self.bench.runner.run(output, before))
        self.bench.check_blocks()

    @rule()
    @precondition(lambda self: not self.bench.scheduler.has_unfinished)
    def weights_change(self):
        self.bench.blocks.reset_prefix_cache()
        assert all(len(index) == 0 for index in self.bench.blocks.indexes)

    def run(self, output):
        self.bench.check_step(output)
        self.note_prompt_logits(output)
        if output.scheduled:
            sampled = self.bench.runner.run(output, self.bench.scheduler.requests)
            for request in self.bench.update(output, sampled):
                self.check_prompt_logits(request)
        self.bench.check_blocks()

    def note_prompt_logits(self, output):
        for share in output.scheduled:
            if share.prompt_logits:
                positions = range(share.num_computed_tokens, share.num_computed_tokens + share.num_scheduled_tokens)
                self.seen_logits.setdefault(share.request_id, set()).update(positions)

    def choosing(self):
        return [s for s in self.sessions if not (s.awaits_logits or s.is_blocked or s.is_over)]

    def end_sessions_that_lost_a_row(self):
        """As their callers do, when they hear of it."""
        for session in self.sessions:
            if session.is_over:
                session.end()

    def run_to_end(self, kept=frozenset()):
        """Runs until nobody is left but those who are kept, who do not go on."""
        for _ in range(3000):
            self.end_sessions_that_lost_a_row()
            if set(self.bench.scheduler.requests) <= kept:
                return
            output = self.bench.scheduler.schedule()
            choosing = self.choosing()
            assert output.scheduled or choosing, "requests wait, nothing is in flight, and nobody is scheduled"
            self.run(output)
            for session in choosing:
                session.proceed()
        raise AssertionError("it goes on and on")

    def check_prompt_logits(self, request):
        """Who samples has had the logits of the whole prompt, from this branch or the one it was forked from."""
        if request.wants_prompt_logits and not self.bench.runner.failed_once:
            seen = [self.seen_logits.get(branch.request_id, set()) for branch in request.group.requests]
            assert set(range(request.num_prompt_tokens)) in [s & set(range(request.num_prompt_tokens)) for s in seen]

    @invariant()
    def queue_and_pool_agree(self):
        if hasattr(self, "bench"):
            assert self.bench.blocks.num_blocks_held <= self.bench.blocks.num_blocks
            assert 0.0 <= self.bench.blocks.waste <= 1.0

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        self.make_ready()
        blocked = [session for session in self.sessions if session.is_blocked and not session.is_over]
        self.run_to_end(kept={row.request_id for session in blocked for row in session.rows})
        for session in blocked:
            session.is_blocked = False
        self.run_to_end()
        self.bench.check_idle()
        assert all(session.is_over for session in self.sessions)
        self.bench.check_outputs()


class SessionMachine(SchedulerMachine):
    """There are sessions too: rows that are computed together, and then stand still until somebody chooses tokens."""

    @rule(
        beginning=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        ends=st.lists(st.lists(st.integers(1, 2), max_size=5), min_size=1, max_size=3),
        num_each=st.integers(1, 4),
        rounds=st.integers(0, 9),
    )
    def add_a_session(self, beginning, ends, num_each, rounds):
        """As many rows as `generate` lets into an engine of this size."""
        config, blocks = self.bench.scheduler.config, self.bench.blocks
        prompts = [beginning + end for end in ends]
        if not config.enable_chunked_prefill:
            prompts = [prompt[: config.max_num_batched_tokens] for prompt in prompts]
        lengths = [len(prompt) for prompt in prompts for _ in range(num_each)]
        rows = _Rows({}, len(prompts), num_each, rounds + 2)
        if rows.num_rows > config.max_num_seqs or max(lengths) + rounds + 1 > config.max_model_len:
            return
        if rows._num_blocks(lengths, blocks.block_size, blocks.enable_prefix_caching) > blocks.num_blocks:
            return
        self.sessions.append(self.bench.add_session(prompts, num_each, rounds))
        self.sessions[-1].num_each = num_each

    @rule(data=st.data())
    def choose(self, data):
        """Somebody chooses tokens; rows may continue others of the same prompt."""
        for session in self.choosing():
            n = session.num_each
            first = [row // n * n for row in range(len(session.rows))]
            parents = data.draw(st.none() | st.tuples(*[st.integers(row, row + n - 1) for row in first]))
            session.proceed(parents)
        self.bench.check_blocks()

    @rule(data=st.data(), what=st.sampled_from(["impatience", "blocked", "end"]))
    @precondition(lambda self: self.sessions)
    def disturb(self, data, what):
        session = data.draw(st.sampled_from(self.sessions))
        if what == "end":
            session.end()
        session.is_blocked |= what == "blocked"
        session.is_patient &= what == "end"


class CollidingHashMachine(SchedulerMachine):
    hash_function = staticmethod(one_of_four)


class TwoGroupsMachine(SchedulerMachine):
    groups = 2


SETTINGS = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS
TestCollidingHash = CollidingHashMachine.TestCase
TestCollidingHash.settings = settings(SETTINGS, max_examples=40)
TestSessions = SessionMachine.TestCase
TestSessions.settings = settings(SETTINGS, max_examples=100)
TestTwoGroups = TwoGroupsMachine.TestCase
TestTwoGroups.settings = settings(SETTINGS, max_examples=20)
