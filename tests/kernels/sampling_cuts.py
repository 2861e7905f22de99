"""Settings of draws, for the tests of each implementation of sampling."""

from __future__ import annotations

from typing import Any

CUTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5, "top_p": 0.5},
    {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    {"top_k": 300, "min_p": 0.01},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 1.7},
    {"top_p": 0.9999},
    {"top_p": 0.95, "min_p": 0.05},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {},
]
