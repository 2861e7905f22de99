"""A stock model given a paged engine for a while, and what to ask of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from hf_paged import AutoPagedModelForCausalLM, PagedConfig
from hf_paged.tools.bench.engine_run import forced, weight_bytes

from .models import MAX_LENGTH, random_prompts
from .settings import Run


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
        usual = {"max_num_seqs": 8, "max_model_len": 128, "num_blocks": 64, "attn_backend": "torch_sdpa"}
    return PagedConfig(**(usual | changed))


@contextlib.contextmanager
def paged(model: Any, config: PagedConfig) -> Iterator[Any]:
    """The model with an engine that has run once; afterwards it is the stock model again.

    Args:
        model (`PreTrainedModel`):
            A stock model; changed in place.
        config (`PagedConfig`):
            The engine's settings.
    """
    model = AutoPagedModelForCausalLM.from_model(model, paged_config=config)
    try:
        warm_up(model)
        yield model
    finally:
        model.unpaged()
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


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
