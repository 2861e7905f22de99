"""The model that the command line names: parity with stock Transformers, then speed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..end_to_end import measure_model
from ..models import load_model
from ..parity import check_tokens
from ..settings import Run


def run(run: Run) -> Iterator[dict[str, Any]]:
    """Yields everything about it.

    Args:
        run (`Run`):
            What the part is given.
    """
    assert run.settings.model is not None, "this part runs only with a model"
    model = load_model(run.settings.model, run.device)
    name = Path(run.settings.model).name
    yield check_tokens(model, name, run)
    yield from measure_model(model, name, run)
