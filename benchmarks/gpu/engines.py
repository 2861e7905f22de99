"""A stock model given a paged engine for a while, its graphs, and what to ask of it."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from hf_paged import AutoPagedModelForCausalLM, PagedConfig
from hf_paged.generation.graphs.decode import DecodeGraphs
from hf_paged.tools.bench.engine_run import forced, weight_bytes

from .models import MAX_LENGTH, random_prompts
from .settings import Run
from .stand_ins import as_on_a_gpu
from .timing import Timing, measure_launches, synchronize


def settings_of(run: Run, **changed: Any) -> PagedConfig:
    """Returns the engine's settings.

    Args:
        run (`Run`):
            What the part is given.
        changed (`Any`):
            Other than usual.
    """
    usual: dict[str, Any] = {"max_num_seqs": 256, "max_model_len": MAX_LENGTH}
    if run.dry_run:
        usual = {"max_num_seqs": 8, "max_model_len": 128, "num_blocks": 64}
    return PagedConfig(**(usual | changed))


@contextlib.contextmanager
def paged(model: Any, run: Run, **changed: Any) -> Iterator[Any]:
    """The model with an engine that has run once; afterwards it is the stock model again.

    Args:
        model (`PreTrainedModel`):
            A stock model; changed in place.
        run (`Run`):
            What the part is given.
        changed (`Any`):
            Settings of the engine other than usual.
    """
    gc.collect()  # whoever ran before may have left memory in cycles
    with as_on_a_gpu(run.settings):
        model = AutoPagedModelForCausalLM.from_model(model, paged_config=settings_of(run, **changed))
        try:
            warm_up(model)
            yield model
        finally:
            model.unpaged()
            gc.collect()
            if model.device.type == "cuda":
                torch.cuda.empty_cache()


@contextlib.contextmanager
def timed_captures(device: str) -> Iterator[list[float]]:
    """Notes how long each engine that is made meanwhile takes to capture all its graphs, in seconds.

    Args:
        device (`str`):
            `"cuda"` or `"cpu"`.
    """
    capture_all, seconds = DecodeGraphs.capture_all, []

    def timed(graphs: DecodeGraphs, *args: Any) -> None:
        synchronize(device)
        begin = time.perf_counter()
        capture_all(graphs, *args)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)

    with mock.patch.object(DecodeGraphs, "capture_all", timed):
        yield seconds


def graphs_of(engine: Any) -> DecodeGraphs | None:
    """Returns the graphs of an engine that has run, or `None` if it has none.

    Args:
        engine (`Engine`):
            The engine.
    """
    found: DecodeGraphs | None = engine._loop.ready_runner().graphs
    return found


def time_of_replay(engine: Any, prompts: list[list[int]], device: str) -> Timing | None:
    """Returns how long the device takes for the graph by which these prompts' answers are decoded.

    Args:
        engine (`Engine`):
            The engine, with nothing to do.
        prompts (`list[list[int]]`):
            Prompts, which are cached.
        device (`str`):
            `"cuda"` or `"cpu"`.
    """
    graphs = graphs_of(engine)
    if graphs is None:
        return None
    shapes: list[Any] = []
    replay = graphs.replay

    def noted(shape: Any) -> torch.Tensor:
        shapes.append(shape)
        return replay(shape)

    with mock.patch.object(graphs, "replay", noted):
        engine.generate(prompts, [forced(4)] * len(prompts))
    # The last step's inputs still lie where its graph reads them, and its blocks are nobody's.
    return measure_launches(lambda: replay(shapes[-1]), device) if shapes else None


def warm_up(model: Any) -> None:
    """Runs a little of everything, so that nothing is measured that happens only once.

    Args:
        model (`PagedGenerationMixin`):
            The model.
    """
    plan = model.engine.plan
    limit = plan.max_model_len
    # One, some, and a multiple of 16: Triton compiles such numbers apart.
    for count in sorted({min(count, plan.max_num_seqs) for count in (1, 7, 32)}):
        prompts = random_prompts([min(40 + 8 * i, limit // 2) for i in range(count)], model.config.vocab_size, count)
        model.engine.generate(prompts, [forced(4)] * count)


def read_bytes(model: Any) -> int:
    """Returns the bytes of weights that a step must read: an embedding that is no head gives only a few rows.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return weight_bytes(model) - (0 if embedding is head else embedding.nbytes)


def num_replays(ours: Any) -> int:
    """Returns how many steps have been replayed.

    Args:
        ours (`PagedGenerationMixin`):
            The model.
    """
    graphs = graphs_of(ours.engine)
    return 0 if graphs is None else graphs.num_replays
