"""A figure beside the one that must be reached."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Target:
    """A target and what was measured.

    Args:
        what (`str`):
            In words.
        limit (`float`):
            What must be reached.
        at_least (`bool`):
            Whether the figure must be at least the limit, not at most.
        figure (`float`, *optional*):
            What was measured, the worst of several; None where something it needs was not.
    """

    what: str
    limit: float
    at_least: bool
    figure: float | None

    @property
    def is_met(self) -> bool | None:
        """Returns whether it is met, or `None` if that is not known."""
        if self.figure is None:
            return None
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def describe(self) -> str:
        """Returns one line for people."""
        word = {True: "met", False: "MISSED", None: "unproven"}[self.is_met]
        figure = "-" if self.figure is None else f"{self.figure:.3g}"
        return f"{self.what}: {'>=' if self.at_least else '<='} {self.limit:g}, is {figure} ({word})"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return dataclasses.asdict(self) | {"is_met": self.is_met}
