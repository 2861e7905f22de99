"""Parity of seeded random models with stock Transformers, in float32 and in the dtype that is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ..models import random_model
from ..parity import check_tokens
from ..settings import Run
from ..sizes import sizes_for

NUM_LAYERS = 4


def run(run: Run) -> Iterator[dict[str, Any]]:
    """Yields a row for each model and dtype.

    Args:
        run (`Run`):
            What the part is given.
    """
    sizes = sizes_for(run.dry_run)
    small = dataclasses.replace(sizes.small_model, name="small heads", num_layers=NUM_LAYERS)
    # The heads of the large one, few layers and a small vocabulary.
    large = dataclasses.replace(sizes.large_model, name="large heads", num_layers=2, vocab_size=1024)
    for size in (small, large):
        for dtype in dict.fromkeys((torch.float32, sizes.dtype)):
            model = random_model(size, run.device, dtype, run.settings.seed)
            yield check_tokens(model, size.name, run)
