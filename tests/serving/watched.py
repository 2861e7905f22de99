"""What a watcher puts together from the events of `/engine/events`, as the page does."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np


class Watched:
    """The engine as it was told."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.figures: dict[str, Any] = {}
        self.marks: list[set[int]] = []
        self.requests: dict[str, list[Any]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.latencies: dict[str, dict[int, Any]] = {}

    def take(self, told: dict[str, Any]) -> None:
        """Takes in an event."""
        if "about" in told:
            self.__init__()  # type: ignore[misc]
            self.about = told["about"]
            self.marks = [set() for _ in self.about["num_blocks"]]
        self.figures = told["figures"]
        for group, mark in enumerate(told.get("marks", ())):
            if mark is not None:
                bits = np.unpackbits(np.frombuffer(base64.b64decode(mark), np.uint8))
                self.marks[group] = set(np.flatnonzero(bits).tolist())
        for name in told.get("gone", ()):
            del self.requests[name]
            self.tables.pop(name, None)
        for name in told.get("freed", ()):
            del self.tables[name]
        self.requests |= told.get("requests", {})
        for name, (place, added) in told.get("tables", {}).items():
            before = self.tables.get(name, [[] for _ in added])
            assert all(len(blocks) >= place for blocks in before), "nothing is left out"
            self.tables[name] = [blocks[:place] + more for blocks, more in zip(before, added, strict=True)]
        for kind, points in told.get("latencies", {}).items():
            self.latencies.setdefault(kind, {}).update({slot: rest for slot, *rest in points})

    def owners(self, group: int) -> list[int]:
        """For each block how many requests hold it."""
        counts = [0] * self.about["num_blocks"][group]
        for table in self.tables.values():
            for block in table[group]:
                counts[block] += 1
        return counts
