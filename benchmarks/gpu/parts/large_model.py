"""A model shaped like Llama 3 8B, where reading the weights is most of a step."""

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
    model = random_model(sizes.large_model, run.device, sizes.dtype, run.settings.seed)
    yield from measure_model(model, sizes.large_model.name, run, shares_prompts=True)
