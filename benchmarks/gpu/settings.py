"""How a run is done: on which device, how large, how long each part may take."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

TOTAL_SECONDS = 270.0


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the run.

    Args:
        name (`str`):
            File under `parts/`.
        seconds (`float`):
            Its share of the time. What a part does not need goes to the later ones.
    """

    name: str
    seconds: float


# Correctness first; what the targets need most comes before what is nice to know.
PARTS = (
    Part("machine", 10),
    Part("essentials", 44),
    Part("cases", 43),
    Part("parity", 12),
    Part("attention", 34),
    Part("large_model", 60),
    Part("memory", 16),
    Part("latency", 14),
    Part("small_model", 23),
    Part("sweeps", 8),
)
PLOT_SECONDS = 6.0
# A dry run measures nothing, and may meet a busy machine: it has so many times the time.
DRY_PATIENCE = 4.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line decided.

    Args:
        device (`str`):
            `"cuda"` or, for a dry run, `"cpu"`.
        dry_run (`bool`):
            Tiny shapes on a CPU, kernels in Triton's interpreter: shows that everything runs, measures nothing.
        model (`str`, *optional*):
            A Transformers folder whose parity and speed are shown as well.
        seed (`int`, defaults to 0):
            Of weights, K/V and prompts.
    """

    device: str
    dry_run: bool
    model: str | None = None
    seed: int = 0

    def to_json(self) -> str:
        """Returns it as one word, for a process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Returns what `to_json` wrote.

        Args:
            text (`str`):
                The word.
        """
        return cls(**json.loads(text))


class Deadline:
    """When a part should end: it begins nothing that it could not finish by then.

    Args:
        seconds (`float`):
            From now.
    """

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Returns the seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def allows(self, seconds: float) -> bool:
        """Returns whether something of this length can still be begun.

        Args:
            seconds (`float`):
                Its length.
        """
        return self.left() >= seconds


@dataclasses.dataclass
class Run:
    """What a part is given.

    Args:
        settings (`Settings`):
            What the command line decided.
        deadline (`Deadline`):
            When the part should end.
        rows (`dict[str, list[dict[str, Any]]]`):
            Rows of the parts before it, by name.
    """

    settings: Settings
    deadline: Deadline
    rows: dict[str, list[dict[str, Any]]]

    @property
    def device(self) -> str:
        """Returns the device."""
        return self.settings.device

    @property
    def dry_run(self) -> bool:
        """Returns whether this is a dry run."""
        return self.settings.dry_run

    def measured(self, part: str, name: str) -> float | None:
        """Returns a figure of a part before, or `None`.

        Args:
            part (`str`):
                The part.
            name (`str`):
                Name of the figure in any of its rows.
        """
        return next((row[name] for row in self.rows.get(part, []) if row.get(name) is not None), None)


def results_json(path: Path) -> dict[str, Any]:
    """Returns the results of a run so far; without a file, none.

    Args:
        path (`Path`):
            The file.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}}
    return found
