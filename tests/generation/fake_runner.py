"""A runner without a model: it keeps "K/V" in blocks and does exactly what a SchedulerOutput says, nothing else.

The K/V of a token is the whole prefix that it was computed from, so a read of a wrong, stale or foreign slot shows.
"""

from __future__ import annotations

from hf_paged.cache.block_manager import BlockManager
from hf_paged.generation.policies import SCHEDULING_POLICIES
from hf_paged.generation.request import FinishReason, Request, RequestGroup
from hf_paged.generation.sampling.params import SamplingParams
from hf_paged.generation.scheduler import Scheduler
from hf_paged.generation.scheduler_config import SchedulerConfig
from hf_paged.generation.step import SchedulerOutput


def next_token(prefix: tuple, extra_keys: tuple, branch: int) -> int:
    """The "model": a token from 1 to 5 that depends on every token before it and on the extra keys."""
    value = sum((place + 1) * token for place, token in enumerate(prefix)) + len(repr(extra_keys)) * 7 + branch
    return 1 + (value * 2654435761 >> 7) % 5


def expected_output(request: Request, stop_tokens: frozenset[int], max_model_len: int) -> list[int]:
    """What a request generates when it runs alone with endless memory."""
    tokens = request.prompt_token_ids
    while True:
        tokens.append(next_token(tuple(tokens), request.extra_keys, request.branch))
        num_output = len(tokens) - request.num_prompt_tokens
        stopped = tokens[-1] in stop_tokens and num_output >= request.params.min_tokens
        if stopped or num_output >= request.max_tokens or len(tokens) >= max_model_len:
            return tokens[request.num_prompt_tokens :]


