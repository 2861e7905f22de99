"""Stock Transformers on a workload, in a process of its own: `python -m hf_paged.tools.bench.baselines`.

The process reads one JSON object per line from stdin, does it, and writes one JSON object per line to stdout (all
else goes to stderr). The first line loads the model, every further one measures; `baseline_process.py` is the other
end.

    {"name": "path", "dtype": "bfloat16", "threads": 2}                  -> {"ready": true}
    {"method": "static_batch", "workload": {...}, "budget": 40, ...}     -> fields of `BaselineResult`

Every method is greedy and ignores the end-of-sequence token. A method that reaches its budget stops there and is
extrapolated from the time per step of its last half, which favours it: steps get longer as the texts grow.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from ...compat import cache_layer_tensors, output_cache
from .kv_usage import ContinuousUsage, static_batch_usage
from .machine import huge_page_bytes, resident_bytes
from .run_watch import request_times
from .workloads import Workload

BUDGET_SECONDS = 40.0
# What is extrapolated from are steps that decode: the first one holds all prompts, and takes as long as many of those.
MIN_STEPS = 5
PROMPT_SECONDS = 200.0  # beyond the budget, for generate_batch to come to the end of all prompts
BLOCK_SIZE = 256
MAX_BATCH_TOKENS = 512
MAX_BLOCKS = 160


@dataclasses.dataclass(frozen=True)
class BaselineResult:
    """How stock Transformers did.

    Args:
        method (`str`):
            `"one_by_one"`, `"static_batch"` or `"generate_batch"`.
        output_tokens_per_s (`float`):
            Tokens that were asked for, per second, over the whole workload (extrapolated if need be).
        seconds (`float`):
            Time of the whole workload (extrapolated if need be).
        measured_seconds (`float`):
            Time that was really measured.
        extrapolated (`bool`):
            Whether the measured part is less than the whole.
        how (`str`):
            What was measured, in words.
        kv_bytes_held (`int`):
            Most bytes of K/V memory held for requests at one time.
        kv_bytes_used (`int`):
            Most bytes that held tokens of unfinished requests at one time.
        kv_waste (`float`):
            1 - tokens of unfinished requests / slots held for them, averaged over steps.
        kv_bytes_pool (`int`, *optional*):
            Bytes of the pool, where one is taken at the start.
        first_token_seconds (`float`, *optional*):
            Time to the first token (mean over requests; one by one only).
        seconds_per_token (`float`, *optional*):
            Time between tokens after the first (one by one only).
        huge_page_bytes (`int`, *optional*):
            Memory of the process on huge pages.
        resident_bytes (`int`, *optional*):
            Memory of the process.
        measured_share (`float`, defaults to 1.0):
            Share of the workload's tokens that was really measured; of a static batch, of its steps.
        requests (`dict[str, list]`):
            `"ttfts"` and `"itls"`, what was measured of each request, as `request_times` returns them.
    """

    method: str
    output_tokens_per_s: float
    seconds: float
    measured_seconds: float
    extrapolated: bool
    how: str
    kv_bytes_held: int
    kv_bytes_used: int
    kv_waste: float
    kv_bytes_pool: int | None = None
    first_token_seconds: float | None = None
    seconds_per_token: float | None = None
    huge_page_bytes: int | None = None
    resident_bytes: int | None = None
    measured_share: float = 1.0
    requests: dict[str, list[Any]] = dataclasses.field(default_factory=lambda: {"ttfts": [], "itls": []})

    def row(self) -> dict[str, Any]:
        """Returns plain values, without those of single requests."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "requests"}


class StepClock(StoppingCriteria):
    """Notes the time after each step and stops `generate` at a deadline.

    Args:
        deadline (`float`):
            In seconds of `time.perf_counter()`.
        at_least (`int`, defaults to 1):
            Steps that are run in any case.
    """

    def __init__(self, deadline: float, at_least: int = 1):
        self.deadline = deadline
        self.at_least = at_least
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> Any:
        self.times.append(time.perf_counter())
        is_over = self.times[-1] >= self.deadline and len(self.times) >= self.at_least
        return torch.full((input_ids.shape[0],), is_over, device=input_ids.device)


