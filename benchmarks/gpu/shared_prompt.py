"""Requests that begin with one long prompt: its keys read once or for each of them, in graphs or launch by launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hf_paged.tools.bench.engine_run import forced, run_workload
from hf_paged.tools.bench.workloads import Workload

from .engines import num_replays
from .models import random_prompts
from .settings import Run
from .sizes import Sizes

OWN_TOKENS = 16
_MAX_WASTE = "hf_paged.generation.graphs.decode.MAX_WASTE"
_PREPARED = "hf_paged.kernels.triton.backend.prepared_prefixes"
# Of each way, how many bytes a graph may read in vain, and whether what is shared is looked for.
WAYS: dict[str, tuple[int | None, bool]] = {
    "as the engine decides": (None, True),
    "graphs, read for each": (1 << 62, True),
    "no graphs, read once": (-1, True),
    "no graphs, read for each": (-1, False),
}


def shared_prompt_rows(ours: Any, name: str, run: Run, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yields the time of a step in each way.

    Args:
        ours (`PagedGenerationMixin`):
            The model.
        name (`str`):
            For people.
        run (`Run`):
            What the part is given.
        sizes (`Sizes`):
            Of the run.
    """
    count, shared = sizes.cascade
    prefix, *own = random_prompts([shared] + [OWN_TOKENS] * count, ours.config.vocab_size, run.settings.seed + 7)
    prompts = [prefix + tokens for tokens in own]
    load = Workload(f"{count} with a prefix", prompts, [max(4, sizes.step_tokens // 2)] * count)
    ours.engine.generate([prefix], [forced(1)])
    for way, (waste, looks) in WAYS.items():
        with contextlib.ExitStack() as patches:
            if waste is not None:
                patches.enter_context(mock.patch(_MAX_WASTE, waste))
            if not looks:
                patches.enter_context(mock.patch(_PREPARED, return_value=None))
            ours.engine.generate(prompts, [forced(2)] * count)
            before = num_replays(ours)
            done, _ = run_workload(ours, load)
            replays = num_replays(ours) - before
        milliseconds = (done.seconds_per_token or 0) * 1e3
        yield {
            "model": name,
            "way": way,
            "requests": count,
            "shared_tokens": shared,
            "shared_step_seconds": done.seconds_per_token,
            "replays": replays,
            "says": f"{name}: a step of {count} that share {shared:,} tokens takes {milliseconds:.2f} ms {way} "
            f"({replays} replays)",
        }
