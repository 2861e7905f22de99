"""hf_paged on a workload: what the demo and the benchmarks measure."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from ...auto import AutoPagedModelForCausalLM
from ...configuration import PagedConfig
from ...errors import InvalidRequestError
from ...generation.outputs import RequestOutput
from ...generation.sampling.params import SamplingParams
from ...generation.stats import EngineStats
from .machine import huge_page_bytes, resident_bytes
from .run_watch import RunWatch
from .workloads import TextTokens, Workload


@dataclasses.dataclass(frozen=True)
class EngineRun:
    """How the paged engine did.

    Args:
        output_tokens_per_s (`float`):
            Generated tokens per second.
        seconds (`float`):
            From the first request's start to the last one's end.
        first_token_seconds (`float`):
            Time to the first token, mean over requests, which all arrive at the same time.
        seconds_per_token (`float`, *optional*):
            Time between tokens after the first, mean over requests.
        kv_bytes_held (`int`):
            Most bytes of blocks that live requests held.
        kv_bytes_used (`int`):
            Bytes of tokens stored in them then.
        kv_waste (`float`):
            1 - tokens stored / slots of held blocks, averaged over steps.
        kv_bytes_pool (`int`):
            Bytes of the pool.
        huge_page_bytes (`int`, *optional*):
            Memory of the process on huge pages.
        resident_bytes (`int`, *optional*):
            Memory of the process.
        stats (`EngineStats`):
            The engine's own counters.
    """

    output_tokens_per_s: float
    seconds: float
    first_token_seconds: float
    seconds_per_token: float | None
    kv_bytes_held: int
    kv_bytes_used: int
    kv_waste: float
    kv_bytes_pool: int
    huge_page_bytes: int | None
    resident_bytes: int | None
    stats: EngineStats


def load_paged_model(name: str, dtype: torch.dtype | str, config: PagedConfig | None = None) -> Any:
    """Returns a model with a paged engine, on an accelerator if there is one.

    Args:
        name (`str`):
            Path or hub id.
        dtype (`torch.dtype` or `str`):
            Dtype of the weights.
        config (`PagedConfig`, *optional*):
            Settings of the engine.
    """
    where: dict[str, Any] = {"device_map": "cuda"} if torch.cuda.is_available() else {}
    return AutoPagedModelForCausalLM.from_pretrained(name, dtype=dtype, paged_config=config, **where)


def forced(length: int) -> SamplingParams:
    """Returns parameters for a greedy answer of exactly so many tokens, without its text.

    Args:
        length (`int`):
            Tokens of the answer.
    """
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)


def warm_up(model: Any, text: TextTokens) -> None:
    """Runs a little, so that nothing is measured that happens only once.

    Args:
        model (`PagedGenerationMixin`):
            The model.
        text (`TextTokens`):
            Where prompts are cut from.
    """
    model.engine.generate([text.cut(length) for length in (64, 32, 16)], [forced(4)] * 3)


def run_workload(
    model: Any,
    workload: Workload,
    progress: Callable[[RequestOutput], None] | None = None,
    watch: RunWatch | None = None,
) -> tuple[EngineRun, list[RequestOutput]]:
    """Answers all requests of a workload, started together, and measures.

    Args:
        model (`PagedGenerationMixin`):
            The model.
        workload (`Workload`):
            The requests.
        progress (`Callable[[RequestOutput], None]`, *optional*):
            Called as each request finishes.
        watch (`RunWatch`, *optional*):
            Looks at the engine between its steps; then there is no `progress`.

    Raises:
        InvalidRequestError: If a request is longer than the engine allows.
    """
    engine = model.engine
    longest = max(
        len(prompt) + length for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True)
    )
    if longest > engine.plan.max_model_len:
        raise InvalidRequestError(
            f"{workload.name} has requests of {longest} tokens, but `max_model_len` of this model and pool is "
            f"{engine.plan.max_model_len}; choose another model or workload."
        )
    engine.reset_stats()
    params = [forced(length) for length in workload.output_lengths]
    gc.collect()
    start = time.perf_counter()
    if watch is not None:
        outputs = watch.generate(workload.prompts, params)
    else:
        outputs = engine.generate(workload.prompts, params, progress=progress)
    seconds = time.perf_counter() - start
    stats = dataclasses.replace(engine.stats())
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == workload.output_lengths, "every answer has the length that was forced"
    firsts, between = _latencies(outputs)
    bytes_per_token = stats.bytes_per_block // engine.plan.block_size
    run = EngineRun(
        output_tokens_per_s=sum(lengths) / seconds,
        seconds=seconds,
        first_token_seconds=sum(firsts) / len(firsts),
        seconds_per_token=sum(between) / len(between) if between else None,
        kv_bytes_held=stats.peak_kv_bytes_held,
        kv_bytes_used=stats.peak_tokens_stored * bytes_per_token,
        kv_waste=stats.kv_waste,
        kv_bytes_pool=stats.pool_bytes,
        huge_page_bytes=huge_page_bytes(),
        resident_bytes=resident_bytes(),
        stats=stats,
    )
    return run, outputs


def floor_seconds(model: Any, workload: Workload, num_steps: int, bytes_per_second: float) -> float:
    """Returns the least time that memory allows: all weights once a step, and each token's context once.

    Args:
        model (`PagedGenerationMixin`):
            The model.
        workload (`Workload`):
            The requests.
        num_steps (`int`):
            Steps that the engine took.
        bytes_per_second (`float`):
            Measured read bandwidth.
    """
    plan = model.engine.plan
    context = sum(
        length * len(prompt) + length * (length - 1) // 2
        for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True)
    )
    kv_bytes = context * plan.bytes_per_block // plan.block_size
    return (num_steps * weight_bytes(model) + kv_bytes) / bytes_per_second


def weight_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of all parameters; shared ones count once.

    Args:
        model (`torch.nn.Module`):
            The model.
    """
    return sum(parameter.nbytes for parameter in model.parameters())


def _latencies(outputs: list[RequestOutput]) -> tuple[list[float], list[float]]:
    firsts, between = [], []
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None and metrics.first_token_time is not None, "a finished request has its times"
        assert metrics.finished_time is not None, "a finished request has its times"
        firsts.append(metrics.first_token_time - metrics.arrival_time)
        count = len(output.outputs[0].token_ids)
        if count > 1:
            between.append((metrics.finished_time - metrics.first_token_time) / (count - 1))
    return firsts, between