def one_by_one(model: Any, workload: Workload, budget: float, sample: int) -> BaselineResult:
    """Calls `generate` for one request after the other, on a sample.

    Args:
        model (`PreTrainedModel`):
            The model.
        workload (`Workload`):
            All requests.
        budget (`float`):
            Seconds after which no further step is begun.
        sample (`int`):
            Requests to run.
    """
    chosen = workload.sample(sample)
    begin = time.perf_counter()
    tokens, firsts, between, steps = 0, [], 0.0, 0
    token_times, starts = [], []
    for prompt, length in zip(chosen.prompts, chosen.output_lengths, strict=True):
        start = time.perf_counter()
        clock = _generate(model, [prompt], length, begin + budget)
        tokens += len(clock.times)
        firsts.append(clock.times[0] - start)
        token_times.append(clock.times)
        starts.append(start)
        between += clock.times[-1] - clock.times[0]
        steps += len(clock.times) - 1
        if clock.times[-1] >= clock.deadline:
            break
    measured = time.perf_counter() - begin
    rate = tokens / measured
    most = max(map(len, workload.prompts)) + max(workload.output_lengths)
    per_token = kv_bytes_per_token(model)
    return BaselineResult(
        method="one_by_one",
        output_tokens_per_s=rate,
        seconds=workload.num_output_tokens / rate,
        measured_seconds=measured,
        extrapolated=tokens < workload.num_output_tokens,
        how=f"{len(firsts)} of {len(workload)} requests, {tokens:,} of {workload.num_output_tokens:,} tokens",
        kv_bytes_held=most * per_token,
        kv_bytes_used=most * per_token,
        kv_waste=0.0,
        first_token_seconds=sum(firsts) / len(firsts),
        seconds_per_token=between / steps if steps else None,
        measured_share=tokens / workload.num_output_tokens,
        requests=request_times(token_times, starts),
    )


def static_batch(model: Any, workload: Workload, budget: float, sample: int) -> BaselineResult:
    """Calls `generate` once for all requests, padded on the left to the longest prompt, up to the longest output.

    Args:
        model (`PreTrainedModel`):
            The model.
        workload (`Workload`):
            All requests.
        budget (`float`):
            Seconds after which no further step is begun, once there are some without prompts.
        sample (`int`):
            Not used: the whole batch is run.
    """
    steps = max(workload.output_lengths)
    begin = time.perf_counter()
    clock = _generate(model, workload.prompts, steps, begin + budget, at_least=MIN_STEPS)
    measured = time.perf_counter() - begin
    done = len(clock.times)
    missing = (steps - done) * _late_step_seconds([begin, *clock.times])
    usage = static_batch_usage([len(prompt) for prompt in workload.prompts], workload.output_lengths)
    per_token = kv_bytes_per_token(model)
    return BaselineResult(
        method="static_batch",
        output_tokens_per_s=workload.num_output_tokens / (measured + missing),
        seconds=measured + missing,
        measured_seconds=measured,
        extrapolated=done < steps,
        how=f"{done} of {steps} steps of all {len(workload)} requests",
        kv_bytes_held=usage.peak_slots * per_token,
        kv_bytes_used=usage.tokens_at_peak * per_token,
        kv_waste=usage.waste,
        measured_share=done / steps,
        requests=request_times([clock.times[:length] for length in workload.output_lengths], [begin] * len(workload)),
    )


