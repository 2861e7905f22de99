"""Time between tokens of running requests while long prompts arrive, 256 tokens of work a step."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

from hf_paged.tools.bench.engine_run import forced

from ..engines import paged
from ..models import random_model, random_prompts
from ..settings import Run
from ..sizes import sizes_for

STREAMS = 32
STREAM_TOKENS = 200
LATE_PROMPT = 1024
LATE_TOKENS = 4
LATE_INTERVAL = 0.15
BUDGET_TOKENS = 256
SIZES = (1, 8, 32, 40, 64)  # of graphs: fewer than usual, which saves time


def run(run: Run) -> Iterator[dict[str, Any]]:
    """Yields median and 99th percentile.

    Args:
        run (`Run`):
            What the part is given.
    """
    sizes = sizes_for(run.dry_run)
    model = random_model(sizes.large_model, run.device, sizes.dtype, run.settings.seed)
    budget = 16 if run.dry_run else BUDGET_TOKENS
    with paged(model, run, max_num_batched_tokens=budget, cuda_graph_sizes=SIZES) as ours:
        gaps, arrived = token_gaps(ours.engine, sizes.large_model.vocab_size, run)
    gaps.sort()
    median, p99 = statistics.median(gaps), gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))]
    yield {
        "model": sizes.large_model.name,
        "num_gaps": len(gaps),
        "late_prompts": arrived,
        "median_seconds": median,
        "p99_seconds": p99,
        "p99_over_median": p99 / median,
        "says": f"between tokens: median {median * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms ({p99 / median:.2f}x), "
        f"{arrived} long prompts arrived meanwhile",
    }


def token_gaps(engine: Any, vocab_size: int, run: Run) -> tuple[list[float], int]:
    """Returns the seconds between tokens of the running requests, and how many prompts arrived meanwhile.

    Args:
        engine (`Engine`):
            The engine.
        vocab_size (`int`):
            Tokens of the vocabulary.
        run (`Run`):
            What the part is given.
    """
    count, length, late = (3, 8, 24) if run.dry_run else (STREAMS, STREAM_TOKENS, LATE_PROMPT)
    times: list[list[float]] = [[] for _ in range(count)]
    with engine.requests() as states:
        for noted, prompt in zip(times, random_prompts([16] * count, vocab_size, 1), strict=True):
            states.append(
                engine.add_request(
                    prompt, forced(length), on_update=lambda state, noted=noted: noted.append(time.perf_counter())
                )
            )
        streams = list(states)
        sender = LateRequests(engine, states, late, vocab_size, 0.02 if run.dry_run else LATE_INTERVAL)
        sender.start()
        try:
            for _ in engine.as_finished(streams):
                pass
        finally:
            sender.end()
    # The last update is the end's own. Before all of them have begun, prompts are computed.
    begun = max(noted[0] for noted in times)
    gaps = [
        after - before
        for noted in times
        for before, after in zip(noted[: length - 1], noted[1:length], strict=True)
        if before >= begun
    ]
    return gaps, sender.sent


class LateRequests(threading.Thread):
    """Sends a long prompt now and then.

    Args:
        engine (`Engine`):
            Where to.
        states (`list[RequestState]`):
            Takes the requests, so that whoever ends the call ends them too.
        length (`int`):
            Tokens of each prompt.
        vocab_size (`int`):
            Tokens of the vocabulary.
        interval (`float`):
            Seconds between two.
    """

    def __init__(self, engine: Any, states: list[Any], length: int, vocab_size: int, interval: float):
        super().__init__(daemon=True)
        self._engine, self._states = engine, states
        self._length, self._vocab_size, self._interval = length, vocab_size, interval
        self._ended = threading.Event()
        self.sent = 0

    def run(self) -> None:
        """Sends until `end` is called."""
        while True:
            prompt = random_prompts([self._length], self._vocab_size, 100 + self.sent)[0]
            self._states.append(self._engine.add_request(prompt, forced(LATE_TOKENS)))
            self.sent += 1
            if self._ended.wait(self._interval):
                return

    def end(self) -> None:
        """Stops sending."""
        self._ended.set()
        self.join()
