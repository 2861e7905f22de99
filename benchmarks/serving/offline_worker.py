"""The engine without a server, in a process of its own: throughput of a workload, and time to the first token alone.

It reads a job from a file and prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from hf_paged import LLM, SamplingParams
from hf_paged.generation.async_engine import AsyncEngine


def main() -> None:
    """Measures what the job asks for."""
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    llm = LLM(job["model"], dtype="bfloat16")
    throughput(llm, job["warm_up"])
    found: dict[str, Any] = {"throughput": [throughput(llm, work) for work in job["workloads"]]}
    found["first_token"] = asyncio.run(first_tokens(llm, job["alone"]))
    print(json.dumps(found), flush=True)


def params(length: int) -> SamplingParams:
    """Returns parameters of a greedy answer of forced length, with its text.

    Args:
        length (`int`):
            Its tokens.
    """
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)


def throughput(llm: LLM, work: dict[str, Any]) -> float:
    """Returns output tokens per second, from texts to texts.

    Args:
        llm (`LLM`):
            The model.
        work (`dict[str, Any]`):
            Prompts and lengths.
    """
    begin = time.perf_counter()
    outputs = llm.generate(work["prompts"], [params(length) for length in work["lengths"]], use_tqdm=False)
    seconds = time.perf_counter() - begin
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


async def first_tokens(llm: LLM, prompts: list[str]) -> list[float]:
    """Returns seconds to the first token of prompts, one after the other, as an asynchronous program sees them.

    Args:
        llm (`LLM`):
            The model.
        prompts (`list[str]`):
            The prompts.
    """
    engine = AsyncEngine(llm.model, tokenizer=llm.tokenizer)
    seconds = []
    for prompt in prompts:
        begin = time.perf_counter()
        first = None
        async for _ in engine.generate(prompt, params(8), output_kind="delta"):
            first = first or time.perf_counter() - begin
        assert first is not None, "the engine gave nothing"
        seconds.append(first)
    engine.close()
    return seconds


if __name__ == "__main__":
    main()
