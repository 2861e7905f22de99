"""What the workers have in common: one process, one engine, one workload after the other.

A worker is started as `python NAME_worker.py JOB.json` in the environment of its engine, which holds nothing of this
project: this file uses only the standard library. It writes one JSON object per line to stdout (everything that the
engine prints goes to stderr):

    {"started": {...}}                  the engine answered its first prompt
    {"workload": "W1", "result": {...}} one line for each workload, or {"workload": "W1", "error": "..."}
    {"ended": {...}}                    memory, versions, what the engine says about itself
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Workers import this file first and the engine next.
IMPORTS_BEGAN = time.perf_counter()


class Answer(NamedTuple):
    """One request's answer.

    Args:
        token_ids (`list[int]`):
            What was generated.
        first (`float`):
            Seconds from the call to its first token.
        last (`float`):
            Seconds from the call to its last token.
    """

    token_ids: list[int]
    first: float
    last: float


class Engine:
    """What a worker implements.

    Args:
        job (`dict[str, Any]`):
            `model`, `threads` and `options`, as `peers.py` gives them.
    """

    def __init__(self, job: dict[str, Any]):
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[Answer]:
        """Answers requests that arrive together: greedy, each with exactly so many tokens.

        Args:
            prompts (`list[list[int]]`):
                Token ids.
            lengths (`list[int]`):
                Tokens to generate for each.
        """
        raise NotImplementedError

    def measure(self, name: str, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Any:
        """Returns the figures of a workload; by default from `generate`.

        Args:
            name (`str`):
                The workload's name.
            prompts (`list[list[int]]`):
                Token ids.
            lengths (`list[int]`):
                Tokens to generate for each.
            options (`dict[str, Any]`):
                What `peers.py` says about this engine and workload.
        """
        if name == "W3":
            return one_after_the_other(self, prompts, lengths)
        begin = time.perf_counter()
        answers = self.generate(prompts, lengths)
        return figures(answers, lengths, time.perf_counter() - begin)

    def about(self) -> dict[str, Any]:
        """Returns versions and settings, for the report."""
        return {}


def figures(answers: list[Answer], lengths: list[int], seconds: float) -> dict[str, Any]:
    """Returns the figures of requests that arrived together.

    Args:
        answers (`list[Answer]`):
            In the order of the requests.
        lengths (`list[int]`):
            Tokens that were asked for.
        seconds (`float`):
            From the call to the last answer.
    """
    got = [len(answer.token_ids) for answer in answers]
    if got != lengths:
        wrong = [(index, pair) for index, pair in enumerate(zip(got, lengths, strict=False)) if pair[0] != pair[1]]
        raise ValueError(f"answers have the wrong number of tokens: (request, (got, wanted)) = {wrong[:5]}")
    return {
        "seconds": seconds,
        "output_tokens_per_s": sum(lengths) / seconds,
        "all_first_tokens_seconds": max(answer.first for answer in answers),
        "first_tokens": [answer.token_ids[0] for answer in answers],
        "how": f"all {len(answers)} requests",
    }


def one_after_the_other(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Returns the figures of single requests, one after the other: medians.

    Args:
        engine (`Engine`):
            The engine.
        prompts (`list[list[int]]`):
            Token ids.
        lengths (`list[int]`):
            Tokens to generate for each.
    """
    answers = []
    for prompt, length in zip(prompts, lengths, strict=True):
        (answer,) = engine.generate([prompt], [length])
        figures([answer], [length], answer.last)
        answers.append(answer)
    between = [(a.last - a.first) / (n - 1) for a, n in zip(answers, lengths, strict=True)]
    return {
        "seconds": sum(answer.last for answer in answers),
        "seconds_per_token": statistics.median(between),
        "first_token_seconds": statistics.median(answer.first for answer in answers),
        "first_tokens": [answer.token_ids[0] for answer in answers],
        "how": f"median of {len(answers)} requests, one after the other",
    }


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Runs the job that the command line names.

    Args:
        load (`Callable[[dict[str, Any]], Engine]`):
            Makes the engine: its constructor.
    """
    # Nothing that an engine prints may get between our lines: file descriptor 1 becomes stderr.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

    def tell(**values: Any) -> None:
        print(json.dumps(values), file=lines, flush=True)

    begin = time.perf_counter()
    engine = load(job)
    loaded = time.perf_counter()
    engine.generate(job["first"]["prompts"], job["first"]["output_lengths"])
    done = time.perf_counter()
    tell(
        started={
            "import_seconds": begin - IMPORTS_BEGAN,
            "load_seconds": loaded - begin,
            "start_seconds": done - begin,
            "peak_bytes": peak_bytes(),
        }
    )
    for step in job["steps"]:
        workload = job["workloads"][step["workload"]]
        try:
            result = engine.measure(step["workload"], workload["prompts"], workload["output_lengths"], step["options"])
            tell(workload=step["workload"], result=result | {"peak_bytes": peak_bytes()})
        except Exception as error:
            traceback.print_exc()
            tell(workload=step["workload"], error=f"{type(error).__name__}: {error}"[:500])
    tell(ended={"peak_bytes": peak_bytes(), "about": engine.about()})
    lines.close()
    # Some engines hang or crash while they take themselves apart; all that was measured has been told.
    os._exit(0)


def peak_bytes() -> int | None:
    """Returns the most main memory that this process and those it started held so far; `None` outside Linux."""
    tree, total = [os.getpid()], 0
    for pid in tree:
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        except OSError:
            if pid == os.getpid():
                return None
            continue
        tree += [int(child) for found in children for child in found]
        total += sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
    return total