class FakeRunner:
    """Physical memory of every layer group, and what this rank was told of each request."""

    def __init__(self, num_blocks_per_group: list[int], block_size: int):
        self.block_size = block_size
        self.memory = [[[None] * block_size for _ in range(n)] for n in num_blocks_per_group]
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.failed_once = False

    def apply(self, output: SchedulerOutput) -> None:
        """Takes in what the step tells about its requests."""
        for request_id in output.removed_ids:
            self.tokens.pop(request_id, None)
            self.tables.pop(request_id, None)
        for share in output.scheduled:
            if share.is_new:
                self.tokens[share.request_id] = []
                self.tables[share.request_id] = [[] for _ in self.memory]
            self.tokens[share.request_id] += share.new_token_ids
            for table, block_ids in zip(self.tables[share.request_id], share.new_block_ids, strict=True):
                table += block_ids

    def run(self, output: SchedulerOutput, requests: dict[str, Request]) -> dict[str, int]:
        """Clears, copies, stores the K/V of all shares, then reads every context, then samples."""
        self.apply(output)
        for memory, cleared in zip(self.memory, output.cleared_blocks, strict=True):
            for block_id in cleared:
                memory[block_id] = [None] * self.block_size
        for memory, copies in zip(self.memory, output.block_copies, strict=True):
            for source, destination in copies:
                memory[destination] = list(memory[source])
        for share in output.scheduled:
            self._store(share, requests[share.request_id].extra_keys)
        return {
            request_id: next_token(prefix, extra_keys, requests[request_id].branch)
            for share in output.scheduled
            for prefix, extra_keys in [self._read(share, requests[share.request_id].extra_keys)]
            for request_id in share.sample_ids
        }

    def _store(self, share, extra_keys: tuple) -> None:
        tokens = self.tokens[share.request_id]
        start = share.num_computed_tokens
        for position in range(start, start + share.num_scheduled_tokens):
            for memory, table in zip(self.memory, self.tables[share.request_id], strict=True):
                block = memory[table[position // self.block_size]]
                block[position % self.block_size] = (tuple(tokens[: position + 1]), extra_keys)

    def _read(self, share, extra_keys: tuple) -> tuple[tuple, tuple]:
        tokens = self.tokens[share.request_id]
        end = share.num_computed_tokens + share.num_scheduled_tokens
        for memory, table in zip(self.memory, self.tables[share.request_id], strict=True):
            for position in range(end):
                slot = memory[table[position // self.block_size]][position % self.block_size]
                assert slot == (tuple(tokens[: position + 1]), extra_keys), (
                    f"{share.request_id} reads {slot} at position {position} of {tokens}, {extra_keys}"
                )
            if end % self.block_size and not self.failed_once:
                rest = memory[table[end // self.block_size]][end % self.block_size :]
                assert rest == [None] * len(rest), f"{share.request_id} sees {rest} past its end"
        return tuple(tokens[:end]), extra_keys

    def half_run(self, output: SchedulerOutput) -> None:
        """Fails in the middle: everything was taken in, cleared and copied, and the slots now hold rubbish."""
        self.failed_once = True
        self.apply(output)
        for memory, cleared in zip(self.memory, output.cleared_blocks, strict=True):
            for block_id in cleared:
                memory[block_id] = [None] * self.block_size
        for memory, copies in zip(self.memory, output.block_copies, strict=True):
            for source, destination in copies:
                memory[destination] = list(memory[source])
        for share in output.scheduled:
            for position in range(share.num_computed_tokens, share.num_computed_tokens + share.num_scheduled_tokens):
                for memory, table in zip(self.memory, self.tables[share.request_id], strict=True):
                    memory[table[position // self.block_size]][position % self.block_size] = "rubbish"


class FakeSession:
    """What the scheduler sees of a session: rows whose next tokens it chooses when all have been computed."""

    def __init__(self, bench: Bench, rounds: int):
        self.bench = bench
        self.rounds = rounds
        self.rows: list[Request] = []
        self.is_patient = True
        self.is_blocked = False  # its caller sleeps
        self._next: dict[str, int] = {}

    @property
    def awaits_logits(self) -> bool:
        return len(self._next) < len(self.rows)

    @property
    def is_choosing(self) -> bool:
        return not self.awaits_logits and self.is_patient

    @property
    def is_over(self) -> bool:
        return any(row.is_finished for row in self.rows)

    def take(self, row: Request, token: int) -> None:
        assert token == next_token(tuple(row.token_ids), row.extra_keys, row.branch)
        self._next[row.request_id] = token

    def proceed(self, parents: list[int] | None = None) -> None:
        """Continues each row from one of its prompt's rows, by the next token of its own, or ends them all."""
        assert not self.awaits_logits
        scheduler, self.rounds = self.bench.scheduler, self.rounds - 1
        if self.rounds < 0:
            return self.end()
        tokens = [self._next[row.request_id] for row in self.rows]
        self._next.clear()
        if parents is not None:
            scheduler.reorder(self.rows, [self.rows[parent] for parent in parents])
        for row, token in zip(self.rows, tokens, strict=True):
            scheduler.extend(row, [token])
        return None

    def end(self) -> None:
        for row in self.rows:
            self.bench.scheduler.finish(row, FinishReason.STOP)


class Bench:
    """A scheduler, its blocks and a fake runner, for tests that drive them step by step."""

    def __init__(
        self, num_blocks=64, block_size=4, *, policy="fcfs", groups=1, hash_function=None, caching=True, **limits
    ):
        sizes = [num_blocks] * groups
        extra = {"hash_function": hash_function} if hash_function else {}
        self.blocks = BlockManager(sizes, block_size, caching, **extra)
        self.runner = FakeRunner(sizes, block_size)
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": num_blocks * block_size}
        config = SchedulerConfig(**{**defaults, **limits})
        self.scheduler = Scheduler(config, self.blocks, SCHEDULING_POLICIES.get(policy)())
        self.all_requests: list[Request] = []
        self._count = 0

    def add(  # noqa: PLR0913 - as many as a request has
        self,
        prompt,
        n=1,
        max_tokens=4,
        group_id=None,
        ready=True,
        stop=(),
        params=None,
        session=None,
        **kwargs,
    ) -> RequestGroup:
        """Adds a group of n branches and returns it."""
        self._count += 1
        group_id = group_id or f"g{self._count}"
        params = params or SamplingParams(max_tokens=max_tokens)
        requests = [
            Request(
                group_id if n == 1 else f"{group_id}-{branch}",
                list(prompt),
                params,
                max_tokens=max_tokens,
                branch=branch,
                stop_token_ids=frozenset(stop),
                **kwargs,
            )
            for branch in range(n)
        ]
        for request in requests:
            request.ready = ready
            request.session = session
        group = RequestGroup(group_id, requests)
        self.scheduler.add(group)
        self.all_requests += requests
        return group

    def run_step(self) -> SchedulerOutput:
        """Schedules a step, checks it, runs it and reports it."""
        output = self.scheduler.schedule()
        self.check_step(output)
        if output.scheduled:
            sampled = self.runner.run(output, self.scheduler.requests)
            self.update(output, sampled)
        self.check_blocks()
        return output

    def update(self, output: SchedulerOutput, sampled: dict[str, int]) -> list[Request]:
        """Reports a step that has run, and tells the sessions what their rows' next tokens would be."""
        rows = [self.scheduler.requests[request_id] for request_id in sampled if request_id in self.scheduler.requests]
        updated = self.scheduler.update_from_output(output, sampled)
        for row in rows:
            if row.session is not None and not row.is_finished:
                row.session.take(row, sampled[row.request_id])
        return updated

    def add_session(self, prompts, num_each=1, rounds=3) -> FakeSession:
        """Adds rows whose tokens a session chooses."""
        session = FakeSession(self, rounds)
        for prompt in prompts:
            session.rows += self.add(prompt, n=num_each, max_tokens=rounds + 1, session=session).requests
        return session

    def run_to_end(self, max_steps: int = 2000) -> int:
        """Runs until nobody is left, and returns the number of steps."""
        for step in range(max_steps):
            if not self.scheduler.has_unfinished:
                return step
            self.run_step()
        raise AssertionError(f"still unfinished after {max_steps} steps: {list(self.scheduler.requests.values())}")

    def check_step(self, output: SchedulerOutput) -> None:
        """Budget and seats are kept, and what is written belongs to the writer alone."""
        config = self.scheduler.config
        assert output.num_scheduled_tokens <= config.max_num_batched_tokens
        assert self.scheduler.num_running <= config.max_num_seqs
        assert all(share.num_scheduled_tokens > 0 for share in output.scheduled)
        written: set[tuple[int, int, int]] = set()
        for share in output.scheduled:
            request = self.scheduler.requests[share.request_id]
            assert share.num_computed_tokens == request.num_computed_tokens
            assert share.num_computed_tokens + share.num_scheduled_tokens <= request.num_tokens
            if share.prompt_logits:
                assert share.num_scheduled_tokens <= config.prompt_logits_chunk
            start, end = share.num_computed_tokens, share.num_computed_tokens + share.num_scheduled_tokens
            branches = len(share.sample_ids[1:])  # they share the blocks, to read them, from this step on
            for group, block_ids in enumerate(self.blocks.block_table(request)):
                for position in range(start, end):
                    block_id = block_ids[position // self.blocks.block_size]
                    slot = (group, block_id, position % self.blocks.block_size)
                    assert slot not in written, f"two tokens of a step share slot {slot}"
                    written.add(slot)
                    owners = self.blocks.num_owners(group, block_id)
                    filled = (position // self.blocks.block_size + 1) * self.blocks.block_size <= end
                    assert owners == 1 + branches or filled, f"{share.request_id} writes into a shared block"
        copied = [{destination for _, destination in pairs} for pairs in output.block_copies]
        sources = [{source for source, _ in pairs} for pairs in output.block_copies]
        for group, cleared in enumerate(output.cleared_blocks):
            assert len(set(cleared)) == len(cleared)
            assert not set(cleared) & (sources[group] | copied[group]), "a block is cleared and copied"
            assert not sources[group] & copied[group], "a copy's source is another one's destination"

    def check_blocks(self) -> None:
        """Free + used = total, reference counts are exact, and every hash belongs to exactly one block."""
        for group, (pool, index) in enumerate(zip(self.blocks.pools, self.blocks.indexes, strict=True)):
            assert pool.num_free + pool.num_used == pool.num_blocks
            owners = [0] * pool.num_blocks
            for table in self.blocks._tables.values():
                for block_id in table.block_ids[group]:
                    owners[block_id] += 1
            assert owners == pool.ref_counts, "reference counts differ from the tables"
            assert sorted(pool._free) == [block_id for block_id, count in enumerate(owners) if count == 0]
            assert len(index._block_ids) == len(index)
            for block_id, block_hash in index.items():
                assert index.block_id(block_hash.digest) == block_id
                assert len(block_hash.token_ids) == self.blocks.block_size
        assert 0 <= self.blocks.num_hit_tokens <= self.blocks.num_queried_tokens
        assert 0 <= self.blocks.num_tokens_stored <= self.blocks.num_blocks_held * self.blocks.block_size
        for request in self.all_requests:
            assert 0 <= request.metrics.num_cached_tokens <= request.num_prompt_tokens

    def check_idle(self) -> None:
        """Nobody is left, and nobody left anything behind."""
        assert not self.scheduler.has_unfinished
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert all(pool.num_used == 0 for pool in self.blocks.pools)
        assert not self.blocks._tables and not self.scheduler._groups and not self.scheduler._waiting._unforked
        assert not self.scheduler._waiting._parked
        assert not any(sources.total() for sources in self.blocks._copy_sources)
        for request in self.all_requests:
            assert request.is_finished and request.finish_reason is not None

    def check_outputs(self, requests=None) -> None:
        """Every request that ended by itself generated what it would have generated alone."""
        for request in requests or self.all_requests:
            if request.session is None and request.finish_reason.value in ("stop", "length"):
                limit = self.scheduler.config.max_model_len
                assert request.output_token_ids == expected_output(request, request.stop_token_ids, limit)
