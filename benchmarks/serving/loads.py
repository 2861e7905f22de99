"""What servers are asked: W1's mixed lengths, as texts, with forced lengths of answers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_paged.tools.bench.serve import run_loop
from hf_paged.tools.bench.serve_arrivals import arrival_times
from hf_paged.tools.bench.serve_client import HttpClient
from hf_paged.tools.bench.serve_load import send_all
from hf_paged.tools.bench.serve_records import RequestRecord
from hf_paged.tools.bench.serve_statistics import DETAILS, summarize
from hf_paged.tools.bench.workloads import TextTokens, Workload

PATH = "/v1/completions"
PERCENTILES = (50.0, 90.0, 99.0)


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests and when they come.

    Args:
        name (`str`):
            Its name.
        count (`int`):
            How many.
        rate (`float`):
            Requests per second; infinite: all at once.
    """

    name: str
    count: int
    rate: float = math.inf

    def describe(self) -> str:
        """Returns a few words for people."""
        how = "all at once" if math.isinf(self.rate) else f"Poisson, {self.rate:g}/s"
        return f"{self.name}: {self.count} requests, {how}"


class Texts:
    """Cuts texts out of a tokenizer's ring of real text.

    Args:
        model (`Path`):
            A Transformers folder.
        seed (`int`, defaults to 0):
            Other seeds give other texts.
    """

    def __init__(self, model: Path, seed: int = 0):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.ring = TextTokens.from_tokenizer(self.tokenizer, seed)

    def of(self, workload: Workload) -> list[str]:
        """Returns the prompts of a workload as texts.

        Args:
            workload (`Workload`):
                The workload.
        """
        return [self.tokenizer.decode(prompt) for prompt in workload.prompts]


def bodies_of(prompts: Sequence[str], lengths: Sequence[int], model: str, **fields: Any) -> list[bytes]:
    """Returns greedy requests of forced lengths.

    Args:
        prompts (`Sequence[str]`):
            Texts.
        lengths (`Sequence[int]`):
            Tokens of each answer.
        model (`str`):
            The model's name.
        fields (`Any`):
            Further fields.
    """
    common = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True}
    common |= {"stream_options": {"include_usage": True}, **fields}
    return [
        json.dumps(common | {"prompt": prompt, "max_tokens": length}).encode()
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def send(url: str, bodies: Sequence[bytes], times: Sequence[float], timeout: float = 900.0) -> dict[str, Any]:
    """Sends requests at their times and returns figures, with the records under `"records"`.

    Args:
        url (`str`):
            The server.
        bodies (`Sequence[bytes]`):
            The requests.
        times (`Sequence[float]`):
            When, in seconds from now.
        timeout (`float`, defaults to 900.0):
            Seconds for each.
    """

    async def work() -> Any:
        client = HttpClient(url)
        try:
            return await send_all(client, PATH, bodies, times, timeout=timeout)
        finally:
            client.close()

    records, duration, cost = run_loop(work())
    return summarize(records, duration, percentiles=PERCENTILES, cost=cost) | {"records": records}


def send_load(url: str, load: Load, prompts: Sequence[str], lengths: Sequence[int], model: str) -> dict[str, Any]:
    """Sends a load and returns figures.

    Args:
        url (`str`):
            The server.
        load (`Load`):
            When requests come.
        prompts (`Sequence[str]`):
            Texts.
        lengths (`Sequence[int]`):
            Tokens of each answer.
        model (`str`):
            The model's name.
    """
    return send(url, bodies_of(prompts, lengths, model), arrival_times(load.count, load.rate, seed=load.count))


def without_details(figures: dict[str, Any]) -> dict[str, Any]:
    """Returns figures without those of single requests.

    Args:
        figures (`dict[str, Any]`):
            From `send`.
    """
    return {name: value for name, value in figures.items() if name not in (*DETAILS, "records")}


def succeeded(figures: dict[str, Any]) -> list[RequestRecord]:
    """Returns the records of requests that were answered.

    Args:
        figures (`dict[str, Any]`):
            From `send`.
    """
    return [record for record in figures["records"] if record.succeeded]
