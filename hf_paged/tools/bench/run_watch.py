"""What can be seen of a run from outside: the pool while it goes on, and when each request got its tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...generation.outputs import RequestOutput
from ...generation.sampling.params import SamplingParams

# A look at the pool may take this share of the run's time; the pause to the next follows from what it took.
SHARE_FOR_LOOKING = 0.002
_MICROSECONDS = 6  # digits of a second that a report keeps


class RunWatch:
    """Answers prompts as `Engine.generate` does, and looks at the engine between its steps.

    Args:
        engine (`Engine`):
            The engine.
    """

    def __init__(self, engine: Any):
        self._engine = engine
        self._begin = 0.0
        self._next_look = 0.0
        self._last_step = -1
        self._token_times: list[list[float]] = []
        self._samples: list[tuple[float, int, int, int, int, int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Answers prompts.

        Args:
            prompts (`Sequence[Sequence[int]]`):
                Token ids of each.
            params (`Sequence[SamplingParams]`):
                One for each.

        Raises:
            InvalidRequestError: If one of them is wrong; none is started.
            EngineError: If a step failed.
        """
        engine = self._engine
        engine.check_all(prompts, params)
        with engine.requests() as states:
            self._begin = self._next_look = time.perf_counter()
            for prompt, param in zip(prompts, params, strict=True):
                states.append(engine.add_request(prompt, param))
            self._token_times = [[] for _ in states]
            pending = list(enumerate(states))

            def done() -> bool:
                self._look(pending)
                pending[:] = [entry for entry in pending if not entry[1].finished]
                return not pending

            engine.run_until(done)
            for state in states:
                if state.error is not None:
                    raise state.error
            return [state.output() for state in states]

    def _look(self, pending: Sequence[tuple[int, Any]]) -> None:
        """Called between steps, sometimes more than once: after each step the first call counts."""
        step = self._engine.live.counters.num_steps
        if step == self._last_step:
            return
        self._last_step = step
        now = time.perf_counter()
        for index, state in pending:
            request, times = state.group.requests[0], self._token_times[index]
            times += [now] * (request.num_output_tokens - len(times))
        if now >= self._next_look:
            self._samples.append((now - self._begin, *self._look_at_pool()))
            end = time.perf_counter()
            self._next_look = end + (end - now) / SHARE_FOR_LOOKING

    def _look_at_pool(self) -> tuple[int, int, int, int, int]:
        live = self._engine.live
        manager = live.block_manager
        owners = manager.pools[0].ref_counts
        cached = sum(owners[block_id] == 0 for block_id, _ in manager.indexes[0].items())
        scheduler = live.scheduler
        return manager.num_blocks_held, cached, manager.num_tokens_stored, scheduler.num_running, scheduler.num_waiting

    @property
    def requests(self) -> dict[str, list[Any]]:
        """Returns seconds to each request's first token, and between its further ones, under vLLM's names."""
        return request_times(self._token_times, [self._begin] * len(self._token_times))

    @property
    def timeline(self) -> dict[str, Any]:
        """Returns the pool over time: lists of the same length, and the sizes of the pool.

        `blocks_held` are those of live requests, `blocks_cached` nobody's, but found again by their content.
        """
        plan = self._engine.plan
        names = ("seconds", "blocks_held", "blocks_cached", "tokens_stored", "running", "waiting")
        columns = zip(*self._samples, strict=True) if self._samples else [()] * len(names)
        values = {name: list(column) for name, column in zip(names, columns, strict=True)}
        return values | {
            "seconds": [round(second, _MICROSECONDS) for second in values["seconds"]],
            "num_blocks": self._engine.live.block_manager.num_blocks,
            "block_size": plan.block_size,
            "bytes_per_block": plan.bytes_per_block,
        }


def request_times(token_times: Sequence[Sequence[float]], begins: Sequence[float]) -> dict[str, list[Any]]:
    """Returns seconds to each request's first token, and between its further ones, under vLLM's names.

    Args:
        token_times (`Sequence[Sequence[float]]`):
            When each token of each request came.
        begins (`Sequence[float]`):
            When each request came.
    """
    pairs = [(times, begin) for times, begin in zip(token_times, begins, strict=True) if times]
    return {
        "ttfts": [round(times[0] - begin, _MICROSECONDS) for times, begin in pairs],
        "itls": [
            [round(after - before, _MICROSECONDS) for before, after in zip(times, times[1:], strict=False)]
            for times, _ in pairs
        ],
    }
