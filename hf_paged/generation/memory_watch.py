"""Holds what an accelerator's memory comes to against what the plan promised, once the engine runs."""

from __future__ import annotations

import logging
import weakref

import torch

from ..cache import memory
from ..cache.budget import MemoryPlan
from .model_runner import ModelRunner

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_TOLERANCE = 0.02  # of the device's memory


class MemoryWatch:
    """Measures after the first step of each runner, when its pool is there, and writes a line to the log.

    Args:
        plan (`MemoryPlan`):
            What was promised.
        device (`torch.device`):
            The accelerator.
    """

    def __init__(self, plan: MemoryPlan, device: torch.device):
        self._plan = plan
        self._device = device
        self._seen: weakref.ref[ModelRunner] | None = None
        self.used: int | None = None  # bytes, by whomever, when it was measured last

    def look(self, runner: ModelRunner | None) -> None:
        """Measures, unless this was done for the runner already.

        Args:
            runner (`ModelRunner`, *optional*):
                The runner, after a step; `None` if there is none.
        """
        if runner is None or (self._seen is not None and self._seen() is runner):
            return
        self._seen = weakref.ref(runner)
        plan = self._plan
        self.used = plan.total - memory.free_memory(self._device)
        is_kept = self.used <= plan.limit + _TOLERANCE * plan.total
        logger.log(
            logging.INFO if is_kept else logging.WARNING,
            "Memory of %s: %.2f GiB are in use after the first step, %.2f GiB at most were promised%s. Planned: %s.",
            self._device,
            self.used / _GIB,
            plan.limit / _GIB,
            "" if is_kept else "; other programs may have come, or the model has grown",
            plan.describe(),
        )