def generate_batch(model: Any, workload: Workload, budget: float, sample: int) -> BaselineResult:
    """Runs Transformers' own continuous batching on a sample, with a pool as large as the sample can need.

    Its manager is used directly, because `generate_batch` gives all requests the same output length.

    Args:
        model (`PreTrainedModel`):
            The model.
        workload (`Workload`):
            All requests.
        budget (`float`):
            Seconds after which it is stopped.
        sample (`int`):
            Requests to run.
    """
    chosen = workload.sample(sample)
    totals = [len(p) + n for p, n in zip(chosen.prompts, chosen.output_lengths, strict=True)]
    num_blocks = min(MAX_BLOCKS, sum(-(-total // BLOCK_SIZE) for total in totals) + 1)
    # Its defaults are meant for a GPU: on a CPU they take as much memory as there is.
    config = _continuous_batching_config(num_blocks=num_blocks, max_batch_tokens=MAX_BATCH_TOKENS)
    usage = ContinuousUsage([len(prompt) for prompt in chosen.prompts], BLOCK_SIZE)
    begin = time.perf_counter()
    arrivals = [begin]
    token_times: list[list[float]] = [[] for _ in range(len(chosen))]
    with model.continuous_batching_context_manager(
        generation_config=_greedy(1), continuous_batching_config=config, timeout=60
    ) as manager:
        for index, (prompt, length) in enumerate(zip(chosen.prompts, chosen.output_lengths, strict=True)):
            manager.add_request(prompt, str(index), max_new_tokens=length, streaming=True, eos_token_id=-1)
        while usage.num_tokens < chosen.num_output_tokens and _goes_on(begin + budget, usage, chosen):
            output = manager.get_result(timeout=1)
            if output is None:
                if not manager.is_running():
                    raise RuntimeError("Transformers' continuous batching ended before its requests did")
                continue
            if output.error is not None:
                raise RuntimeError(f"Transformers' continuous batching failed: {output.error}")
            index = int(output.request_id)
            new = len(output.generated_tokens) - usage.generated[index]
            usage.observe(index, new, finished=len(output.generated_tokens) >= chosen.output_lengths[index])
            arrivals += [time.perf_counter()] * new
            token_times[index] += [arrivals[-1]] * new
        measured = time.perf_counter() - begin
        # Stopping waits for what still runs.
        for index in range(len(chosen)):
            manager.cancel_request(str(index))
    missing = (chosen.num_output_tokens - usage.num_tokens) * _late_step_seconds(arrivals)
    rate = chosen.num_output_tokens / (measured + missing)
    per_token = kv_bytes_per_token(model)
    return BaselineResult(
        method="generate_batch",
        output_tokens_per_s=rate,
        seconds=workload.num_output_tokens / rate,
        measured_seconds=measured,
        extrapolated=usage.num_tokens < workload.num_output_tokens,
        how=f"{usage.num_tokens:,} of {workload.num_output_tokens:,} tokens"
        + (f", {len(chosen)} of {len(workload)} requests" if len(chosen) < len(workload) else " of all requests"),
        kv_bytes_pool=num_blocks * BLOCK_SIZE * per_token,
        kv_bytes_held=usage.peak_slots * per_token,
        kv_bytes_used=usage.peak_tokens * per_token,
        kv_waste=usage.waste,
        measured_share=usage.num_tokens / workload.num_output_tokens,
        requests=request_times(token_times, [begin] * len(chosen)),
    )


METHODS: dict[str, Callable[[Any, Workload, float, int], BaselineResult]] = {
    "one_by_one": one_by_one,
    "static_batch": static_batch,
    "generate_batch": generate_batch,
}


def kv_bytes_per_token(model: Any) -> int:
    """Returns the K/V bytes of one token over all layers, measured on a short forward pass.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    num_tokens = 8
    ids = torch.zeros((1, num_tokens), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        cache = output_cache(model(ids, use_cache=True))
    layers = [cache_layer_tensors(cache, index) for index in range(len(cache.layers))]
    return sum(keys.nbytes + values.nbytes for keys, values in filter(None, layers)) // num_tokens


def _generate(model: Any, prompts: list[list[int]], num_steps: int, deadline: float, at_least: int = 1) -> StepClock:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    clock = StepClock(deadline, at_least)
    model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=_greedy(num_steps),
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return clock


def _greedy(num_steps: int) -> GenerationConfig:
    """Nothing ends before `num_steps`: `load_model` has taken the model's own end-of-sequence tokens away."""
    return GenerationConfig(do_sample=False, max_new_tokens=num_steps, min_new_tokens=None, pad_token_id=0)


def _goes_on(deadline: float, usage: ContinuousUsage, chosen: Workload) -> bool:
    """Until the deadline; then until all requests decode, or that takes too long: without a token in any case."""
    is_decoding = all(
        done >= min(MIN_STEPS, length) for done, length in zip(usage.generated, chosen.output_lengths, strict=True)
    )
    now = time.perf_counter()
    return now < deadline or not usage.num_tokens or (not is_decoding and now < deadline + PROMPT_SECONDS)


def _late_step_seconds(times: list[float]) -> float:
    """Mean time between two entries over the last half of a list of times (the first half holds the prompts)."""
    middle = len(times) // 2 if len(times) > 2 else 0
    return (times[-1] - times[middle]) / max(1, len(times) - 1 - middle)


def _continuous_batching_config(num_blocks: int, max_batch_tokens: int) -> Any:
    from transformers import ContinuousBatchingConfig

    # Transformers 5.24 calls it a page, 5.17 a block.
    names = inspect.signature(ContinuousBatchingConfig).parameters
    size: dict[str, Any] = {"page_size" if "page_size" in names else "block_size": BLOCK_SIZE}
    return ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, **size)


def load_model(name: str, dtype: str, threads: int) -> Any:
    """Returns a stock model that never ends a text on its own.

    Args:
        name (`str`):
            Path or hub id.
        dtype (`str`):
            Name of the dtype.
        threads (`int`):
            Threads that torch uses.
    """
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype)).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.config.eos_token_id = None
    return model


def main() -> None:
    """Serves one JSON object per line until stdin ends."""
    # Nothing that Transformers prints may get between our lines: file descriptor 1 becomes stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    model: Any = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if model is None:
                model = load_model(**job)
                answer: dict[str, Any] = {"ready": True}
            else:
                method = METHODS[job["method"]]
                result = method(model, Workload(**job["workload"]), job["budget"], job["sample"])
                pages = {"huge_page_bytes": huge_page_bytes(), "resident_bytes": resident_bytes()}
                answer = dataclasses.asdict(result) | pages
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
