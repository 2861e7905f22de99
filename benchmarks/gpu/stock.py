"""Stock Transformers on a load on a GPU: one by one, as a static batch, and with its own continuous batching."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_paged.tools.bench.baselines import METHODS
from hf_paged.tools.bench.workloads import Workload

# Requests of the sample that is run one by one.
SAMPLE = 6
# On a CPU its defaults take all memory.
SMALL_POOL: dict[str, Any] = {"num_blocks": 16, "max_batch_tokens": 64}


def generate_batch(model: Any, load: Workload, budget: float, dry_run: bool) -> dict[str, Any]:
    """Runs Transformers' continuous batching with its defaults: its manager, as each request has its own length.

    Args:
        model (`PreTrainedModel`):
            The model.
        load (`Workload`):
            All requests.
        budget (`float`):
            Seconds after which it is stopped, and extrapolated from its latest tokens.
        dry_run (`bool`):
            Whether its pool has to be small.
    """
    config = ContinuousBatchingConfig(**(SMALL_POOL if dry_run else {}))
    greedy = GenerationConfig(do_sample=False, max_new_tokens=1, pad_token_id=0)
    counts = [0] * len(load)
    begin = time.perf_counter()
    arrivals = [begin]
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=config, timeout=10
    ) as manager:
        for index, (prompt, length) in enumerate(zip(load.prompts, load.output_lengths, strict=True)):
            manager.add_request(prompt, str(index), max_new_tokens=length, streaming=True, eos_token_id=-1)
        while sum(counts) < load.num_output_tokens and time.perf_counter() < begin + budget:
            output = manager.get_result(timeout=1)
            if output is None:
                if not manager.is_running():
                    raise RuntimeError("it ended before its requests did")
                continue
            if output.error is not None:
                raise RuntimeError(str(output.error))
            index, now = int(output.request_id), time.perf_counter()
            arrivals += [now] * (len(output.generated_tokens) - counts[index])
            counts[index] = len(output.generated_tokens)
        measured = time.perf_counter() - begin
        for index in range(len(load)):
            manager.cancel_request(str(index))
    return _rate(load, sum(counts), measured, arrivals)


def _rate(load: Workload, done: int, measured: float, arrivals: list[float]) -> dict[str, Any]:
    if not done:
        raise RuntimeError(f"it gave no token within {measured:.0f} s")
    missing = load.num_output_tokens - done
    # Its later half holds no prompts, which favours it.
    middle = len(arrivals) // 2
    per_token = (arrivals[-1] - arrivals[middle]) / max(1, len(arrivals) - 1 - middle)
    return {
        "output_tokens_per_s": load.num_output_tokens / (measured + missing * per_token),
        "measured_seconds": measured,
        "how": f"{done:,} of {load.num_output_tokens:,} tokens",
    }


def _of_bench(name: str) -> Callable[[Any, Workload, float, bool], dict[str, Any]]:
    def method(model: Any, load: Workload, budget: float, dry_run: bool) -> dict[str, Any]:
        found = METHODS[name](model, load, budget, 1 if dry_run else SAMPLE)
        return {
            "output_tokens_per_s": found.output_tokens_per_s,
            "measured_seconds": found.measured_seconds,
            "how": found.how,
        }

    return method


STOCK: dict[str, Callable[[Any, Workload, float, bool], dict[str, Any]]] = {
    "generate, one by one": _of_bench("one_by_one"),
    "generate_batch": generate_batch,
    "generate, static batch": _of_bench("static_batch"),
}
