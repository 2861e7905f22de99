"""A device without a device: steps take as long as one says, on a clock that counts only what the host has to do.

    host     | launch 0 | launch 1 | collect 0: the clock jumps to the end of step 0 |
    device              |<- step 0, `latency` ->|<- step 1 ->|

What a step computes is done when it is launched, in order, as the stream of a device would; nobody sees it before the
step's end. The "model" is the engine's own inputs: it stores each token and its position where `slot_mapping` says, and
reads each context through `block_tables`, so that a wrong, stale or foreign slot, and a token that was gathered from
the wrong place, change the answer. Logits are a function of the context alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hf_paged.errors import EngineError
from hf_paged.generation.admission import Limits, make_group
from hf_paged.generation.answer import RequestState
from hf_paged.generation.async_steps import AsyncStepLoop
from hf_paged.generation.input_batch import InputBatch
from hf_paged.generation.live_requests import LiveRequests, ids_of
from hf_paged.generation.outputs import StepResult
from hf_paged.generation.plan import EnginePlan
from hf_paged.generation.policies import SCHEDULING_POLICIES
from hf_paged.generation.request import NO_EXTRAS, RequestExtras
from hf_paged.generation.sampling.params import SamplingParams
from hf_paged.generation.sampling.pending import PendingTokens
from hf_paged.generation.sampling.sampler import Sampler
from hf_paged.generation.staging import Staging
from hf_paged.generation.step import SchedulerOutput
from hf_paged.generation.step_loop import StepLoop
from hf_paged.generation.structured.grammars import Grammars

VOCAB = 16
EOS = 1
_PLACES = np.arange(4096)
_WEIGHTS = np.random.default_rng(0).integers(1, 1 << 62, (4096,)) | 1
_COLUMNS = np.random.default_rng(1).integers(1, 1 << 62, (VOCAB,)) | 1


class VirtualClock:
    """The seconds that this thread has worked, and those that it would have waited. Other processes do not matter."""

    def __init__(self) -> None:
        self._skipped = 0.0
        self._start = time.thread_time()

    def now(self) -> float:
        return time.thread_time() - self._start + self._skipped

    def wait_until(self, moment: float) -> None:
        self._skipped += max(0.0, moment - self.now())

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Work in here is the device's, and costs the host nothing."""
        before = self.now()
        yield
        self._skipped -= self.now() - before


@dataclasses.dataclass
class FakeHandle:
    """A launched step."""

    number: int
    output: SchedulerOutput
    logits: torch.Tensor
    ready_at: float
    pending: PendingTokens | None
    seconds_inputs: float = 0.0


