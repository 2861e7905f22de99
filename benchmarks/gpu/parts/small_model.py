"""A model shaped like SmolLM2 135M, where the host's part of a step matters most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..end_to_end import measure_model
from ..models import random_model
from ..settings import Run
from ..sizes import sizes_for


def run(run: Run) -> Iterator[dict[str, Any]]:
    """Yields everything about it.

    Args:
        run (`Run`):
            What the part is given.
    """
    sizes = sizes_for(run.dry_run)
    model = random_model(sizes.small_model, run.device, sizes.dtype, run.settings.seed)
    # Shorter contexts than usual take fewer graphs, which saves time.
    max_model_len = 128 if run.dry_run else 2048
    yield from measure_model(model, sizes.small_model.name, run, max_model_len=max_model_len)
