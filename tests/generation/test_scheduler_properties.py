"""Random traffic against a runner that believes only what the steps say: same answers, no leaks, everybody ends."""

from __future__ import annotations

import hashlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
            self.bench.scheduler.update_from_output(output, self.bench.runner.run(output, before))
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
            for request in self.bench.scheduler.update_from_output(output, sampled):
                self.check_prompt_logits(request)
        self.bench.check_blocks()

    def note_prompt_logits(self, output):
        for share in output.scheduled:
            if share.prompt_logits:
                positions = range(share.num_computed_tokens, share.num_computed_tokens + share.num_scheduled_tokens)
                self.seen_logits.setdefault(share.request_id, set()).update(positions)

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
        for _ in range(3000):
            if not self.bench.scheduler.has_unfinished:
                break
            output = self.bench.scheduler.schedule()
            assert output.scheduled, "requests wait, nothing is in flight, and nobody is scheduled"
            self.run(output)
        self.bench.check_idle()
        self.bench.check_outputs()


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
TestTwoGroups = TwoGroupsMachine.TestCase
TestTwoGroups.settings = settings(SETTINGS, max_examples=20)