class FakeDevice:
    """Stands in for a `ModelRunner`.

    `launch_faults` and `read_faults` say by number which launches and which results raise what; `capacity` is how many
    tokens a step may have before there is no memory for it.
    """

    def __init__(self, plan: EnginePlan, latency: float = 0.0):
        self.batch = InputBatch(plan.max_num_seqs, plan.max_model_len, plan.block_size, num_groups=1)
        self.staging = Staging(torch.device("cpu"))
        num_slots = plan.num_blocks * plan.block_size
        self.tokens, self.positions = np.full(num_slots, -1), np.full(num_slots, -1)
        self.cache = SimpleNamespace(abandon=lambda: None)
        self.clock, self.latency = VirtualClock(), latency
        self.launch_faults: dict[int, BaseException] = {}
        self.read_faults: dict[int, BaseException] = {}
        self.capacity = 1 << 30
        self.num_launched = self.num_ahead = 0
        self.busy = self.free_at = 0.0
        self._is_lost = False  # a step has failed, and what follows computes rubbish until somebody notices

    def launch(
        self, output: SchedulerOutput, embeds: Any = None, choose: Callable | None = None, sampling: Any = None
    ) -> FakeHandle:
        number, self.num_launched = self.num_launched, self.num_launched + 1
        self.batch.apply(output)
        with self.clock.stopped():
            self._prepare(output)
        fault = self.launch_faults.pop(number, None)
        if output.num_scheduled_tokens > self.capacity:
            fault = torch.OutOfMemoryError("the fake device is full")
        if fault is not None:
            raise fault
        self._is_lost |= isinstance(self.read_faults.get(number), Exception)
        inputs = self.staging.send(self.batch.build(output, sampling))
        self.batch.fill_in(inputs)
        pending = None
        with self.clock.stopped():
            logits = self._compute(inputs)
            if choose is not None:
                pending = choose(logits, inputs.sampling)
        if choose is not None:
            self.batch.keep(output, pending.token_ids)
            self.num_ahead += 1
        self.free_at = max(self.clock.now(), self.free_at) + self.latency
        self.busy += self.latency
        return FakeHandle(number, output, logits, self.free_at, pending)

    def collect(self, handle: FakeHandle) -> StepResult:
        fault = self.read_faults.pop(handle.number, None)
        if fault is not None:
            self._is_lost &= not isinstance(fault, Exception)
            raise fault
        self.clock.wait_until(handle.ready_at)
        chosen = handle.pending.wait() if handle.pending is not None else None
        return StepResult(handle.logits, handle.output.sample_rows, chosen=chosen)

    def read(self, request_id: str, num_tokens: int) -> list:
        return []

    def _prepare(self, output: SchedulerOutput) -> None:
        size = self.batch.block_size
        for block_id in output.cleared_blocks[0] if output.cleared_blocks else ():
            self.tokens[block_id * size : (block_id + 1) * size] = -1
        for source, destination in output.block_copies[0] if output.block_copies else ():
            for memory in (self.tokens, self.positions):
                memory[destination * size : (destination + 1) * size] = memory[source * size : (source + 1) * size]

    def _compute(self, inputs: Any) -> torch.Tensor:
        meta = inputs.metadata[0]
        slots, size = meta.slot_mapping.numpy(), meta.block_size
        assert len(set(slots.tolist())) == len(slots), "two tokens of a step share a slot"
        self.tokens[slots] = -2 if self._is_lost else inputs.input_ids[0].numpy()
        self.positions[slots] = inputs.position_ids[0].numpy()
        last = inputs.logits_indices.numpy()
        if not len(last):
            return torch.empty(0, VOCAB)
        row = np.searchsorted(meta.cu_seqlens_q.numpy(), last, side="right") - 1
        lengths = meta.seq_lens.numpy()[row]
        places = _PLACES[: lengths.max()]
        context = meta.block_tables.numpy()[row][:, places // size].astype(np.int64) * size + places % size
        inside = places < lengths[:, None]
        tokens, positions = self.tokens[context], self.positions[context]
        if not self._is_lost:
            assert (tokens[inside] >= 0).all(), "a slot is read that nobody has written"
            assert (positions == places)[inside].all(), "a slot holds the token of another position"
        return logits_of(np.where(inside, tokens + 1, 0), places)


def logits_of(tokens: np.ndarray, places: np.ndarray) -> torch.Tensor:
    """The "model": `[rows, VOCAB]` logits that depend on every token of the rows (+ 1; 0 past the end)."""
    digest = (tokens * _WEIGHTS[places]).sum(axis=1)
    mixed = (digest[:, None] ^ (digest[:, None] >> 29)) * _COLUMNS
    return torch.from_numpy(((mixed >> 33) % 4099).astype(np.float32) / 800)


class _NoWatch:
    def guard(self, blocks: Any) -> None: ...

    def confirm(self, blocks: Any) -> None: ...


def make_plan(**limits: Any) -> EnginePlan:
    """A plan for the fake device."""
    return EnginePlan(
        **{
            "model": "none",
            "device": "cpu",
            "dtype": "float32",
            "attn_backend": "none",
            "rejected_backends": {},
            "call_layout": "flat",
            "num_layers": 1,
            "block_size": 4,
            "num_blocks": 64,
            "bytes_per_block": 1,
            "max_model_len": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "scheduling_policy": "fcfs",
            "max_queue_size": None,
            "batch_invariant": False,
            "async_scheduling": False,
            "huge_pages": False,
            **limits,
        }
    )


class FakeEngine:
    """All of an engine but the model and the threads: requests, scheduler, blocks, sampler and step loop."""

    def __init__(self, *, ahead: bool, latency: float = 0.0, **limits: Any):
        self.plan = make_plan(async_scheduling=ahead, **limits)
        self.device = FakeDevice(self.plan, latency)
        self.sampler = Sampler(VOCAB)
        policy = SCHEDULING_POLICIES.get(self.plan.scheduling_policy)
        self.live = LiveRequests(self.plan, policy, 1, self.sampler, Grammars(self))
        self.loop = (AsyncStepLoop if ahead else StepLoop)(self.live, self.sampler, lambda: self.device, _NoWatch())
        self.step = self.loop.step

    @property
    def is_busy(self) -> bool:
        return bool(self.live.states or self.loop.inbox)

    def add(
        self,
        prompt: list[int],
        request_id: str,
        on_update: Callable[[RequestState], None] | None = None,
        extras: RequestExtras = NO_EXTRAS,
        **params: Any,
    ) -> RequestState:
        """Queues a request; keyword arguments are `SamplingParams` fields, greedy by default."""
        group = make_group(
            prompt,
            SamplingParams(**{"temperature": 0, **params}).resolved({}),
            Limits(self.plan, VOCAB, VOCAB, frozenset({EOS})),
            request_id=request_id,
            priority=0,
            extra_keys=(),
            extras=extras,
        )
        self.live.scheduler.config.check(group, self.live.block_manager)
        state = RequestState(group, None, None, on_update)
        self.live.states[request_id] = state
        self.live.ids |= ids_of(state)
        self.loop.inbox.append(lambda: self.live.add(state))
        return state

    def abort(self, request_id: str) -> None:
        self.loop.inbox.append(lambda: self.live.abort(request_id))

    def run(self, max_steps: int = 5000) -> None:
        """Runs until nobody is left."""
        for _ in range(max_steps):
            if not self.is_busy:
                return
            self.step()
        raise AssertionError(f"still unfinished: {list(self.live.scheduler.requests.values())}")

    def check_idle(self) -> None:
        """Nobody is left, nobody left anything behind, and cached blocks hold what their hashes say."""
        scheduler, blocks = self.live.scheduler, self.live.block_manager
        assert not self.live.states and not self.live.ids and not self.sampler._memory
        assert not scheduler.has_unfinished and not scheduler.num_running and not scheduler.num_waiting
        assert scheduler._in_flight is None and scheduler._assumed is None and not scheduler._runner._told
        assert not blocks._tables and blocks.pools[0].num_used == 0 and not any(blocks.pools[0].ref_counts)
        assert not any(sources.total() for sources in blocks._copy_sources)
        size = self.plan.block_size
        for block_id, block_hash in blocks.indexes[0].items():
            slots = slice(block_id * size, (block_id + 1) * size)
            depth, parent = 0, block_hash.parent
            while parent is not None:
                depth, parent = depth + 1, parent.parent
            assert tuple(self.device.tokens[slots]) == block_hash.token_ids
            assert self.device.positions[slots].tolist() == list(range(depth * size, (depth + 1) * size))

    def cached(self) -> set[tuple]:
        """The prefixes that can be found, each as all of its tokens."""
        found = set()
        for _, block_hash in self.live.block_manager.indexes[0].items():
            tokens: tuple = ()
            while block_hash is not None:
                tokens, block_hash = block_hash.token_ids + tokens, block_hash.parent
            found.add(tokens)
        return found


def answers(state: RequestState) -> list[tuple]:
    """What a caller sees of each answer in the end."""
    error = [type(request.error).__name__ for request in state.group.requests]
    return [
        (answer.token_ids, answer.finish_reason, answer.stop_reason, why)
        for answer, why in zip(state.output().outputs, error, strict=True)
    ]


def assert_usable(engine: FakeEngine) -> None:
    """The engine answers as a fresh one does."""
    fresh = FakeEngine(ahead=False)
    states = [one.add([3, 4, 5], "after all", max_tokens=4, ignore_eos=True) for one in (engine, fresh)]
    engine.run()
    fresh.run()
    assert answers(states[0]) == answers(states[1])
    engine.check_idle()


def is_engine_error(state: RequestState) -> bool:
    """Whether a request failed with one of our errors."""
    return isinstance(state.error, EngineError)
