"""What a runner knows of those who put other forwards into a model's modules for the length of a step."""

from __future__ import annotations

import contextlib
from typing import Protocol

from ..cache.step_cache import StepCache


class BoundForwards(Protocol):
    """What modules do in the steps of one runner."""

    def state(self) -> tuple[object, ...]:
        """Returns what a step that begins now is computed with: equal to that of a step before if it is the same."""

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the model's calls by this thread are run so."""


class StepForwards(Protocol):
    """What modules do in steps instead of their own forwards: `NativeLayers`, `CompiledParts`."""

    def bind(self, cache: StepCache) -> BoundForwards:
        """Returns what a runner needs to run its steps so.

        Args:
            cache (`StepCache`):
                The view of its steps.
        """
